/* Mappings at system-call level: mmap, munmap, mremap, brk, madvise. Catches allocators that bypass libc. Each call is
 * told as it was: what it maps and what it ends is followed in user space, where ranges can be walked. */
#pragma once
#include "marks.bpf.h"
#include "python.bpf.h"
#include "unwind.bpf.h"

static inline u64 syscall_argument(int which)
{
	struct task_struct *task = bpf_get_current_task_btf();
	char *regs = (char *)bpf_task_pt_regs(task);
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), regs + REG_SYSCALL_ARG_OFFSET(which));
	return value;
}

static inline u64 whole_pages(u64 bytes)
{
	return (bytes + CONFIG_PAGE_SIZE - 1) & ~(u64)(CONFIG_PAGE_SIZE - 1);
}

/* Arguments still stand in the registers when a call returns. What moves the break is told by where it was before. */
static inline int map_exit(void *ctx)
{
	struct call_record *record;
	struct thread_call *enclosing;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 tgid = current_tgid();
	u32 call;
	u32 number = 0; /* an int; the four bytes behind it are not cleared */
	u32 python = 0;
	s32 user_stack = -1;
	s64 returned = 0;
	u64 now = bpf_ktime_get_ns();
	u64 enter_ns = now;
	u64 before = 0;
	u64 *known_break;
	u64 *entered;
	int of_heap;
	int failed;

	if (!in_scope(tgid))
		return 0;
	TRACEPOINT_FIELD(number, ctx, SYSCALL_NUMBER_OFFSET);
	TRACEPOINT_FIELD(returned, ctx, SYSCALL_RETURN_OFFSET);
	failed = returned < 0 && returned > -4096;
	call = number == CONFIG_NR_MMAP	    ? MAP_MMAP
	       : number == CONFIG_NR_MUNMAP ? MAP_MUNMAP
	       : number == CONFIG_NR_MREMAP ? MAP_MREMAP
	       : number == CONFIG_NR_BRK    ? MAP_BRK
					    : MAP_MADVISE;
	if (call == MAP_MUNMAP || call == MAP_MREMAP) {
		entered = bpf_map_lookup_elem(&map_calls_in_flight, &tid);
		if (entered) {
			enter_ns = *entered;
			bpf_map_delete_elem(&map_calls_in_flight, &tid);
		}
	}
	if (call == MAP_BRK) { /* most only ask where the break is */
		known_break = bpf_map_lookup_elem(&breaks, &tgid);
		before = known_break ? *known_break : 0;
		if (before == (u64)returned)
			return 0;
		bpf_map_update_elem(&breaks, &tgid, &returned, BPF_ANY);
		if (!before)
			return 0;
	}
	if (call != MAP_MUNMAP) { /* which frees by its addresses */
		user_stack = user_stack_of_task(ctx);
		python = python_stack();
	}
	enclosing = bpf_map_lookup_elem(&thread_calls, &tid);
	of_heap = enclosing && enclosing->id && (enclosing->owner & OWNER_HEAP);

	record = reserve_call();
	if (!record)
		return 0;
	record->enter_ns = enter_ns;
	record->exit_ns = now;
	record->id = 0;
	record->parent_id = enclosing ? enclosing->id : 0;
	record->alloc_ts_ns = 0;
	record->context = 0;
	record->requested_bytes = 0;
	record->arg1 = 0;
	if (call == MAP_MMAP) { /* (addr, length, prot, flags, fd) */
		record->addr = failed ? 0 : returned;
		record->requested_bytes = syscall_argument(1);
		record->size_bytes = whole_pages(record->requested_bytes);
		record->arg0 = (u32)syscall_argument(3) | (of_heap ? MAP_IN_HEAP : 0);
		record->arg1 = syscall_argument(2);
	} else if (call == MAP_MREMAP) { /* (old, old length, new length, flags, new) */
		record->addr = failed ? 0 : returned;
		record->requested_bytes = syscall_argument(2);
		record->size_bytes = whole_pages(record->requested_bytes);
		record->arg0 = syscall_argument(0);
		record->arg1 = whole_pages(syscall_argument(1));
		record->context = syscall_argument(3);
	} else if (call == MAP_BRK) { /* (new break): returns the break that holds now */
		record->addr = before;
		record->size_bytes = 0;
		record->arg0 = returned;
	} else { /* munmap(addr, length), madvise(addr, length, advice) */
		record->addr = syscall_argument(0);
		record->size_bytes = whole_pages(syscall_argument(1));
		record->arg0 = syscall_argument(2);
	}
	record->pid = tgid;
	record->tid = tid;
	record->user_stack = user_stack;
	record->python_stack = python;
	record->mark = current_mark();
	record->pad2 = 0;
	record->result = failed ? (s32)returned : 0;
	record->function = call;
	record->cpu = bpf_get_smp_processor_id();
	record->type = CALL_MAP;
	record->flags = of_heap ? CALL_IN_HEAP : 0;
	record->cause = CAUSE_CALL;
	submit_call(record);
	return 0;
}

/* munmap and mremap are entered too: what another thread maps at the address before they return is not theirs to end. */
PROGRAM("tracepoint/syscalls/sys_enter_munmap")
int on_enter_map_call(void *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u32 tid = (u32)bpf_get_current_pid_tgid();

	if (!in_scope(current_tgid()))
		return 0;
	if (bpf_map_update_elem(&map_calls_in_flight, &tid, &now, BPF_ANY))
		count(COUNT_CALL_MAP_FULL);
	return 0;
}

/* One program for all five: the number of the system call stands in the tracepoint (struct trace_event_raw_sys_exit). */
PROGRAM("tracepoint/syscalls/sys_exit_mmap")
int on_exit_map_call(void *ctx)
{
	return map_exit(ctx);
}
