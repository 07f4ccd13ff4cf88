/* Live ranges of functions: device and heap objects, VMM handles and their mappings; and the context of each thread. */
#pragma once
#include "common.h"
#include "loop.bpf.h"

enum role {
	ROLE_NONE = 0,
	ROLE_ALLOC = 1,
	ROLE_FREE = 2,
	ROLE_REALLOC = 3,          /* args[0] is the old object, the return value the new one */
	ROLE_CONTEXT_SET = 4,      /* cuCtxSetCurrent(context) */
	ROLE_CONTEXT_PUSH = 5,
	ROLE_CONTEXT_POP = 6,
	ROLE_CONTEXT_CREATE = 7,   /* cuCtxCreate(&context, …): current afterwards */
	ROLE_CONTEXT_RETAIN = 8,   /* cuDevicePrimaryCtxRetain(&context, device) */
	ROLE_CONTEXT_DESTROY = 9,
	ROLE_DEVICE_RESET = 10,    /* cuDevicePrimaryCtxReset, cudaDeviceReset */
	ROLE_HANDLE_MAP = 11,      /* cuMemMap(addr, size, offset, handle, flags) */
	ROLE_HANDLE_UNMAP = 12,    /* cuMemUnmap(addr, size) */
	ROLE_HANDLE_RELEASE = 13,  /* cuMemRelease(handle) */
	ROLE_HANDLE_RETAIN = 14,   /* cuMemRetainAllocationHandle(&handle, addr) */
	ROLE_LAUNCH_DRIVER = 15,
	ROLE_LAUNCH_RUNTIME = 16,
	ROLE_CALL = 17,            /* recorded as a call, no memory of its own */
	ROLE_LAUNCH_COOPERATIVE = 18,    /* as ROLE_LAUNCH_DRIVER, without `extra` */
	ROLE_LAUNCH_CONFIG_DRIVER = 19,  /* cuLaunchKernelEx(config, f, kernelParams, extra) */
	ROLE_LAUNCH_CONFIG_RUNTIME = 20, /* cudaLaunchKernelExC(config, f, args) */
	ROLE_IMAGE_LOAD = 21,            /* cuModuleLoadData(&module, image, …), cuLibraryLoadData likewise */
	ROLE_IMAGE_FILE = 22,            /* cuModuleLoad(&module, file name), cuLibraryLoadFromFile likewise */
	ROLE_IMAGE_REGISTER = 23,        /* __cudaRegisterFatBinary(wrapper) → handle */
	ROLE_KERNEL_REGISTER = 24,       /* __cudaRegisterFunction(handle, stub, …, name, …) */
	ROLE_KERNEL_GET = 25,            /* cuModuleGetFunction(&f, module, name), cuLibraryGetKernel likewise */
	ROLE_KERNEL_ALIAS = 26,          /* cuKernelGetFunction(&f, kernel): another handle of the same */
	ROLE_KERNEL_PARAMETER = 27,      /* cuFuncGetParamInfo(f, index, &offset, &size) */
};

static inline u64 current_context(u32 tid)
{
	struct thread_contexts *contexts_of = bpf_map_lookup_elem(&contexts, &tid);

	return contexts_of ? contexts_of->current_context : 0;
}

/* The end of a device or heap object. */
static inline void send_range_end(struct range_key *key, struct live_range *range, u64 now, u64 call_id, u8 cause)
{
	struct call_record *record = reserve_call();

	if (!record)
		return;
	record->enter_ns = now;
	record->exit_ns = now;
	record->id = call_id;
	record->parent_id = 0;
	record->addr = key->addr;
	record->size_bytes = range->size_bytes;
	record->requested_bytes = range->requested_bytes;
	record->alloc_ts_ns = range->ts_ns;
	record->context = range->context;
	record->arg0 = range->call_id;
	record->arg1 = key->space;
	record->pid = key->pid;
	record->tid = (u32)bpf_get_current_pid_tgid();
	record->user_stack = range->user_stack;
	record->python_stack = range->python_stack;
	record->mark = range->mark;
	record->pad2 = 0;
	record->result = 0;
	record->function = range->function;
	record->cpu = bpf_get_smp_processor_id();
	record->type = CALL_FREE;
	record->flags = 0;
	record->cause = cause;
	submit_call(record);
}

static inline void end_range(struct range_key *key, struct live_range *range, u64 now, u64 call_id, u8 cause)
{
	send_range_end(key, range, now, call_id, cause);
	bpf_map_delete_elem(&live_ranges, key);
}

