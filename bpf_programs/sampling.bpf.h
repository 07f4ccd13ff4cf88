/* Which allocations are recorded at all: those of at least a size, or a sample by bytes. Frees follow, as only what was
 * recorded is live. */
#pragma once
#include "common.h"

static inline void count_more(u32 which, u64 by)
{
	u64 *value = bpf_map_lookup_elem(&counters, &which);

	if (value)
		__sync_fetch_and_add(value, by);
}

/* Poisson sampling by bytes: gaps between sampled bytes are drawn from the exponential distribution of mean
 * CONFIG_SAMPLE_BYTES, so that an allocation of `size` is taken with probability 1 - exp(-size / mean) whatever was
 * allocated before it (user space fills `sample_gaps` with the quantiles). */
static inline int is_sampled(u64 size)
{
	u32 zero = 0;
	struct byte_countdown *countdown = bpf_map_lookup_elem(&byte_countdowns, &zero);
	u32 which = bpf_get_prandom_u32() & (SAMPLE_GAPS - 1);
	u64 *gap = bpf_map_lookup_elem(&sample_gaps, &which);

	if (!countdown || !gap)
		return 1;
	if (!countdown->drawn) {
		countdown->left = *gap;
		countdown->drawn = 1;
		which = bpf_get_prandom_u32() & (SAMPLE_GAPS - 1);
		gap = bpf_map_lookup_elem(&sample_gaps, &which);
		if (!gap)
			return 1;
	}
	countdown->left -= (s64)size;
	if (countdown->left > 0)
		return 0;
	countdown->left = *gap;
	return 1;
}

static inline int is_chosen(u64 size)
{
	if (size < CONFIG_MIN_SIZE) {
		count_more(COUNT_SMALL_OBJECTS, 1);
		count_more(COUNT_SMALL_BYTES, size);
		return 0;
	}
	if (CONFIG_SAMPLE_BYTES && !is_sampled(size)) {
		count_more(COUNT_UNSAMPLED_OBJECTS, 1);
		count_more(COUNT_UNSAMPLED_BYTES, size);
		return 0;
	}
	return 1;
}
