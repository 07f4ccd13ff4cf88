/* Where GPU kernels come from: images given to the driver or registered with the runtime, and the handles and names of
 * their kernels. Rare calls, apart from __cudaRegisterFunction, which a library makes for each kernel as it loads. */
#pragma once
#include "launches.bpf.h"

PROGRAM("uprobe")
int on_kernel_entry(struct pt_regs *ctx)
{
	u32 function = bpf_get_attach_cookie(ctx);
	struct function_spec *spec = bpf_map_lookup_elem(&functions, &function);
	struct call_in_flight call = {};
	struct call_key key = {};

	if (!spec || !spec->enabled || !in_scope(current_tgid()))
		return 0;
	key.tid = (u32)bpf_get_current_pid_tgid();
	key.function = function;
	call.enter_ns = bpf_ktime_get_ns();
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
	call.args[0] = ctx->regs[0];
	call.args[1] = ctx->regs[1];
	call.args[2] = ctx->regs[2];
	call.args[3] = ctx->regs[3];
#else
	call.args[0] = ctx->di;
	call.args[1] = ctx->si;
	call.args[2] = ctx->dx;
	call.args[3] = ctx->cx;
#endif
	if (bpf_map_update_elem(&calls_in_flight, &key, &call, BPF_ANY))
		count(COUNT_CALL_MAP_FULL);
	return 0;
}

PROGRAM("uretprobe")
int on_kernel_return(struct pt_regs *ctx)
{
	u32 function = bpf_get_attach_cookie(ctx);
	struct function_spec *spec = bpf_map_lookup_elem(&functions, &function);
	struct kernel_record *record;
	struct call_in_flight *call;
	struct call_key key = {};
	u64 returned = REG_RETURN(ctx);
	u64 id = bpf_get_current_pid_tgid();
	u64 name = 0;
	s64 length; /* of a name in a page that was never touched: negative, user space reads it */

	if (!spec || !spec->enabled)
		return 0;
	key.tid = (u32)id;
	key.function = function;
	call = bpf_map_lookup_elem(&calls_in_flight, &key);
	if (!call)
		return 0;
	record = bpf_ringbuf_reserve(&kernel_ring, sizeof(*record), 0);
	if (!record) {
		count_exactly(COUNT_KERNEL_DROPPED);
		bpf_map_delete_elem(&calls_in_flight, &key);
		return 0;
	}
	/* A handle exists from the return on, but another thread may launch with it at once: the time of the entry. */
	record->ts_ns = call->enter_ns;
	record->handle = 0;
	record->container = 0;
	record->address = 0;
	record->size_bytes = 0;
	record->pid = id >> 32;
	record->role = spec->role;
	record->result = spec->success == 0 ? (s32)returned : 0;
	record->name_bytes = 0;
	record->pad = 0;
	if (spec->role == ROLE_KERNEL_REGISTER) {
		record->handle = call->args[1];
		record->container = call->args[0];
		name = call->args[3];
	} else if (spec->role == ROLE_IMAGE_REGISTER) { /* __fatBinC_Wrapper_t: magic, version, address of the container */
		record->handle = returned;
		record->container = call->args[0];
		record->address = user_u64(call->args[0] + 8);
	} else if (spec->role == ROLE_KERNEL_PARAMETER) {
		record->handle = call->args[0];
		record->container = call->args[1];
		record->address = user_u64(call->args[2]);
		record->size_bytes = call->args[3] ? user_u64(call->args[3]) : 0;
	} else {
		record->handle = user_u64(call->args[0]);
		if (spec->role == ROLE_IMAGE_LOAD) {
			record->address = call->args[1];
		} else if (spec->role == ROLE_IMAGE_FILE) {
			name = call->args[1];
		} else {
			record->container = call->args[1];
			if (spec->role == ROLE_KERNEL_GET)
				name = call->args[2];
		}
	}
	if (name) {
		record->address = name;
		length = bpf_probe_read_user_str(record->name, sizeof(record->name), (void *)name);
		record->name_bytes = length > 0 ? length : 0;
	}
	bpf_map_delete_elem(&calls_in_flight, &key);
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	return 0;
}
