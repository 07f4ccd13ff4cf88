/* NVTX ranges: what the injection library (nvtx/injection.c) tells about the threads of the targets.
 *
 * The library keeps the stack of open ranges of each thread and passes the innermost one along, so here is one number a
 * thread: that of the range which its allocations carry. Numbers are unique in a process; with the PID in front they
 * are the ids of the table `marks`. */
#pragma once
#include "common.h"

#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
#define MARK_ARG(ctx, n) ((ctx)->regs[n])
#else
#define MARK_ARG(ctx, n) ((n) == 0 ? (ctx)->di : (n) == 1 ? (ctx)->si : (n) == 2 ? (ctx)->dx : (n) == 3 ? (ctx)->cx : (ctx)->r8)
#endif

/* Number of the innermost range open on the current thread, 0 if none is or ranges are not recorded. */
static inline u32 current_mark(void)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 *number;

	if (!CONFIG_NVTX)
		return 0;
	number = bpf_map_lookup_elem(&thread_marks, &tid);
	return number ? *number : 0;
}

static inline void set_current_mark(u32 tid, u32 number)
{
	u32 *known = bpf_map_lookup_elem(&thread_marks, &tid);

	if (known)
		*known = number;
	else if (number && bpf_map_update_elem(&thread_marks, &tid, &number, BPF_ANY))
		count(COUNT_MARK_THREADS_FULL);
}

static inline void send_mark(u32 type, u32 tid, struct mark_arguments *from)
{
	struct mark_record *record;
	u64 bytes = from->bytes;

	record = bpf_ringbuf_reserve(&mark_ring, sizeof(*record), 0);
	if (!record) {
		count_exactly(COUNT_MARK_DROPPED);
		return;
	}
	record->ts_ns = bpf_ktime_get_ns();
	record->number = from->number;
	record->outer = from->outer;
	record->pid = current_tgid();
	record->tid = tid;
	record->type = type;
	record->bytes = bytes > MARK_NAME_BYTES ? MARK_NAME_BYTES + 1 : bytes;
	__builtin_memset(record->domain, 0, sizeof(record->domain));
	__builtin_memset(record->name, 0, sizeof(record->name));
	if (bytes > MARK_NAME_BYTES)
		bytes = MARK_NAME_BYTES;
	if (from->name && bpf_probe_read_user(record->name, bytes, (void *)from->name))
		record->bytes = MARK_NAME_UNREADABLE;
	if (from->domain)
		bpf_probe_read_user(record->domain, sizeof(record->domain), (void *)from->domain);
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

/* One program for all functions of the library; the attach cookie tells which one was called. */
PROGRAM("uprobe")
int on_mark(struct pt_regs *ctx)
{
	u32 type = bpf_get_attach_cookie(ctx);
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct mark_arguments from = {};

	if (!in_scope(current_tgid()))
		return 0;
	if (type == MARK_TOO_DEEP) {
		count(COUNT_MARK_TOO_DEEP);
		return 0;
	}
	if (type == MARK_POP || type == MARK_END) {
		from.number = MARK_ARG(ctx, 0);
	} else {
		from.name = MARK_ARG(ctx, 0);
		from.bytes = MARK_ARG(ctx, 1);
		from.domain = MARK_ARG(ctx, 2);
		from.number = MARK_ARG(ctx, 3);
		if (type != MARK_START)
			from.outer = (u32)MARK_ARG(ctx, 4);
	}
	if (type == MARK_PUSH)
		set_current_mark(tid, from.number);
	else if (type == MARK_POP)
		set_current_mark(tid, MARK_ARG(ctx, 1));
	send_mark(type, tid, &from);
	return 0;
}