static inline void begin_range(struct range_key *key, struct live_range *range)
{
	struct live_range *old = bpf_map_lookup_elem(&live_ranges, key);

	if (old)
		send_range_end(key, old, range->ts_ns, 0, CAUSE_REUSE);
	if (bpf_map_update_elem(&live_ranges, key, range, BPF_ANY))
		count(COUNT_LIVE_FULL);
}

struct handle_end {
	struct range_key *handle;
	struct range_key *mapped;
	u64 addr;            /* a mapping that cuMemUnmap ends, else a handle */
	u64 end;
	u64 now;
	u64 call_id;
	u64 unmaps;
};

/* One cuMemUnmap may end several adjacent mappings; a release ends one handle. */
static inline long end_next_handle(u32 turn, struct handle_end *at)
{
	struct range_key *handle = at->handle;
	struct range_key *mapped = at->mapped;
	struct live_range *known;
	struct live_range *old;

	handle->addr = at->addr;
	if (at->unmaps) {
		mapped->addr = at->addr;
		old = bpf_map_lookup_elem(&live_ranges, mapped);
		if (!old || !old->size_bytes)
			return LOOP_STOP;
		handle->addr = old->context;
		at->addr += old->size_bytes;
		bpf_map_delete_elem(&live_ranges, mapped);
	}
	known = bpf_map_lookup_elem(&live_ranges, handle);
	if (known) {
		if (at->unmaps) {
			if (known->references & 0xffff)
				known->references -= 1;
		} else if (known->references >> 16) {
			known->references -= 1 << 16;
		} else {
			known->released = 1;
		}
		if (known->released && !known->references)
			end_range(handle, known, at->now, at->call_id, CAUSE_CALL);
	}
	return at->unmaps && at->addr < at->end ? LOOP_ON : LOOP_STOP;
}

/* VMM: physical memory lives until its handle is released and its last mapping is gone (cuMemRelease).
 * Follows both and ends every handle that a call leaves without either. */
static SUBPROGRAM void track_handles(struct function_spec *spec, struct call_in_flight *call, u32 tgid, u64 now)
{
	struct range_key handle = {};
	struct range_key mapped = {};
	struct live_range mapping = {};
	struct live_range *known;
	struct handle_end at = {};

	handle.pid = tgid;
	handle.space = SPACE_HANDLE;
	mapped.pid = tgid;
	mapped.space = SPACE_MAPPED;
	mapped.addr = call->args[0];
	if (spec->role == ROLE_HANDLE_MAP) {
		handle.addr = call->args[3];
		known = bpf_map_lookup_elem(&live_ranges, &handle);
		if (!known)
			return;
		known->references += 1;
		mapping.ts_ns = now;
		mapping.size_bytes = call->args[1];
		mapping.context = handle.addr;
		if (bpf_map_update_elem(&live_ranges, &mapped, &mapping, BPF_ANY))
			count(COUNT_LIVE_FULL);
		return;
	}
	if (spec->role == ROLE_HANDLE_RETAIN) {
		handle.addr = user_u64(call->args[0]);
		known = bpf_map_lookup_elem(&live_ranges, &handle);
		if (known)
			known->references += 1 << 16;
		return;
	}
	at.handle = &handle;
	at.mapped = &mapped;
	at.addr = call->args[0];
	at.end = at.addr + call->args[1];
	at.now = now;
	at.call_id = call->id;
	at.unmaps = spec->role == ROLE_HANDLE_UNMAP;
	LOOP(64, end_next_handle, &at);
}

static inline void track_context(struct function_spec *spec, struct call_in_flight *call, u32 tid)
{
	struct thread_contexts fresh = {};
	struct thread_contexts *of = bpf_map_lookup_elem(&contexts, &tid);

	if (!of) {
		bpf_map_update_elem(&contexts, &tid, &fresh, BPF_ANY);
		of = bpf_map_lookup_elem(&contexts, &tid);
		if (!of)
			return;
	}
	if (spec->role == ROLE_CONTEXT_SET) {
		of->current_context = call->args[0];
	} else if (spec->role == ROLE_CONTEXT_PUSH || spec->role == ROLE_CONTEXT_CREATE) {
		of->below[of->depth & 7 ? (of->depth & 7) - 1 : 0] = of->current_context;
		if (of->depth < 7)
			of->depth += 1;
		of->current_context = spec->role == ROLE_CONTEXT_PUSH ? call->args[0] : user_u64(call->args[0]);
	} else if (spec->role == ROLE_CONTEXT_POP) {
		if (of->depth)
			of->depth -= 1;
		of->current_context = of->below[of->depth & 7 ? (of->depth & 7) - 1 : 0];
	}
}
