/* Calls of CUDA and malloc functions: one entry and one return program serve every function.
 *
 * The attach cookie is the row of `functions`, which says what the function does. Calls in flight are keyed by
 * (thread, function), so that cudaMalloc's own call survives the cuMemAlloc inside it. `thread_calls` links the
 * open calls of a thread: the outermost allocating call owns the bytes, what it calls is detail. A failed call is
 * sent as failed and never becomes a live range. */
#pragma once
#include "marks.bpf.h"
#include "launches.bpf.h"
#include "census.bpf.h"
#include "python.bpf.h"
#include "unwind.bpf.h"
#include "ranges.bpf.h"
#include "sampling.bpf.h"
#include "sizes.bpf.h"

enum addr_how { ADDR_NONE = 0, ADDR_OUT = 1, ADDR_RETURN = 2, ADDR_ARG = 3 };
enum success { SUCCESS_ZERO = 0, SUCCESS_NON_NULL = 1, SUCCESS_ALWAYS = 2 };

/* Stack dumps are for outermost calls that allocate or launch; of malloc's only where all are asked for. */
static inline int takes_dump(struct function_spec *spec, struct call_in_flight *call)
{
	if (CONFIG_UNWIND == UNWIND_NONE || call->parent_id)
		return 0;
	if (spec->space == SPACE_HEAP && CONFIG_UNWIND != UNWIND_ALL)
		return 0;
	return spec->role == ROLE_ALLOC || spec->role == ROLE_REALLOC || spec->role == ROLE_LAUNCH_DRIVER ||
	       spec->role == ROLE_LAUNCH_RUNTIME;
}

PROGRAM("uprobe")
int on_function_entry(struct pt_regs *ctx)
{
	u32 function = bpf_get_attach_cookie(ctx);
	struct function_spec *spec = bpf_map_lookup_elem(&functions, &function);
	struct call_in_flight call = {};
	struct call_key key = {};
	struct thread_call open = {};
	struct thread_call *enclosing;
	struct range_key range = {};
	struct range_key aside = {};
	struct live_range *old = 0;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 family;

	if (!spec || !spec->enabled || !in_scope(current_tgid()))
		return 0;
	key.tid = tid;
	key.function = function;
	call.enter_ns = bpf_ktime_get_ns();
	call.id = next_number(COUNT_CALL_SEQUENCE);
	call.sp = REG_SP(ctx);
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
	call.args[0] = ctx->regs[0];
	call.args[1] = ctx->regs[1];
	call.args[2] = ctx->regs[2];
	call.args[3] = ctx->regs[3];
	call.args[4] = ctx->regs[4];
	call.args[5] = ctx->regs[5];
	call.args[6] = ctx->regs[6];
	call.args[7] = ctx->regs[7];
	call.caller = ctx->regs[30];
#else
	call.args[0] = ctx->di;
	call.args[1] = ctx->si;
	call.args[2] = ctx->dx;
	call.args[3] = ctx->cx;
	call.args[4] = ctx->r8;
	call.args[5] = ctx->r9;
	call.args[6] = user_u64(call.sp + 8);
	call.args[7] = user_u64(call.sp + 16);
	call.caller = user_u64(call.sp);
#endif
	/* The enclosing call is genuine only while this frame lies below its own: a call that never returned
	 * (longjmp, killed thread) leaves an entry behind, which must not adopt later calls. */
	enclosing = bpf_map_lookup_elem(&thread_calls, &tid);
	if (enclosing && enclosing->id && enclosing->sp > call.sp) {
		call.parent_id = enclosing->id;
		call.parent_sp = enclosing->sp;
		call.enclosing_owner = enclosing->owner;
	}
	family = spec->space == SPACE_HEAP ? OWNER_HEAP : OWNER_DEVICE;
	call.nested = (call.enclosing_owner & family) != 0;
	if (takes_dump(spec, &call))
		call.user_stack = unwound_stack(ctx, (char *)ctx, SHARE_FUNCTIONS, call.caller);
	else
		call.user_stack = spec->log_call || !call.nested ? user_stack_number(ctx, call.caller) : -1;
	if (CONFIG_UNWIND == UNWIND_ALL)
		open_return(call.sp, call.caller);
	if (!call.nested && (spec->role == ROLE_ALLOC || spec->role == ROLE_REALLOC))
		call.python_stack = python_stack();
	if ((spec->role == ROLE_FREE || spec->role == ROLE_REALLOC) && !call.nested) {
		range.addr = call.args[spec->addr_arg & 7];
		range.pid = current_tgid();
		range.space = spec->space;
		old = bpf_map_lookup_elem(&live_ranges, &range);
		if (old)
			call.expected_alloc_ts_ns = old->ts_ns;
	}
	if (bpf_map_update_elem(&calls_in_flight, &key, &call, BPF_ANY)) {
		count(COUNT_CALL_MAP_FULL);
		return 0;
	}
	if (old) {
		/* What is being freed is put aside now: by the time of the return its address may be another thread's. */
		aside.addr = tid;
		aside.pid = range.pid;
		aside.space = SPACE_ENDING;
		if (bpf_map_update_elem(&live_ranges, &aside, old, BPF_ANY))
			count(COUNT_LIVE_FULL);
		else
			bpf_map_delete_elem(&live_ranges, &range);
	}
	if (CONFIG_MODE == MODE_CENSUS && !call.parent_id && spec->space != SPACE_HEAP)
		note_outermost_call(tid, function, call.user_stack);
	open.id = call.id;
	open.sp = call.sp;
	open.owner = call.enclosing_owner;
	if (spec->role == ROLE_ALLOC || spec->role == ROLE_REALLOC)
		open.owner |= family;
	if (is_launch(spec->role))
		open.owner |= OWNER_LAUNCH;
	bpf_map_update_elem(&thread_calls, &tid, &open, BPF_ANY);
	if (CONFIG_LAUNCH_ARGS && is_launch(spec->role) && !(call.enclosing_owner & OWNER_LAUNCH))
		send_launch_arguments(spec->role, &call);
	return 0;
}

