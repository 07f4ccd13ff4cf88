/*
 * bpf_programs/live.bpf.h compiled for this machine.
 *
 * live_table THREADS ADDRESSES TURNS [SPILLED]: threads begin and end objects at addresses of their own, which share few
 * buckets, and look each up before. Prints how many operations found something else than they should have, how many
 * objects were refused, and what is left at the end. SPILLED is the room for what the buckets have no slot for.
 *
 * live_table buckets < ADDRESSES: prints the bucket of each.
 */
#include <pthread.h>
#include <stdlib.h>
#include "structures.h" /* tests/bpf_structures.py */

#define CONFIG_LIVE_BUCKETS 64
#define SPILL_ENTRIES 1024
#define BPF_ANY 0
#if defined(__x86_64__)
#define __TARGET_ARCH_x86
#endif

static struct live_bucket live[CONFIG_LIVE_BUCKETS] __attribute__((aligned(4096)));
static u64 spilled_from[CONFIG_LIVE_BUCKETS / 64];
static u64 counts[COUNTERS];

/* The kernel's hash map, as far as it matters here. */
static struct { u64 addr; struct live_object object; } live_spilled[SPILL_ENTRIES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static u64 spilled_now, spilled_most, spilled_limit = SPILL_ENTRIES;

static long spill_place(u64 addr)
{
	for (long i = 0; i < SPILL_ENTRIES; i++)
		if (live_spilled[i].addr == addr)
			return i;
	return -1;
}

static void *find_spilled(u64 *addr)
{
	pthread_mutex_lock(&lock);
	long at = spill_place(*addr);
	pthread_mutex_unlock(&lock);
	return at < 0 ? NULL : &live_spilled[at].object;
}

static long spill(u64 *addr, struct live_object *object)
{
	pthread_mutex_lock(&lock);
	long at = spill_place(*addr);
	if (at < 0 && spilled_now < spilled_limit) {
		at = spill_place(0);
		if (++spilled_now > spilled_most)
			spilled_most = spilled_now;
	}
	if (at >= 0) {
		live_spilled[at].object = *object;
		live_spilled[at].addr = *addr;
	}
	pthread_mutex_unlock(&lock);
	return at >= 0 ? 0 : -7;
}

static long unspill(u64 *addr)
{
	pthread_mutex_lock(&lock);
	live_spilled[spill_place(*addr)].addr = 0;
	spilled_now--;
	pthread_mutex_unlock(&lock);
	return 0;
}

static void *element(void *map, u32 *at)
{
	return map == live ? (void *)&live[*at] : (void *)&spilled_from[*at];
}

#define bpf_map_lookup_elem(map, key) \
	_Generic((key), u32 *: element, u64 *: find_spilled_in)(map, key)
#define bpf_map_update_elem(map, key, object, flags) spill(key, object)
#define bpf_map_delete_elem(map, key) unspill(key)
static void *find_spilled_in(void *map, u64 *addr)
{
	(void)map;
	return find_spilled(addr);
}

static void count(u32 which)
{
	__sync_fetch_and_add(&counts[which], 1);
}

#include "live.bpf.h"

static int threads, addresses, turns;
static u64 wrong, begun, ended;

static void *work(void *argument)
{
	u64 thread = (u64)(size_t)argument, random = thread + 1, time = 1;
	u64 *since = calloc(addresses, sizeof(*since)); /* when the object at each address was begun, 0 = none is live */
	for (int turn = 0; turn < turns; turn++) {
		random = random * 6364136223846793005ULL + 1442695040888963407ULL;
		u64 which = (random >> 33) % addresses;
		/* Neighbours belong to different threads, so that threads meet in every bucket. */
		u64 addr = 0xffff888000000000ULL + (which * threads + thread) * 64;
		struct live_place place;
		find_live(addr, &place);
		if (since[which] ? !place.object || place.object->ts_ns != since[which] || place.object->pid != thread
				 : place.object != NULL)
			__sync_fetch_and_add(&wrong, 1);
		if (since[which]) {
			end_live(addr, &place);
			since[which] = 0;
			__sync_fetch_and_add(&ended, 1);
		} else {
			struct live_object object = { .ts_ns = ++time, .pid = thread, .site = which };
			if (begin_live(addr, &place, &object)) {
				since[which] = time;
				__sync_fetch_and_add(&begun, 1);
			}
		}
	}
	free(since);
	return NULL;
}

int main(int argc, char **argv)
{
	u64 addr;
	if (argc == 2) { /* of each address on stdin its bucket */
		while (scanf("%lu", &addr) == 1)
			printf("%u\n", bucket_of(addr));
		return 0;
	}
	if (argc < 4)
		return 2;
	threads = atoi(argv[1]);
	addresses = atoi(argv[2]);
	turns = atoi(argv[3]);
	if (argc > 4)
		spilled_limit = atoi(argv[4]);
	pthread_t running[64];
	for (long i = 0; i < threads; i++)
		pthread_create(&running[i], NULL, work, (void *)i);
	for (int i = 0; i < threads; i++)
		pthread_join(running[i], NULL);
	u64 left = spilled_now, states = 0;
	for (int i = 0; i < CONFIG_LIVE_BUCKETS; i++)
		for (int way = 0; way < LIVE_WAYS; way++) {
			u64 word = live[i].slots[way].word;
			left += word && !(word & SLOT_STATE);
			states += (word & SLOT_FILLING) != 0;
		}
	printf("{\"wrong\":%lu,\"begun\":%lu,\"ended\":%lu,\"left\":%lu,\"filling\":%lu,\"spilled_most\":%lu,\"full\":%lu}\n",
	       wrong, begun, ended, left, states, spilled_most, counts[COUNT_LIVE_FULL]);
	return 0;
}
