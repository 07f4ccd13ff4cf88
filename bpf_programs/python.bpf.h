/* Python frames: CPython's own frames of the current thread, walked in its memory.
 *
 * User space enters a process in `python_processes` once it knows where its _PyRuntime lies and how the structures of
 * its version are laid out (leakscope/record/python/layout.py). A walk gives (code object, instruction) pairs, innermost
 * first; names and lines are read by user space from the process's memory. Each distinct stack is sent once, through
 * `python_ring`, before the first event that names its id. */
#pragma once
#include "stacks.bpf.h"

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

struct python_search {
	struct python_process *process;
	struct python_thread thread;
};

static inline long next_python_thread(u32 turn, struct python_search *search)
{
	struct python_process *process = search->process;
	struct python_thread *thread = &search->thread;

	if (!thread->state) {
		thread->interpreter = user_u64(thread->interpreter + process->interpreter_next);
		if (!thread->interpreter)
			return LOOP_STOP;
		thread->state = user_u64(thread->interpreter + process->threads);
	} else if (user_u64(thread->state + process->thread_native_id) == thread->native_id) {
		thread->found = 1;
		return LOOP_STOP;
	} else {
		thread->state = user_u64(thread->state + process->thread_next);
	}
	return LOOP_ON;
}

/* The PyThreadState of the current thread, 0 if it has none or the search goes on at its next event. Once found it is only
 * checked: a state is freed with its thread, and thread ids are handed out again. */
static inline u64 python_thread_state(struct python_process *process)
{
	struct python_search search = {};
	struct python_thread *thread = &search.thread;
	struct python_thread *known;
	u32 tid = (u32)bpf_get_current_pid_tgid();

	known = bpf_map_lookup_elem(&python_threads, &tid);
	if (known && known->found) {
		if (user_u64(known->state + process->thread_native_id) == known->native_id)
			return known->state;
	} else if (known) {
		known->misses += 1;
		if (known->misses > PYTHON_MISSES && known->misses & 15)
			return 0;
		search.thread = *known;
	}
	search.process = process;
	thread->native_id = namespace_tid();
	if (!thread->interpreter) {
		thread->interpreter = user_u64(process->runtime + process->interpreters);
		thread->state = user_u64(thread->interpreter + process->threads);
	}
	LOOP(PYTHON_THREADS, next_python_thread, &search);
	bpf_map_update_elem(&python_threads, &tid, thread, BPF_ANY);
	return thread->found ? thread->state : 0;
}

static inline u64 frame_word(struct python_scratch *scratch, u32 offset)
{
	return scratch->frame[offset >> 3 & 15];
}

struct python_walk {
	struct python_process *process;
	struct python_scratch *scratch;
	u64 frame;
	u64 hash;
};

static inline long next_python_frame(u32 turn, struct python_walk *walk)
{
	struct python_process *process = walk->process;
	struct python_scratch *scratch = walk->scratch;
	struct python_frame *out = &scratch->record.frames[turn & (PYTHON_FRAMES - 1)];
	u64 code = 0;
	u64 instruction = 0;
	u64 hash;
	u8 owner;

	if (!walk->frame || bpf_probe_read_user(scratch->frame, process->frame_bytes & 127, (void *)walk->frame))
		return LOOP_STOP;
	owner = ((u8 *)scratch->frame)[process->frame_owner & 127];
	if (owner < PYTHON_C_OWNER) { /* the low bits of a stack reference are a tag (3.14, pycore_stackref.h) */
		code = frame_word(scratch, process->frame_code) & ~7ULL;
		instruction = frame_word(scratch, process->frame_instruction);
		if (process->frame_is_entry != PYTHON_NO_OFFSET && ((u8 *)scratch->frame)[process->frame_is_entry & 127])
			code |= 1;
	}
	out->code = code;
	out->instruction = instruction;
	hash = (walk->hash ^ code) * PYTHON_MIX;
	walk->hash = (hash ^ hash >> 29 ^ instruction) * PYTHON_MIX;
	walk->frame = frame_word(scratch, process->frame_previous);
	scratch->record.depth = turn + 1;
	return LOOP_ON;
}

static inline u32 walk_python(struct python_process *process, struct python_scratch *scratch)
{
	struct python_record *record = &scratch->record;
	struct python_walk walk = {};
	u64 frame;
	u64 hash;
	u32 id = 0;
	u32 *known;

	frame = python_thread_state(process);
	if (!frame)
		return 0;
	frame = user_u64(frame + process->thread_frame);
	if (process->cframe_frame != PYTHON_NO_OFFSET)
		frame = user_u64(frame + process->cframe_frame);
	if (!frame)
		return 0;
	record->pid = current_tgid();
	record->depth = 0;
	walk.process = process;
	walk.scratch = scratch;
	walk.frame = frame;
	walk.hash = mixed(image_of_task(), generation_of(SEQUENCE_PYTHON));
	LOOP(PYTHON_FRAMES, next_python_frame, &walk);
	hash = walk.hash;
	known = bpf_map_lookup_elem(&python_stacks, &hash);
	if (known)
		return *known;
	id = next_dense_number(SEQUENCE_PYTHON);
	if (!id)
		return 0;
	record->id = id;
	if (bpf_ringbuf_output(&python_ring, record, sizeof(*record), 0)) { /* wakes the reader */
		count(COUNT_PYTHON_DROPPED);
		return 0;
	}
	bpf_map_update_elem(&python_stacks, &hash, &id, BPF_ANY);
	return id;
}

/* Id of the current thread's Python stack, 0 if it runs no Python that is known. */
GLOBAL_SUBPROGRAM u32 python_stack(void)
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
