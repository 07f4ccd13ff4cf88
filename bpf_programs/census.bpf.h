/* Census: kernel objects are counted where they are allocated and freed, and nothing is sent.
 *
 * A live object names its identity (who allocates: process, site, stacks), and each identity has counts of its own on
 * every CPU. User space reads the counts and the live objects each interval. */
#pragma once
#include "common.h"

enum mode { MODE_STREAM = 0, MODE_CENSUS = 1 };

/* Bounded by the PIDs of the recording; an ended process is remembered to tell what its exit frees. */
static inline void note_process_end(u32 tgid)
{
	struct process_end end = {};

	end.exit_ns = bpf_ktime_get_ns();
	end.ended = 1;
	bpf_map_update_elem(&process_ends, &tgid, &end, BPF_ANY);
}

static inline void note_process_start(u32 tgid)
{
	struct process_end *end = bpf_map_lookup_elem(&process_ends, &tgid);

	if (end)
		end->ended = 0;
}

/* What a process allocates once its exit has begun is the exit's own. */
static inline int has_ended(u32 tgid)
{
	struct process_end *end = bpf_map_lookup_elem(&process_ends, &tgid);

	return end && end->ended;
}

static inline void note_outermost_call(u32 tid, u32 function, s32 user_stack)
{
	struct outermost_call open = {};

	open.user_stack = user_stack;
	open.function = function + 1;
	bpf_map_update_elem(&outermost_calls, &tid, &open, BPF_ANY);
}

/* The identity of an allocation, made at its first sight; 0 when there is no room. As for sites its number is unique
 * without a shared counter. */
static inline u32 identity_number(struct identity_key *key)
{
	struct identity_count none = {};
	u32 which = COUNT_IDENTITY_SEQUENCE;
	u32 *known = bpf_map_lookup_elem(&identities, key);
	u64 *sequence;
	u32 number;

	if (known)
		return *known;
	sequence = bpf_map_lookup_elem(&counters, &which);
	if (!sequence)
		return 0;
	*sequence += 1;
	number = (u32)*sequence << 12 | (bpf_get_smp_processor_id() & 4095);
	/* An interrupt's allocation may have taken the same number. */
	if (bpf_map_update_elem(&identity_counts, &number, &none, BPF_NOEXIST))
		return 0;
	if (bpf_map_update_elem(&identities, key, &number, BPF_NOEXIST) == 0)
		return number;
	bpf_map_delete_elem(&identity_counts, &number);
	known = bpf_map_lookup_elem(&identities, key); /* another CPU may have been first */
	return known ? *known : 0;
}

static inline u32 identity_of(struct live_object *object)
{
	struct identity_key key = {};
	struct outermost_call *open;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 number;

	if (object->weight) {
		open = bpf_map_lookup_elem(&outermost_calls, &tid);
		if (open) {
			key.call_function = open->function;
			key.call_stack = open->user_stack;
		}
	}
	key.pid = object->pid;
	key.site = object->site;
	key.kernel_stack = object->kernel_stack;
	key.user_stack = object->user_stack;
	key.python_stack = object->python_stack;
	key.weight = object->weight;
	number = identity_number(&key);
	if (number)
		return number;
	/* Without its stacks it is one of those that its call site counts together. */
	count(COUNT_IDENTITY_FULL);
	key.kernel_stack = -1;
	key.user_stack = -1;
	key.python_stack = 0;
	key.weight = 0;
	key.call_function = 0;
	key.call_stack = 0;
	number = identity_number(&key);
	if (!number)
		count(COUNT_SITE_FULL);
	return number;
}

/* All counts are added to atomically: frees in interrupts come between, and a lost one would look like a leak. */
static inline void count_allocation(struct live_object *object)
{
	u32 number = object->identity;
	struct identity_count *counts = bpf_map_lookup_elem(&identity_counts, &number);

	if (!counts)
		return;
	__sync_fetch_and_add(&counts->allocated, 1);
	if (!counts->first_ns)
		counts->first_ns = object->ts_ns;
	counts->last_ns = object->ts_ns;
}

static inline void count_end(struct live_object *object, u8 cause)
{
	u32 number = object->identity;
	u32 pid = object->pid;
	struct identity_count *counts = bpf_map_lookup_elem(&identity_counts, &number);
	struct process_end *end;

	if (!counts)
		return;
	end = bpf_map_lookup_elem(&process_ends, &pid);
	if (end && object->ts_ns < end->exit_ns)
		__sync_fetch_and_add(&counts->exited, 1);
	else if (cause == CAUSE_REUSE)
		__sync_fetch_and_add(&counts->reused, 1);
	else
		__sync_fetch_and_add(&counts->freed, 1);
}
