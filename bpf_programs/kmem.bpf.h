/* Kernel objects and pages: kmalloc, kmem_cache_alloc, kfree, kmem_cache_free, mm_page_alloc, mm_page_free.
 *
 * A live object is an entry of `live` by address. A free marks its entry in place (ts_ns = 0) and the next
 * allocation of the address overwrites it: cheaper than delete and insert. Entries are deleted only when the map is
 * nearly full. An allocation that finds its address still live ends the old object with cause "reuse": its
 * free fired no tracepoint (kfree_rcu) or was skipped (nested program). */
#pragma once
#include "python.bpf.h"

static inline void send_mem(u64 addr, struct live_object *object, u64 now, u8 op, u8 cause)
{
	struct mem_record *record;

	count_exactly(COUNT_MEM_PRODUCED);
	record = bpf_ringbuf_reserve(&mem_ring, sizeof(*record), 0);
	if (!record) {
		count_exactly(COUNT_MEM_DROPPED);
		return;
	}
	record->ts_ns = now;
	record->addr = addr;
	record->alloc_ts_ns = op == OP_FREE ? object->ts_ns : 0;
	record->caller = object->caller;
	record->pid = object->pid;
	record->tid = (u32)bpf_get_current_pid_tgid();
	record->user_stack = object->user_stack;
	record->kernel_stack = object->kernel_stack;
	record->site = object->site;
	record->requested_bytes = object->requested_bytes;
	record->cpu = bpf_get_smp_processor_id();
	record->op = op;
	record->cause = cause;
	record->weight = object->weight;
	record->python_stack = object->python_stack;
	record->pad = 0;
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

/* First sight of a site on this CPU: give it an id (unique without a shared counter: the CPU is part of it). */
static inline struct site_state *new_site(struct site_key *key, struct site_info *info)
{
	struct site_state fresh = {}; /* its bucket fills at the first look: it was last refilled at time 0 */
	struct site_info *known = bpf_map_lookup_elem(&sites, key);

	if (!known) {
		u32 zero = COUNT_SITE_SEQUENCE;
		u64 *sequence = bpf_map_lookup_elem(&counters, &zero);

		if (!sequence)
			return 0;
		*sequence += 1;
		info->id = (u32)*sequence << 12 | (bpf_get_smp_processor_id() & 4095);
		bpf_map_update_elem(&sites, key, info, BPF_NOEXIST);
		known = bpf_map_lookup_elem(&sites, key); /* another CPU may have been first */
		if (!known) {
			count(COUNT_SITE_FULL);
			return 0;
		}
	}
	fresh.id = known->id;
	bpf_map_update_elem(&site_states, key, &fresh, BPF_ANY);
	return bpf_map_lookup_elem(&site_states, key);
}

static inline void refill(struct bucket *bucket, u64 now, u64 every_ns, u64 most)
{
	u64 earned = (now - bucket->refilled_ns) / every_ns;

	if (!earned)
		return;
	bucket->refilled_ns = now;
	bucket->tokens += earned;
	if (bucket->tokens > most)
		bucket->tokens = most;
}

/* Weight of this allocation's stacks: 1 takes its own, N was picked 1 in N at random and speaks for the rest, 0 takes
 * none. Never another allocation's stack. A site has a bucket of stacks on each CPU, so that every allocation of a slow
 * site takes its own; the CPU has one for all sites, and while that is empty a site's stacks cost
 * CONFIG_SCARCE_COST tokens: the busy ones make room for the slow ones. */
static inline u32 stack_weight(struct site_state *state, u64 now)
{
	u32 zero = 0;
	u64 cost = 1;
	struct bucket *budget;

	if (CONFIG_STACKS == STACKS_ALL)
		return 1;
	if (CONFIG_STACKS == STACKS_NONE)
		return 0;
	budget = bpf_map_lookup_elem(&stack_budget, &zero);
	if (!budget)
		return 0;
	refill(&state->bucket, now, CONFIG_SITE_STACK_EVERY_NS, CONFIG_SITE_STACK_BURST);
	if (state->bucket.tokens) {
		refill(budget, now, CONFIG_CPU_STACK_EVERY_NS, CONFIG_CPU_STACK_BURST);
		if (!budget->tokens)
			cost = CONFIG_SCARCE_COST;
		if (state->bucket.tokens >= cost) {
			state->bucket.tokens -= cost;
			if (budget->tokens)
				budget->tokens -= 1;
			return 1;
		}
	}
	if ((bpf_get_prandom_u32() & (CONFIG_SAMPLE_ONE_IN - 1)) == 0)
		return CONFIG_SAMPLE_ONE_IN;
	return 0;
}

static inline void describe(void *ctx, struct live_object *object, struct site_state *state, u32 requested, u64 now)
{
	object->ts_ns = now;
	object->pid = current_tgid();
	object->site = state->id;
	object->requested_bytes = requested;
	object->user_stack = -1;
	object->kernel_stack = -1;
	object->weight = stack_weight(state, now);
	if (object->weight) {
		object->kernel_stack = kernel_stack_id(ctx);
		object->user_stack = user_stack_id(ctx);
		if (object->user_stack >= 0)
			object->caller = word_at_syscall_sp();
		object->python_stack = python_stack();
	}
}

static inline void count_update(long error)
{
	if (error == 0)
		count(COUNT_LIVE_INSERTED);
	else if (error == -7 /* E2BIG */ || error == -12 /* ENOMEM */)
		count(COUNT_LIVE_FULL);
	else
		count(COUNT_LIVE_BUSY);
}

static inline int kernel_alloc(void *ctx, u64 addr, struct site_key *key, struct site_info *info, u32 requested)
{
	struct live_object object = {};
	struct live_object *old;
	struct site_state *state;
	u64 now;

	/* Whoever gets the address, inside the scope or not, proves that its last object ended. */
	old = bpf_map_lookup_elem(&live, &addr);
	if (old && old->ts_ns) {
		send_mem(addr, old, bpf_ktime_get_ns(), OP_FREE, CAUSE_REUSE);
		old->ts_ns = 0;
	}
	if (!in_scope(current_tgid()))
		return 0;
	now = bpf_ktime_get_ns();
	state = bpf_map_lookup_elem(&site_states, key);
	if (!state || !state->id) {
		info->first_addr = addr;
		state = new_site(key, info);
		if (!state)
			return 0;
	}
	describe(ctx, &object, state, requested, now);
	if (old)
		*old = object;
	else
		count_update(bpf_map_update_elem(&live, &addr, &object, BPF_ANY));
	send_mem(addr, &object, now, OP_ALLOC, CAUSE_CALL);
	return 0;
}

/* True when the map is so full that a free must make room. The count is this CPU's: the map is shared, so
 * each CPU keeps to its share of the inserts. */
static inline int live_nearly_full(void)
{
	u32 inserted = COUNT_LIVE_INSERTED;
	u64 *value = bpf_map_lookup_elem(&counters, &inserted);

	return value && *value > CONFIG_LIVE_DELETE_ABOVE;
}

static inline int kernel_free(u64 addr)
{
	struct live_object *object;

	if (!addr)
		return 0;
	object = bpf_map_lookup_elem(&live, &addr);
	if (!object || !object->ts_ns) {
		if (!object)
			count(COUNT_FREE_UNMATCHED);
		return 0;
	}
	send_mem(addr, object, bpf_ktime_get_ns(), OP_FREE, CAUSE_CALL);
	object->ts_ns = 0;
	if (live_nearly_full()) {
		if (bpf_map_delete_elem(&live, &addr) == 0)
			count(COUNT_LIVE_DELETED);
	}
	return 0;
}

PROGRAM("raw_tp/kmalloc")
int on_kmalloc(struct raw_tracepoint_args *ctx)
{
	struct site_key key = {};
	struct site_info info = {};
	u64 addr = ctx->args[1];
	u32 requested = ctx->args[2];
	u32 allocated = ctx->args[3];
	u32 gfp = ctx->args[4];

	if (!addr)
		return 0;
	key.call_site = ctx->args[0];
	key.what = (u64)allocated | (u64)gfp << 32;
	info.kind = SITE_KMALLOC;
	info.size_bytes = allocated;
	return kernel_alloc(ctx, addr, &key, &info, requested);
}

/* Since v6.1 (2c1d697fb8ba, "mm/slab_common: drop kmem_alloc & avoid dereferencing fields when not using") the
 * tracepoint passes the kmem_cache itself, before that the sizes: (call site, object, cache | requested, … | allocated). */
PROGRAM("raw_tp/kmem_cache_alloc")
int on_kmem_cache_alloc(struct raw_tracepoint_args *ctx)
{
	struct site_key key = {};
	struct site_info info = {};
	struct site_state *state;
	u64 addr = ctx->args[1];
	u64 third = ctx->args[2];
	u64 fourth = ctx->args[3];
	u64 name = 0;

	if (!addr)
		return 0;
	key.call_site = ctx->args[0];
	info.kind = SITE_SLAB;
	if (!CONFIG_SLAB_HAS_CACHE) {
		key.what = (u32)fourth;
		info.size_bytes = fourth;
		info.object_bytes = third;
		return kernel_alloc(ctx, addr, &key, &info, third);
	}
	key.what = third;
	if (in_scope(current_tgid())) {
		state = bpf_map_lookup_elem(&site_states, &key);
		if (!state || !state->id) {
			bpf_probe_read_kernel(&info.size_bytes, 4, (void *)(third + CONFIG_CACHE_SIZE));
			bpf_probe_read_kernel(&info.object_bytes, 4, (void *)(third + CONFIG_CACHE_OBJECT_SIZE));
			bpf_probe_read_kernel(&name, 8, (void *)(third + CONFIG_CACHE_NAME));
			bpf_probe_read_kernel_str(info.cache, sizeof(info.cache), (void *)name);
		}
	}
	return kernel_alloc(ctx, addr, &key, &info, 0);
}

/* kfree may end an object of any cache and kmem_cache_free one of kmalloc: one pointer space. */
PROGRAM("raw_tp/kfree")
int on_kfree(struct raw_tracepoint_args *ctx)
{
	return kernel_free(ctx->args[1]);
}

PROGRAM("raw_tp/kmem_cache_free")
int on_kmem_cache_free(struct raw_tracepoint_args *ctx)
{
	return kernel_free(ctx->args[1]);
}

#define MIGRATE_MOVABLE 1 /* include/linux/mmzone.h: pages of user memory and of the page cache */

PROGRAM("raw_tp/mm_page_alloc")
int on_mm_page_alloc(struct raw_tracepoint_args *ctx)
{
	struct live_object object = {};
	struct live_object *old;
	struct site_key key = {};
	struct site_info info = {};
	struct site_state *state;
	u64 page = ctx->args[0];
	u32 order = ctx->args[1];
	u32 gfp = ctx->args[2];
	u32 migratetype = ctx->args[3];
	u64 now;

	if (!page)
		return 0;
	if (migratetype == MIGRATE_MOVABLE) { /* RSS and the page cache show these: counted, not streamed */
		count(COUNT_PAGE_USER);
		return 0;
	}
	now = bpf_ktime_get_ns();
	old = bpf_map_lookup_elem(&live_pages, &page);
	if (old && old->ts_ns) {
		send_mem(page, old, now, OP_FREE, CAUSE_REUSE);
		old->ts_ns = 0;
	}
	if (!in_scope(current_tgid()))
		return 0;
	key.what = order | migratetype << 8 | (u64)gfp << 32;
	state = bpf_map_lookup_elem(&site_states, &key);
	if (!state || !state->id) {
		info.kind = SITE_PAGE;
		info.size_bytes = CONFIG_PAGE_SIZE << (order & 31);
		info.first_addr = page;
		state = new_site(&key, &info);
		if (!state)
			return 0;
	}
	describe(ctx, &object, state, 0, now);
	if (old)
		*old = object;
	else
		count_update(bpf_map_update_elem(&live_pages, &page, &object, BPF_ANY));
	send_mem(page, &object, now, OP_ALLOC, CAUSE_CALL);
	return 0;
}

PROGRAM("raw_tp/mm_page_free")
int on_mm_page_free(struct raw_tracepoint_args *ctx)
{
	u64 page = ctx->args[0];
	struct live_object *object = bpf_map_lookup_elem(&live_pages, &page);

	if (!object || !object->ts_ns)
		return 0;
	send_mem(page, object, bpf_ktime_get_ns(), OP_FREE, CAUSE_CALL);
	object->ts_ns = 0;
	return 0;
}
