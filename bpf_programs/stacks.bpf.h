/* Stacks by number. A walk goes into a scratch of its CPU; a hash of its words tells the number under which it was sent
 * to user space before, else it is sent under the next one. One that falls out of that cache is sent again under
 * another number.
 *
 * Every 2^16 stacks a new generation begins, in which all hashes differ: from then on no allocation names a number of an
 * older one, and user space may forget those that no live object has. The kernel's own stack maps
 * (BPF_MAP_TYPE_STACK_TRACE) never give a bucket back, so that processes which come and go, each with addresses of its
 * own, fill them within minutes. */
#pragma once
#include "common.h"
#include "loop.bpf.h"

/* What tells a process and the program it runs from all others, later ones of the same PID among them. */
static inline u64 image_of_task(void)
{
	char *task = (char *)bpf_get_current_task_btf();
	u64 leader = 0;
	u64 started = 0;
	u64 replaced = 0; /* how often */

	bpf_probe_read_kernel(&leader, sizeof(leader), task + CONFIG_TASK_GROUP_LEADER);
	bpf_probe_read_kernel(&started, sizeof(started), (void *)(leader + CONFIG_TASK_START_TIME));
	bpf_probe_read_kernel(&replaced, sizeof(replaced), task + CONFIG_TASK_SELF_EXEC_ID);
	return mixed(started, replaced);
}

static inline u64 generation_of(u32 sequence)
{
	u64 *sent = bpf_map_lookup_elem(&sequences, &sequence);

	return sent ? *sent >> STACK_GENERATION_SHIFT : 0;
}

/* A scratch that nobody on this CPU uses: interrupts come in between walks, and threads preempt one another. */
static inline struct stack_scratch *take_scratch(void)
{
	struct stack_scratch *scratch;
	u32 which;
	int i;

#pragma unroll
	for (i = 0; i < STACK_SCRATCHES; i++) {
		which = i;
		scratch = bpf_map_lookup_elem(&stack_scratch, &which);
		if (scratch && !__sync_val_compare_and_swap(&scratch->busy, 0, 1))
			return scratch;
	}
	return 0;
}

struct stack_hash {
	struct stack_record *record;
	u64 hash;
};

/* Words behind the last are zero, as bpf_get_stack leaves them. */
static inline long hash_words(u32 turn, struct stack_hash *at)
{
	u64 first = turn * STACK_HASH_WORDS;
	u64 hash = at->hash;
	int i;

	if (first > STACK_WORDS - STACK_HASH_WORDS || first >= at->record->depth)
		return LOOP_STOP;
#pragma unroll
	for (i = 0; i < STACK_HASH_WORDS; i++) {
		hash = (hash ^ at->record->addresses[first + i]) * 0xC2B2AE3D27D4EB4FULL;
		hash ^= hash >> 29;
	}
	at->hash = hash;
	return LOOP_ON;
}

static inline s32 send_stack(struct stack_record *record, u64 hash)
{
	u32 number = next_dense_number(SEQUENCE_STACKS);
	u64 bytes = sizeof(*record) - sizeof(record->addresses) + record->depth * 8ULL;

	if (bytes > sizeof(*record))
		return -1;
	record->ts_ns = bpf_ktime_get_ns();
	record->pid = current_tgid();
	record->number = number;
	if (!number || number >= STACK_DUMP_BIT || bpf_ringbuf_output(&stack_ring, record, bytes, BPF_RB_NO_WAKEUP)) {
		count_exactly(COUNT_STACK_DROPPED);
		return -1;
	}
	bpf_map_update_elem(&known_stacks, &hash, &number, BPF_ANY);
	return number;
}

/* The number of a stack, -1 where it has none. */
static SUBPROGRAM s32 stack_number(void *ctx, u64 flags, u64 caller, u32 kind)
{
	struct stack_scratch *scratch = take_scratch();
	struct stack_hash at = {};
	u32 *known;
	s64 bytes;
	s32 number = -1;

	if (!scratch) {
		count(COUNT_STACK_BUSY);
		return -1;
	}
	at.record = &scratch->record;
	bytes = bpf_get_stack(ctx, at.record->addresses, sizeof(at.record->addresses), flags);
	if (bytes > 0) {
		at.record->depth = (u64)bytes / 8 > STACK_WORDS ? STACK_WORDS : (u64)bytes / 8;
		at.record->caller = caller;
		at.record->kind = kind;
		at.hash = mixed(generation_of(SEQUENCE_STACKS), kind);
		if (kind != STACK_KERNEL)
			at.hash = mixed(at.hash ^ image_of_task(), caller);
		LOOP(STACK_WORDS / STACK_HASH_WORDS, hash_words, &at);
		known = bpf_map_lookup_elem(&known_stacks, &at.hash);
		number = known ? (s32)*known : send_stack(at.record, at.hash);
	} else if (kind == STACK_KERNEL) {
		count(COUNT_STACK_FAULT);
	} /* else: a kernel thread has no user stack */
	scratch->busy = 0;
	return number;
}

static inline s32 kernel_stack_number(void *ctx)
{
	return stack_number(ctx, 0, 0, STACK_KERNEL);
}

/* `caller`: the word at the user stack pointer, which a walk by frame pointers may miss. */
static inline s32 user_stack_number(void *ctx, u64 caller)
{
	return stack_number(ctx, BPF_F_USER_STACK, caller, STACK_USER);
}
