/* Stacks by number. A walk goes into a scratch of its CPU; a hash of its words tells the number under which it was sent
 * to user space before, else it is sent under the next one. `known_stacks` is a cache of buckets of four: one that falls
 * out of it, the oldest of its bucket, is sent again under another number. An entry is one word, so that no writer tears
 * it: the number below the upper 34 bits of the hash, whose lower bits choose the bucket.
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
	u64 mm = 0;
	u64 replaced = 0; /* how often */

	bpf_probe_read_kernel(&mm, sizeof(mm), task + CONFIG_TASK_MM);
	bpf_probe_read_kernel(&replaced, sizeof(replaced), task + CONFIG_TASK_SELF_EXEC_ID);
	return mixed(mm ^ (u64)current_tgid() << 32, replaced);
}

static inline u64 generation_of(u32 sequence)
{
	u64 *sent = bpf_map_lookup_elem(&sequences, &sequence);

	return sent ? *sent >> STACK_GENERATION_SHIFT : 0;
}

/* Which scratch of this CPU is this program's now, -1 for none: interrupts come in between walks, and threads preempt one
 * another. */
GLOBAL_SUBPROGRAM s32 take_scratch(void)
{
	struct stack_scratch *scratch;
	u32 which;
	int i;

#pragma unroll
	for (i = 0; i < STACK_SCRATCHES; i++) {
		which = i;
		scratch = bpf_map_lookup_elem(&stack_scratch, &which);
		if (scratch && !__sync_val_compare_and_swap(&scratch->busy, 0, 1))
			return i;
	}
	count(COUNT_STACK_BUSY);
	return -1;
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

#define ENTRY_NUMBER (STACK_DUMP_BIT - 1)

/* The number under which a stack was sent, 0 if it is not known; then `oldest` is which entry to give up next. */
static inline u32 known_number(struct stack_bucket *bucket, u64 hash, u32 *oldest)
{
	u64 least = -1;
	u64 entry;
	u32 number;
	int i;

#pragma unroll
	for (i = 0; i < STACK_WAYS; i++) {
		entry = bucket->entries[i];
		number = entry & ENTRY_NUMBER;
		if (!((entry ^ hash) & ~(u64)ENTRY_NUMBER) && number)
			return number;
		entry = (u64)number << 2 | i;
		if (entry < least)
			least = entry;
	}
	*oldest = unknown_to_verifier(least, hash) & (STACK_WAYS - 1);
	return 0;
}

static inline s32 send_stack(struct stack_record *record, u64 hash, struct stack_bucket *bucket, u32 oldest)
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
	bucket->entries[oldest] = (hash & ~(u64)ENTRY_NUMBER) | number;
	return number;
}

/* The number of the stack in a scratch of this CPU, -1 where it has none. Apart from the walk, which needs the context of
 * its program: so the verifier reads it once and not at each walk. */
GLOBAL_SUBPROGRAM s32 number_of_stack(u32 which, u64 bytes, u64 caller, u32 kind)
{
	struct stack_scratch *scratch = bpf_map_lookup_elem(&stack_scratch, &which);
	struct stack_bucket *bucket;
	struct stack_hash at = {};
	u32 index;
	u32 oldest = 0;
	s32 number;

	if (!scratch)
		return -1;
	at.record = &scratch->record;
	at.record->depth = bytes / 8 > STACK_WORDS ? STACK_WORDS : bytes / 8;
	at.record->caller = caller;
	at.record->kind = kind;
	at.hash = mixed(generation_of(SEQUENCE_STACKS), kind);
	if (kind != STACK_KERNEL)
		at.hash = mixed(at.hash ^ image_of_task(), caller);
	LOOP(STACK_WORDS / STACK_HASH_WORDS, hash_words, &at);
	index = at.hash & (CONFIG_STACK_BUCKETS - 1);
	bucket = bpf_map_lookup_elem(&known_stacks, &index);
	if (!bucket)
		return -1;
	number = known_number(bucket, at.hash, &oldest);
	return number ? number : send_stack(at.record, at.hash, bucket, oldest);
}

static inline s32 stack_number(void *ctx, u64 flags, u64 caller, u32 kind)
{
	u32 which = take_scratch();
	struct stack_scratch *scratch = bpf_map_lookup_elem(&stack_scratch, &which);
	s64 bytes;
	s32 number = -1;

	if (!scratch)
		return -1;
	bytes = bpf_get_stack(ctx, scratch->record.addresses, sizeof(scratch->record.addresses), flags);
	if (bytes > 0)
		number = number_of_stack(which, bytes, caller, kind);
	else if (kind == STACK_KERNEL)
		count(COUNT_STACK_FAULT); /* else: a kernel thread has no user stack */
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
