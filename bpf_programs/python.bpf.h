/* Python frames: CPython's own frames of the current thread, walked in its memory.
 *
 * User space enters a process in `python_processes` once it knows where its _PyRuntime lies and how the structures of
 * its version are laid out (leakscope/record/python/layout.py). A walk gives (code object, instruction) pairs, innermost
 * first; names and lines are read by user space from the process's memory. Each distinct stack is sent once, through
 * `python_ring`, before the first event that names its id. */
#pragma once
#include "common.h"

#define PYTHON_THREADS 64
#define PYTHON_MISSES 32   /* a thread without a state is looked for at its first events, then at each sixteenth */
#define PYTHON_C_OWNER 3   /* FRAME_OWNED_BY_CSTACK and above: no code object (pycore_frame.h) */
#define PYTHON_MIX 0x9E3779B97F4A7C15ULL

static inline u32 namespace_tid(void)
{
	u64 task = bpf_get_current_task();
	u64 pid = 0;
	u32 level = 0;
	u32 number = 0;

	/* struct pid keeps one struct upid (16 bytes, the number first) for each namespace, the innermost last. */
	bpf_probe_read_kernel(&pid, sizeof(pid), (void *)(task + CONFIG_TASK_THREAD_PID));
	bpf_probe_read_kernel(&level, sizeof(level), (void *)(pid + CONFIG_PID_LEVEL));
	bpf_probe_read_kernel(&number, sizeof(number), (void *)(pid + CONFIG_PID_NUMBERS + 16 * (u64)level));
	return number;
}

/* The PyThreadState of the current thread, 0 if it has none or the search goes on at its next event. Once found it is only
 * checked: a state is freed with its thread, and thread ids are handed out again. */
static inline u64 python_thread_state(struct python_process *process)
{
	struct python_thread thread = {};
	struct python_thread *known;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	int i;

	known = bpf_map_lookup_elem(&python_threads, &tid);
	if (known && known->found) {
		if (user_u64(known->state + process->thread_native_id) == known->native_id)
			return known->state;
	} else if (known) {
		known->misses += 1;
		if (known->misses > PYTHON_MISSES && known->misses & 15)
			return 0;
		thread = *known;
	}
	thread.native_id = namespace_tid();
	if (!thread.interpreter) {
		thread.interpreter = user_u64(process->runtime + process->interpreters);
		thread.state = user_u64(thread.interpreter + process->threads);
	}
#pragma clang loop unroll(disable)
	for (i = 0; i < PYTHON_THREADS; i++) {
		if (!thread.state) {
			thread.interpreter = user_u64(thread.interpreter + process->interpreter_next);
			if (!thread.interpreter)
				break;
			thread.state = user_u64(thread.interpreter + process->threads);
		} else if (user_u64(thread.state + process->thread_native_id) == thread.native_id) {
			thread.found = 1;
			break;
		} else {
			thread.state = user_u64(thread.state + process->thread_next);
		}
	}
	bpf_map_update_elem(&python_threads, &tid, &thread, BPF_ANY);
	return thread.found ? thread.state : 0;
}

static inline u64 frame_word(struct python_scratch *scratch, u32 offset)
{
	return scratch->frame[offset >> 3 & 15];
}

static inline u32 walk_python(struct python_process *process, struct python_scratch *scratch)
{
	struct python_record *record = &scratch->record;
	u64 frame;
	u64 code;
	u64 instruction;
	u64 hash;
	u32 sequence = COUNT_PYTHON_SEQUENCE;
	u32 id = 0;
	u32 *known;
	u64 *last;
	u8 owner;
	int i;

	frame = python_thread_state(process);
	if (!frame)
		return 0;
	frame = user_u64(frame + process->thread_frame);
	if (process->cframe_frame != PYTHON_NO_OFFSET)
		frame = user_u64(frame + process->cframe_frame);
	if (!frame)
		return 0;
	record->pid = current_tgid();
	hash = process->runtime ^ record->pid;
#pragma clang loop unroll(disable)
	for (i = 0; i < PYTHON_FRAMES; i++) {
		if (!frame || bpf_probe_read_user(scratch->frame, process->frame_bytes & 127, (void *)frame))
			break;
		code = 0;
		instruction = 0;
		owner = ((u8 *)scratch->frame)[process->frame_owner & 127];
		if (owner < PYTHON_C_OWNER) { /* the low bits of a stack reference are a tag (3.14, pycore_stackref.h) */
			code = frame_word(scratch, process->frame_code) & ~7ULL;
			instruction = frame_word(scratch, process->frame_instruction);
			if (process->frame_is_entry != PYTHON_NO_OFFSET &&
			    ((u8 *)scratch->frame)[process->frame_is_entry & 127])
				code |= 1;
		}
		record->frames[i].code = code;
		record->frames[i].instruction = instruction;
		hash = (hash ^ code) * PYTHON_MIX;
		hash = (hash ^ hash >> 29 ^ instruction) * PYTHON_MIX;
		frame = frame_word(scratch, process->frame_previous);
	}
	record->depth = i;
	known = bpf_map_lookup_elem(&python_stacks, &hash);
	if (known)
		return *known;
	last = bpf_map_lookup_elem(&counters, &sequence);
	if (!last)
		return 0;
	*last += 1;
	id = (u32)*last << 12 | (bpf_get_smp_processor_id() & 4095);
	record->id = id;
	if (bpf_ringbuf_output(&python_ring, record, sizeof(*record), 0)) { /* wakes the reader */
		count(COUNT_PYTHON_DROPPED);
		return 0;
	}
	bpf_map_update_elem(&python_stacks, &hash, &id, BPF_ANY);
	return id;
}

/* Id of the current thread's Python stack, 0 if it runs no Python that is known. */
static inline u32 python_stack(void)
{
	struct python_process *process;
	struct python_scratch *scratch;
	u32 tgid = current_tgid();
	u32 zero = 0;
	u32 id;

	process = bpf_map_lookup_elem(&python_processes, &tgid);
	if (!process)
		return 0;
	scratch = bpf_map_lookup_elem(&python_scratch, &zero);
	if (!scratch)
		return 0;
	if (scratch->busy) { /* an interrupt's probe inside a walk, or one of a thread that preempted it */
		count(COUNT_PYTHON_BUSY);
		return 0;
	}
	scratch->busy = 1;
	id = walk_python(process, scratch);
	scratch->busy = 0;
	return id;
}
