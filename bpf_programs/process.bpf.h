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

PROGRAM("raw_tp/task_newtask") /* (task, clone flags) */
int on_new_task(struct raw_tracepoint_args *ctx)
{
	u32 tgid = current_tgid();
	struct python_process *python;
	u64 clone_flags = ctx->args[1];
	u64 task = ctx->args[0];
	u32 child = 0;
	u32 parent = tgid;

	if (CONFIG_SCOPE == SCOPE_PROCESSES && !bpf_map_lookup_elem(&targets, &tgid))
		return 0;
	if (clone_flags & CLONE_THREAD_FLAG)
		return 0;
	bpf_probe_read_kernel(&child, sizeof(child), (void *)(task + CONFIG_TASK_PID));
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
PROGRAM("raw_tp/sched_process_exit") /* (task, group_dead) */
int on_process_exit(struct raw_tracepoint_args *ctx)
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
	bpf_map_delete_elem(&open_returns, &tid);
	if (!in_scope(tgid))
		return 0;
	if (CONFIG_EXIT_HAS_GROUP_DEAD)
		last = (u8)ctx->args[1];
	if (!last)
		return 0;
	if (CONFIG_MODE == MODE_CENSUS)
		note_process_end(tgid);
	send_process(CALL_EXIT);
	bpf_map_delete_elem(&rss, &tgid);
	bpf_map_delete_elem(&breaks, &tgid);
	bpf_map_delete_elem(&python_processes, &tgid);
	return 0;
}

PROGRAM("raw_tp/sched_process_exec")
int on_process_exec(struct raw_tracepoint_args *ctx)
{
	u32 tgid = current_tgid();

	if (!in_scope(tgid))
		return 0;
	bpf_map_delete_elem(&breaks, &tgid);
	bpf_map_delete_elem(&thread_marks, &tgid); /* the thread that goes on has the id of the first one */
	send_process(CALL_EXEC);
	return 0;
}

/* The highest resident-set figure of each process and kind, read at every sample, without an event a page fault. It is the
 * central part of the kernel's counter, what /proc/PID/status shows: what CPUs have not added to it yet is missing. (A classic
 * tracepoint would have it summed over all CPUs under a lock, at every fault of the host.) */
PROGRAM("raw_tp/rss_stat") /* (mm, member) */
int on_rss_stat(struct raw_tracepoint_args *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 changed = ctx->args[0];
	u64 member = ctx->args[1];
	u32 tgid = current_tgid();
	struct rss_peaks *peaks;
	struct rss_peaks none = {};
	u64 mm = 0;
	s64 pages = 0;

	if (member >= RSS_MEMBERS || !in_scope(tgid))
		return 0;
	bpf_probe_read_kernel(&mm, sizeof(mm), (char *)task + CONFIG_TASK_MM);
	if (mm != changed) /* another task's, which this thread cannot name */
		return 0;
	bpf_probe_read_kernel(&pages, sizeof(pages),
			      (void *)(mm + CONFIG_MM_RSS + member * CONFIG_COUNTER_BYTES + CONFIG_COUNTER_COUNT));
	if (pages <= 0)
		return 0;
	peaks = bpf_map_lookup_elem(&rss, &tgid);
	if (!peaks) {
		bpf_map_update_elem(&rss, &tgid, &none, BPF_NOEXIST);
		peaks = bpf_map_lookup_elem(&rss, &tgid);
	}
	if (peaks && (u64)pages > peaks->pages[member])
		peaks->pages[member] = pages;
	return 0;
}
