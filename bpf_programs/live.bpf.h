/* Which kernel objects and pages are live: a hash table of our own in an array map.
 *
 * Probes of an allocation and of its free spend much of their time on the cache lines and pages of this table. Here an
 * object takes one line of 64 bytes, and objects of a page of memory lie in a page of the table, so that the processor
 * finds its address as often as that of the objects themselves; a hash map of the kernel takes three lines far apart.
 *
 * A bucket is chosen by the address and has four slots. What finds them taken goes to the hash map `live_spilled`; a bit
 * of `spilled_from` tells which buckets something was spilled from, so that others need not look there.
 *
 * The word of a slot is the address of its object, and, since objects are aligned to eight bytes, in the lowest bits
 * whether it was freed (the slot is free for any address, best for the same) or is being filled. Other CPUs take a free slot
 * by compare and swap. A live slot belongs to who allocates or frees its address, and the allocator gives an address to
 * one at a time. */
#pragma once
#include "common.h"

#define SLOT_FREED 1ULL
#define SLOT_FILLING 2ULL
#define SLOT_STATE 7ULL

/* A word that others may act on once they see it: what was written or read before comes before it. x86 keeps that order
 * by itself; elsewhere an exchange does (it is a full barrier: Documentation/bpf/standardization/instruction-set.rst). */
static inline void set_word(struct live_slot *slot, u64 word)
{
#if defined(__TARGET_ARCH_x86)
	asm volatile("" ::: "memory");
	*(volatile u64 *)&slot->word = word;
#else
	__sync_lock_test_and_set(&slot->word, word);
#endif
}

static inline u64 word_of(struct live_slot *slot)
{
	return *(volatile u64 *)&slot->word;
}

static inline int take_slot(struct live_slot *slot, u64 word, u64 addr)
{
	return __sync_val_compare_and_swap(&slot->word, word, addr | SLOT_FILLING) == word;
}

/* The 4 KiB that an address lies in choose sixteen buckets, a page of the table; its 256 bytes choose one of them. Small
 * objects are more than four in 256 bytes: what tells them apart spreads them over other pages of the table. */
static inline u32 bucket_of(u64 addr)
{
	u64 page = (addr >> 12 << 3 | (addr >> 3 & 7)) * 0x9E3779B97F4A7C15ULL;

	page ^= page >> 32;
	return ((page & ~15ULL) | ((addr >> 8 ^ page) & 15)) & (CONFIG_LIVE_BUCKETS - 1);
}

/* Which slot has an address, freed or not; LIVE_WAYS if none has. */
static inline u64 way_of(struct live_bucket *bucket, u64 addr)
{
	u64 way;

#pragma unroll
	for (way = 0; way < LIVE_WAYS; way++)
		if ((word_of(&bucket->slots[way]) & ~SLOT_STATE) == addr)
			break;
	return unknown_to_verifier(way, addr);
}

/* Take a free slot for an address; LIVE_WAYS if there is none. */
static inline u64 take_free_slot(struct live_bucket *bucket, u64 addr)
{
	u64 way;
	u64 word;

#pragma unroll
	for (way = 0; way < LIVE_WAYS; way++) {
		word = word_of(&bucket->slots[way]);
		if ((!word || word & SLOT_FREED) && take_slot(&bucket->slots[way], word, addr))
			break;
	}
	return unknown_to_verifier(way, addr);
}

static inline int has_spilled(u32 at)
{
	u32 of = at >> 6;
	u64 *bits = bpf_map_lookup_elem(&spilled_from, &of);

	return bits && *bits >> (at & 63) & 1;
}

static inline void note_spilled(u32 at)
{
	u32 of = at >> 6;
	u64 *bits = bpf_map_lookup_elem(&spilled_from, &of);

	if (bits)
		__sync_fetch_and_or(bits, 1ULL << (at & 63));
}

/* Where an address, which is not 0, is in the tables. */
struct live_place {
	struct live_bucket *bucket;
	struct live_object *object;  /* what is live there, 0 if nothing is */
	u64 way;                     /* its slot, freed or not; LIVE_WAYS if it has none */
	u32 at;
};

static inline void find_live(u64 addr, struct live_place *place)
{
	struct live_slot *slot;

	place->at = bucket_of(addr);
	place->way = LIVE_WAYS;
	place->object = 0;
	place->bucket = bpf_map_lookup_elem(&live, &place->at);
	if (!place->bucket)
		return;
	place->way = way_of(place->bucket, addr);
	if (place->way < LIVE_WAYS) {
		slot = &place->bucket->slots[place->way];
		if (word_of(slot) == addr)
			place->object = &slot->object;
	} else if (has_spilled(place->at)) {
		place->object = bpf_map_lookup_elem(&live_spilled, &addr);
		if (place->object && !place->object->ts_ns) /* what could not be deleted when it was freed */
			place->object = 0;
	}
}

/* What is live there is so no more; all that is to be told of it was read. */
static inline void end_live(u64 addr, struct live_place *place)
{
	if (place->bucket && place->way < LIVE_WAYS) {
		set_word(&place->bucket->slots[place->way], addr | SLOT_FREED);
	} else if (place->object) {
		place->object->ts_ns = 0;
		bpf_map_delete_elem(&live_spilled, &addr);
	}
	place->object = 0;
}

/* Keep a live object at the place of an address where none is live; false where there is no room for it. */
static inline int begin_live(u64 addr, struct live_place *place, struct live_object *object)
{
	struct live_bucket *bucket = place->bucket;
	u64 way = place->way;
	long error;

	if (!bucket)
		return 0;
	/* Another address may take the slot meanwhile. */
	if (way >= LIVE_WAYS || !take_slot(&bucket->slots[way], addr | SLOT_FREED, addr))
		way = take_free_slot(bucket, addr);
	if (way < LIVE_WAYS) {
		bucket->slots[way].object = *object;
		set_word(&bucket->slots[way], addr);
		return 1;
	}
	note_spilled(place->at);
	error = bpf_map_update_elem(&live_spilled, &addr, object, BPF_ANY);
	if (error == -7 /* E2BIG */ || error == -12 /* ENOMEM */)
		count(COUNT_LIVE_FULL);
	else if (error)
		count(COUNT_LIVE_BUSY);
	return error == 0;
}
