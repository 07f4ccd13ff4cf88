/* Mappings at system-call level: mmap, munmap, mremap, brk, madvise, with user stacks. Catches allocators that
 * bypass libc. A munmap that ends exactly one known mapping is matched here; anything else (parts, several at once,
 * MAP_FIXED over old ranges) is flagged CALL_PARTIAL and split in user space, where ranges can be walked. */
#pragma once
#include "marks.bpf.h"
#include "python.bpf.h"
#include "ranges.bpf.h"
#include "unwind.bpf.h"

#define MAP_FIXED_FLAG 0x10

static inline void map_stacks(void *ctx, struct map_call_in_flight *in)
{
	in->user_stack = CONFIG_UNWIND == UNWIND_ALL ? unwound_stack_of_task(ctx) : user_stack_id(ctx);
	if (in->user_stack >= 0)
		in->caller = word_at_syscall_sp();
	in->python_stack = python_stack();
}

static inline u64 syscall_argument(char *regs, int offset)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), regs + offset);
	return value;
}

/* mmap, brk and madvise are read at their exit alone, where their arguments still stand in the registers. */
static inline void arguments_at_exit(struct map_call_in_flight *in)
{
	struct task_struct *task = bpf_get_current_task_btf();
	char *regs = (char *)bpf_task_pt_regs(task);

	in->args[0] = syscall_argument(regs, REG_SYSCALL_ARG_OFFSET(0));
	in->args[1] = syscall_argument(regs, REG_SYSCALL_ARG_OFFSET(1));
	in->args[2] = syscall_argument(regs, REG_SYSCALL_ARG_OFFSET(2));
	in->args[3] = syscall_argument(regs, REG_SYSCALL_ARG_OFFSET(3));
}

static inline void send_map_call(struct map_call_in_flight *in, struct call_record *values)
{
	struct call_record *record = reserve_call();
	struct thread_call *enclosing;
	u32 tid = (u32)bpf_get_current_pid_tgid();

	if (!record)
		return;
	enclosing = bpf_map_lookup_elem(&thread_calls, &tid);
	record->enter_ns = in->enter_ns;
	record->exit_ns = values->exit_ns;
	record->id = 0;
	record->parent_id = enclosing ? enclosing->id : 0;
	record->addr = values->addr;
	record->size_bytes = values->size_bytes;
	record->requested_bytes = values->requested_bytes;
	record->alloc_ts_ns = values->alloc_ts_ns;
	record->context = values->context;
	record->caller = in->caller;
	record->arg0 = values->arg0;
	record->arg1 = values->arg1;
	record->pid = current_tgid();
	record->tid = tid;
	record->user_stack = in->user_stack;
	record->python_stack = in->python_stack;
	record->mark = current_mark();
	record->pad2 = 0;
	record->result = values->result;
	record->function = in->call;
	record->cpu = bpf_get_smp_processor_id();
	record->type = CALL_MAP;
	record->flags = values->flags;
	record->cause = CAUSE_CALL;
	submit_call(record);
}

static inline u64 whole_pages(u64 bytes)
{
	return (bytes + CONFIG_PAGE_SIZE - 1) & ~(u64)(CONFIG_PAGE_SIZE - 1);
}

static inline void begin_mapping(struct map_call_in_flight *in, u64 addr, u64 size, u64 requested, u64 flags_prot, u64 now)
{
	struct range_key key = {};
	struct live_range fresh = {};
	struct live_range *old;

	key.addr = addr;
	key.pid = current_tgid();
	key.space = SPACE_MAP_CALLS;
	fresh.ts_ns = now;
	fresh.size_bytes = size;
	fresh.requested_bytes = requested;
	fresh.caller = in->caller;
	fresh.context = flags_prot;
	fresh.user_stack = in->user_stack;
	fresh.python_stack = in->python_stack;
	fresh.mark = current_mark();
	fresh.function = in->call;
	old = bpf_map_lookup_elem(&live_ranges, &key);
	if (old)
		send_range_end(&key, old, now, 0, CALL_MAP_FREE, CAUSE_REUSE);
	if (bpf_map_update_elem(&live_ranges, &key, &fresh, BPF_ANY))
		count(COUNT_LIVE_FULL);
}