static inline void send_call(struct call_in_flight *call, struct call_record *values)
{
	struct call_record *record = reserve_call();

	if (!record)
		return;
	record->enter_ns = call->enter_ns;
	record->exit_ns = values->exit_ns;
	record->id = call->id;
	record->parent_id = call->parent_id;
	record->addr = values->addr;
	record->size_bytes = values->size_bytes;
	record->requested_bytes = values->requested_bytes;
	record->alloc_ts_ns = call->expected_alloc_ts_ns;
	record->context = values->context;
	record->arg0 = values->arg0;
	record->arg1 = values->arg1;
	record->pid = values->pid;
	record->tid = values->tid;
	record->user_stack = call->user_stack;
	record->python_stack = call->python_stack;
	record->mark = current_mark();
	record->pad2 = 0;
	record->result = values->result;
	record->function = values->function;
	record->cpu = bpf_get_smp_processor_id();
	record->type = values->type;
	record->flags = call->nested ? CALL_NESTED : 0;
	record->cause = CAUSE_CALL;
	submit_call(record);
}

PROGRAM("uretprobe")
int on_function_return(struct pt_regs *ctx)
{
	u32 function = bpf_get_attach_cookie(ctx);
	struct function_spec *spec = bpf_map_lookup_elem(&functions, &function);
	struct call_in_flight call = {};
	struct call_in_flight *in_flight;
	struct call_key key = {};
	struct thread_call outer = {};
	struct thread_call *open;
	struct call_record values = {};
	struct range_key range = {};
	struct live_range fresh = {};
	struct live_range *known;
	u64 id = bpf_get_current_pid_tgid();
	u64 returned = REG_RETURN(ctx);
	u32 tid = (u32)id;
	u32 tgid = id >> 32;
	int ok;
	int chosen = 1;

	if (!spec || !spec->enabled)
		return 0;
	if (CONFIG_UNWIND == UNWIND_ALL)
		close_return(REG_SP(ctx));
	key.tid = tid;
	key.function = function;
	in_flight = bpf_map_lookup_elem(&calls_in_flight, &key);
	if (!in_flight)
		return 0;
	call = *in_flight;
	bpf_map_delete_elem(&calls_in_flight, &key);
	if (CONFIG_MODE == MODE_CENSUS && !call.parent_id)
		bpf_map_delete_elem(&outermost_calls, &tid);
	open = bpf_map_lookup_elem(&thread_calls, &tid);
	if (open) { /* the enclosing call is innermost again; its frame lies above this one */
		outer.id = call.parent_id;
		outer.sp = call.parent_sp;
		outer.owner = call.enclosing_owner;
		bpf_map_update_elem(&thread_calls, &tid, &outer, BPF_ANY);
	}

	ok = spec->success == SUCCESS_ALWAYS || (spec->success == SUCCESS_ZERO ? (u32)returned == 0 : returned != 0);
	values.exit_ns = bpf_ktime_get_ns();
	values.pid = tgid;
	values.tid = tid;
	values.function = function;
	values.type = CALL_FUNCTION;
	values.result = spec->success == SUCCESS_ZERO ? (s32)returned : (ok ? 0 : -1);
	values.context = current_context(tid);
	values.arg0 = call.args[0];
	values.arg1 = call.args[1];
	range.pid = tgid;
	range.space = spec->space;

	if (is_launch(spec->role)) {
		values.type = CALL_LAUNCH;
		values.arg1 = values.context;
		describe_launch(spec->role, &call, &values);
	} else if (spec->role == ROLE_ALLOC || spec->role == ROLE_REALLOC) {
		values.requested_bytes = requested_bytes(spec, &call);
		values.size_bytes = taken_bytes(spec, &call, values.requested_bytes);
		if (ok) {
			if (spec->addr_how == ADDR_OUT)
				range.addr = user_u64(call.args[spec->addr_arg & 7]);
			else if (spec->addr_how == ADDR_RETURN)
				range.addr = returned;
			else
				range.addr = call.args[spec->addr_arg & 7];
			values.addr = range.addr;
		}
	} else if (spec->role == ROLE_FREE) {
		values.addr = call.args[spec->addr_arg & 7];
	} else if (spec->role == ROLE_CONTEXT_CREATE || spec->role == ROLE_CONTEXT_RETAIN) {
		values.addr = user_u64(call.args[0]);
	} else if (spec->role == ROLE_HANDLE_MAP || spec->role == ROLE_HANDLE_UNMAP) {
		values.addr = call.args[0];
		values.size_bytes = call.args[1];
		values.arg1 = spec->role == ROLE_HANDLE_MAP ? call.args[3] : 0;
	} else {
		values.addr = call.args[0];
	}
	if (spec->space == SPACE_HEAP && ok && range.addr && !call.nested)
		chosen = is_chosen(values.size_bytes);
	if (chosen && (spec->log_call || (spec->role == ROLE_ALLOC && !call.nested) || spec->role == ROLE_REALLOC))
		send_call(&call, &values);
	if (call.expected_alloc_ts_ns) { /* a free: of what its entry put aside */
		struct range_key ended = range;
		struct range_key aside = {};

		ended.addr = call.args[spec->addr_arg & 7];
		aside.addr = tid;
		aside.pid = tgid;
		aside.space = SPACE_ENDING;
		known = bpf_map_lookup_elem(&live_ranges, &aside);
		if (known && known->ts_ns == call.expected_alloc_ts_ns) {
			if (ok)
				send_range_end(&ended, known, values.exit_ns, call.id, CAUSE_CALL);
			else
				bpf_map_update_elem(&live_ranges, &ended, known, BPF_NOEXIST);
			bpf_map_delete_elem(&live_ranges, &aside);
		}
	}
	if (!ok)
		return 0;

	if (!chosen) {
		known = bpf_map_lookup_elem(&live_ranges, &range);
		if (known) /* whoever gets the address proves that its last object ended */
			end_range(&range, known, values.exit_ns, 0, CAUSE_REUSE);
		return 0;
	}
	if ((spec->role == ROLE_ALLOC || spec->role == ROLE_REALLOC) && !call.nested && range.addr) {
		fresh.ts_ns = values.exit_ns;
		fresh.size_bytes = values.size_bytes;
		fresh.requested_bytes = values.requested_bytes;
		fresh.context = values.context;
		fresh.call_id = call.id;
		fresh.user_stack = call.user_stack;
		fresh.python_stack = call.python_stack;
		fresh.mark = current_mark();
		fresh.function = function;
		begin_range(&range, &fresh);
	}
	if (spec->role >= ROLE_CONTEXT_SET && spec->role <= ROLE_CONTEXT_CREATE)
		track_context(spec, &call, tid);
	if (spec->role >= ROLE_HANDLE_MAP && spec->role <= ROLE_HANDLE_RETAIN)
		track_handles(spec, &call, tgid, values.exit_ns);
	return 0;
}
