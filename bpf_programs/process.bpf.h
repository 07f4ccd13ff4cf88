/* Lives of processes: following children, the moment an exit begins, replaced images, resident-set counters. */
#pragma once
#include "census.bpf.h"

#define CLONE_THREAD_FLAG 0x00010000

static inline void send_process(u8 type)
{
	struct call_record *record = reserve_call();
	u64 id = bpf_get_current_pid_tgid();

	if (!record)
		return;
	record->enter_ns = bpf_ktime_get_ns();
	record->exit_ns = record->enter_ns;
	record->id = 0;
	record->parent_id = 0;
	record->addr = 0;
	record->size_bytes = 0;
	record->requested_bytes = 0;
	record->alloc_ts_ns = 0;
	record->context = 0;
	record->caller = 0;
	record->arg0 = 0;
	record->arg1 = 0;
	record->pid = id >> 32;
	record->tid = (u32)id;
	record->user_stack = -1;
	record->python_stack = 0;
	record->mark = 0;
	record->pad2 = 0;
	record->result = 0;
	record->function = 0;
	record->cpu = bpf_get_smp_processor_id();
	record->type = type;
	record->flags = 0;
	record->cause = 0;
	submit_call(record);
}

PROGRAM("tracepoint/task/task_newtask")
int on_new_task(void *ctx)
{
	u32 tgid = current_tgid();
	struct python_process *python;
	u64 clone_flags = 0;
	u32 child = 0;
	u32 parent = tgid;

	if (CONFIG_SCOPE == SCOPE_PROCESSES && !bpf_map_lookup_elem(&targets, &tgid))
		return 0;
	TRACEPOINT_FIELD(clone_flags, ctx, CONFIG_NEWTASK_CLONE_FLAGS);
	if (clone_flags & CLONE_THREAD_FLAG)
		return 0;
	TRACEPOINT_FIELD(child, ctx, CONFIG_NEWTASK_PID);
	if (CONFIG_SCOPE == SCOPE_PROCESSES)
		bpf_map_update_elem(&targets, &child, &parent, BPF_ANY);
	if (CONFIG_MODE == MODE_CENSUS)
		note_process_start(child);
	python = bpf_map_lookup_elem(&python_processes, &tgid);
	if (python) /* the same interpreter at the same address, until it executes another program */
		bpf_map_update_elem(&python_processes, &child, python, BPF_ANY);
	return 0;
}

/* Fires before descriptors and mappings are torn down (do_exit), once a thread. The evidence of a process ends when its last
 * thread gets here: `group_dead` where the tracepoint has it (6.18 does, 6.1 does not), else the leader's exit. */
PROGRAM("tracepoint/sched/sched_process_exit")
int on_process_exit(void *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32;
	u32 tid = (u32)id;
	u8 last = tgid == tid;

	bpf_map_delete_elem(&thread_calls, &tid);
	bpf_map_delete_elem(&contexts, &tid);
	bpf_map_delete_elem(&python_threads, &tid);
	bpf_map_delete_elem(&thread_marks, &tid);
	if (CONFIG_MODE == MODE_CENSUS)
		bpf_map_delete_elem(&outermost_calls, &tid);
	if (!in_scope(tgid))
		return 0;
	if (CONFIG_EXIT_GROUP_DEAD >= 0)
		TRACEPOINT_FIELD(last, ctx, CONFIG_EXIT_GROUP_DEAD);
	if (!last)
		return 0;
	if (CONFIG_MODE == MODE_CENSUS)
		note_process_end(tgid);
	send_process(CALL_EXIT);
	bpf_map_delete_elem(&breaks, &tgid);
	bpf_map_delete_elem(&python_processes, &tgid);
	return 0;
}

PROGRAM("tracepoint/sched/sched_process_exec")
int on_process_exec(void *ctx)
{
	u32 tgid = current_tgid();

	if (!in_scope(tgid))
		return 0;
	bpf_map_delete_elem(&breaks, &tgid);
	bpf_map_delete_elem(&thread_marks, &tgid); /* the thread that goes on has the id of the first one */
	send_process(CALL_EXEC);
	return 0;
}

/* The latest and the highest resident-set figure of each process and member, read at every sample: exact peaks
 * without an event a page fault. `curr` = 0 is another task's mm, which this thread cannot name. */
PROGRAM("tracepoint/kmem/rss_stat")
int on_rss_stat(void *ctx)
{
	struct rss_key key = {};
	struct rss_value fresh = {};
	struct rss_value *known;
	u32 is_current = 0;
	s64 bytes = 0;

	key.pid = current_tgid();
	if (!in_scope(key.pid))
		return 0;
	TRACEPOINT_FIELD(is_current, ctx, CONFIG_RSS_CURR);
	if (!is_current)
		return 0;
	TRACEPOINT_FIELD(key.member, ctx, CONFIG_RSS_MEMBER);
	TRACEPOINT_FIELD(bytes, ctx, CONFIG_RSS_SIZE);
	if (bytes < 0)
		bytes = 0;
	known = bpf_map_lookup_elem(&rss, &key);
	if (known) {
		known->last_bytes = bytes;
		if ((u64)bytes > known->peak_bytes)
			known->peak_bytes = bytes;
		return 0;
	}
	fresh.last_bytes = bytes;
	fresh.peak_bytes = bytes;
	bpf_map_update_elem(&rss, &key, &fresh, BPF_ANY);
	return 0;
}