static inline int map_exit(void *ctx)
{
	struct map_call_in_flight in = {};
	struct map_call_in_flight *in_flight;
	struct call_record values = {};
	struct range_key old_key = {};
	struct live_range *old;
	struct thread_call *enclosing;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 tgid = current_tgid();
	u32 of_heap = 0;
	u32 number = 0; /* an int; the four bytes behind it are not cleared */
	s64 returned = 0;
	u64 before = 0;
	u64 *known_break;
	u64 old_addr = 0;
	u64 old_size = 0;    /* not 0: this range ends */
	u64 flags_prot = 0x22 | 3ULL << 32; /* of a remapping whose old mapping is not known: anonymous, read-write */
	int begins = 0;
	int ended = 0;
	int failed;

	if (!in_scope(tgid))
		return 0;
	TRACEPOINT_FIELD(number, ctx, SYSCALL_NUMBER_OFFSET);
	TRACEPOINT_FIELD(returned, ctx, SYSCALL_RETURN_OFFSET);
	failed = returned < 0 && returned > -4096;
	values.exit_ns = bpf_ktime_get_ns();
	if (number == CONFIG_NR_MUNMAP || number == CONFIG_NR_MREMAP) {
		in_flight = bpf_map_lookup_elem(&map_calls_in_flight, &tid);
		if (!in_flight)
			return 0;
		in = *in_flight;
		bpf_map_delete_elem(&map_calls_in_flight, &tid);
	} else {
		in.call = number == CONFIG_NR_MMAP ? MAP_MMAP : number == CONFIG_NR_BRK ? MAP_BRK : MAP_MADVISE;
		in.enter_ns = values.exit_ns;
		if (in.call == MAP_BRK) { /* most only ask where the break is */
			known_break = bpf_map_lookup_elem(&breaks, &tgid);
			before = known_break ? *known_break : 0;
			if (before == (u64)returned)
				return 0;
			bpf_map_update_elem(&breaks, &tgid, &returned, BPF_ANY);
			if (!before)
				return 0;
		}
		arguments_at_exit(&in);
		map_stacks(ctx, &in);
	}
	values.result = failed ? (s32)returned : 0;
	enclosing = bpf_map_lookup_elem(&thread_calls, &tid);
	if (enclosing && enclosing->id && (enclosing->owner & OWNER_HEAP)) {
		of_heap = MAP_IN_HEAP;
		values.flags = CALL_IN_HEAP;
	}

	if (in.call == MAP_MMAP) { /* (addr, length, prot, flags, fd) */
		values.size_bytes = whole_pages(in.args[1]);
		values.requested_bytes = in.args[1];
		values.arg0 = (u32)in.args[3] | of_heap;
		values.arg1 = in.args[2];
		if (in.args[3] & MAP_FIXED_FLAG)
			values.flags |= CALL_PARTIAL;
		flags_prot = (u32)in.args[3] | of_heap | in.args[2] << 32;
		begins = 1;
	} else if (in.call == MAP_MUNMAP) { /* (addr, length) */
		values.addr = in.args[0];
		values.size_bytes = whole_pages(in.args[1]);
		old_addr = in.args[0];
		old_size = values.size_bytes;
	} else if (in.call == MAP_MREMAP) { /* (old, old length, new length, flags, new) */
		values.size_bytes = whole_pages(in.args[2]);
		values.requested_bytes = in.args[2];
		values.arg0 = in.args[0];
		values.arg1 = whole_pages(in.args[1]);
		old_addr = in.args[0];
		old_size = values.arg1;
		begins = 1;
	} else if (in.call == MAP_BRK) { /* (new break): returns the break that holds now */
		values.addr = before;
		values.arg0 = returned;
	} else { /* madvise(addr, length, advice) */
		values.addr = in.args[0];
		values.size_bytes = whole_pages(in.args[1]);
		values.arg0 = in.args[2];
	}

	if (old_size && !failed) {
		old_key.addr = old_addr;
		old_key.pid = tgid;
		old_key.space = SPACE_MAP_CALLS;
		old = bpf_map_lookup_elem(&live_ranges, &old_key);
		if (old) {
			flags_prot = old->context;
			/* A younger one is another thread's, which was given the address before this call returned. */
			if (old->size_bytes == old_size && old->ts_ns < in.enter_ns) {
				send_range_end(&old_key, old, values.exit_ns, 0, CALL_MAP_FREE, CAUSE_CALL);
				bpf_map_delete_elem(&live_ranges, &old_key);
				ended = 1;
			}
		}
		if (ended && !begins)
			return 0; /* the whole story of an exact munmap */
		if (!ended)
			values.flags |= CALL_PARTIAL;
	}
	if (begins)
		values.addr = failed ? 0 : returned;
	values.context = flags_prot;
	send_map_call(&in, &values);
	if (begins && !failed)
		begin_mapping(&in, returned, values.size_bytes, values.requested_bytes, flags_prot, values.exit_ns);
	return 0;
}

/* munmap and mremap are entered too: what another thread maps at the address before they return is not theirs to end. */
PROGRAM("tracepoint/syscalls/sys_enter_munmap")
int on_enter_map_call(void *ctx)
{
	struct map_call_in_flight in = {};
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 number = 0;

	if (!in_scope(current_tgid()))
		return 0;
	TRACEPOINT_FIELD(number, ctx, SYSCALL_NUMBER_OFFSET);
	in.enter_ns = bpf_ktime_get_ns();
	in.call = number == CONFIG_NR_MUNMAP ? MAP_MUNMAP : MAP_MREMAP;
	TRACEPOINT_FIELD(in.args, ctx, SYSCALL_ARG_OFFSET(0));
	map_stacks(ctx, &in);
	if (bpf_map_update_elem(&map_calls_in_flight, &tid, &in, BPF_ANY))
		count(COUNT_CALL_MAP_FULL);
	return 0;
}

/* One program for all five: the number of the system call stands in the tracepoint (struct trace_event_raw_sys_exit). */
PROGRAM("tracepoint/syscalls/sys_exit_mmap")
int on_exit_map_call(void *ctx)
{
	return map_exit(ctx);
}
