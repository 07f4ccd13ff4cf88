/* Kernel objects and pages: kmalloc, kmem_cache_alloc, kfree, kmem_cache_free, mm_page_alloc, mm_page_free.
 *
 * A live object is an entry of `live` by address. A free marks its entry in place (ts_ns = 0) and the next
 * allocation of the address overwrites it: cheaper than delete and insert. Entries are deleted only when the map is
 * nearly full. An allocation that finds its address still live ends the old object with cause "reuse": its
 * free fired no tracepoint (kfree_rcu) or was skipped (nested program). */
#pragma once
#include "marks.bpf.h"
#include "census.bpf.h"
#include "python.bpf.h"
#include "sampling.bpf.h"
#include "unwind.bpf.h"

static inline void send_mem(u64 addr, struct live_object *object, u64 now, u8 op, u8 cause)
{
	struct mem_record *record;

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
	record->weight = object->weight & ~DELETE_WHEN_FREED;
	record->python_stack = object->python_stack;
	record->mark = object->mark;
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

/* What an allocation is, as its probe sees it. */
struct allocation {
	struct site_key site;
	u64 addr;
	u32 kind;
	u32 size_bytes;      /* 0: the kmem_cache of the site tells */
	u32 object_bytes;
	u32 requested_bytes;
};

/* First sight of a site: give it a number. Two CPUs may both do so at once; one number is then not used. */
static inline struct site_info *new_site(struct allocation *what)
{
	struct site_key *key = &what->site;
	struct site_info info = {};
	struct site_info *known;
	u64 number;
	u64 name = 0;

	number = next_dense_number(SEQUENCE_SITES);
	if (number && number <= CONFIG_SITE_NUMBERS) {
		info.id = number;
		info.kind = what->kind;
		info.size_bytes = what->size_bytes;
		info.object_bytes = what->object_bytes;
		info.first_addr = what->addr;
		if (what->kind == SITE_SLAB && CONFIG_SLAB_HAS_CACHE) {
			bpf_probe_read_kernel(&info.size_bytes, 4, (void *)(key->what + CONFIG_CACHE_SIZE));
			bpf_probe_read_kernel(&info.object_bytes, 4, (void *)(key->what + CONFIG_CACHE_OBJECT_SIZE));
			bpf_probe_read_kernel(&name, 8, (void *)(key->what + CONFIG_CACHE_NAME));
			bpf_probe_read_kernel_str(info.cache, sizeof(info.cache), (void *)name);
		}
		bpf_map_update_elem(&sites, key, &info, BPF_NOEXIST);
	}
	known = bpf_map_lookup_elem(&sites, key); /* another CPU may have been first */
	if (!known)
		count(COUNT_SITE_FULL);
	return known;
}

static inline int is_settled(struct site_info *site)
{
	u32 at = site->id - 1;
	u32 *settled = bpf_map_lookup_elem(&settled_sites, &at);

	return settled && *settled;
}

static inline struct site_state *state_of(struct site_info *site)
{
	u32 at = (bpf_get_smp_processor_id() % CONFIG_CPUS) * CONFIG_SITE_NUMBERS + site->id - 1;

	return bpf_map_lookup_elem(&site_states, &at);
}

/* Weight of this allocation's stacks: 1 takes its own, N was picked 1 in N at random and speaks for the rest, 0 takes
 * none. Never another allocation's stack. A site has a bucket of stacks on each CPU, so that every allocation of a slow
 * site takes its own; the CPU has one for all sites. While that is empty, and for a busy site whose frees keep up with
 * its allocations, stacks cost the site CONFIG_SCARCE_COST tokens: these make room for slow sites and growing ones. */
static inline u32 stack_weight(struct site_info *site, u64 now)
{
	u32 zero = 0;
	u64 cost = 1;
	struct bucket *budget;
	struct site_state *state;

	if (CONFIG_STACKS == STACKS_ALL)
		return 1;
	if (CONFIG_STACKS == STACKS_NONE)
		return 0;
	budget = bpf_map_lookup_elem(&stack_budget, &zero);
	state = state_of(site);
	if (!budget || !state)
		return 0;
	refill(&state->bucket, now, CONFIG_SITE_STACK_EVERY_SHIFT, CONFIG_SITE_STACK_BURST);
	if (state->bucket.tokens) {
		refill(budget, now, CONFIG_CPU_STACK_EVERY_SHIFT, CONFIG_CPU_STACK_BURST);
		if (!budget->tokens || is_settled(site))
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

static inline void describe(void *ctx, struct live_object *object, struct site_info *site, u32 requested, u64 now)
{
	object->ts_ns = now;
	object->caller = 0;
	object->python_stack = 0;
	object->pid = current_tgid();
	object->mark = CONFIG_MODE == MODE_STREAM ? current_mark() : 0; /* a census has the identity there */
	object->site = site->id;
	object->requested_bytes = requested;
	object->user_stack = -1;
	object->kernel_stack = -1;
	object->weight = stack_weight(site, now);
	if (object->weight) {
		object->kernel_stack = kernel_stack_id(ctx);
		object->user_stack = CONFIG_UNWIND == UNWIND_ALL ? unwound_stack_of_task(ctx) : user_stack_id(ctx);
		if (object->user_stack >= 0)
			object->caller = word_at_syscall_sp();
		object->python_stack = python_stack();
	}
}

/* An entry that goes in while the map is nearly full is deleted when its object ends, else only marked as free. The count
 * of entries is this CPU's; the map is shared, so each CPU keeps to its share. */
static inline int insert_live(u64 addr, struct live_object *object)
{
	u32 which = COUNT_LIVE_ENTRIES;
	u64 *entries = bpf_map_lookup_elem(&counters, &which);
	long error;

	if (entries && (s64)(*entries - entries_swept()) > (s64)CONFIG_LIVE_DELETE_ABOVE)
		object->weight |= DELETE_WHEN_FREED;
	error = bpf_map_update_elem(&live, &addr, object, BPF_ANY);
	if (error == 0 && entries)
		*entries += 1;
	else if (error == -7 /* E2BIG */ || error == -12 /* ENOMEM */)
		count(COUNT_LIVE_FULL);
	else
		count(COUNT_LIVE_BUSY);
	return error == 0;
}

/* An object ended: by a free, or unseen. */
static inline void end_object(u64 addr, struct live_object *object, u8 cause)
{
	u64 now = bpf_ktime_get_ns();

	if (CONFIG_MODE == MODE_CENSUS)
		count_end(object, now, cause);
	else
		send_mem(addr, object, now, OP_FREE, cause);
	object->ts_ns = 0;
}

static inline struct site_info *site_of(struct allocation *what)
{
	struct site_info *site = bpf_map_lookup_elem(&sites, &what->site);

	return site ? site : new_site(what);
}

static inline int kernel_alloc(void *ctx, struct allocation *what)
{
	struct live_object fresh = {};
	struct live_object *old;
	struct site_info *site;
	u64 addr = what->addr;

	/* Whoever gets the address, inside the scope or not, proves that its last object ended. */
	old = bpf_map_lookup_elem(&live, &addr);
	if (old && old->ts_ns)
		end_object(addr, old, CAUSE_REUSE);
	if (!in_scope(current_tgid()))
		return 0;
	if (CONFIG_MODE == MODE_CENSUS && has_ended(current_tgid()))
		return 0;
	site = site_of(what);
	if (!site || !is_chosen(site->size_bytes))
		return 0;
	describe(ctx, &fresh, site, what->requested_bytes, bpf_ktime_get_ns());
	if (CONFIG_MODE == MODE_CENSUS) {
		fresh.identity = identity_of(&fresh);
		if (!fresh.identity)
			return 0;
		if (old)
			*old = fresh;
		else if (!insert_live(addr, &fresh))
			return 0;
		count_allocation(&fresh);
		return 0;
	}
	send_mem(addr, &fresh, fresh.ts_ns, OP_ALLOC, CAUSE_CALL);
	if (old)
		*old = fresh;
	else
		insert_live(addr, &fresh);
	return 0;
}

static inline int kernel_free(u64 addr)
{
	struct live_object *object;
	u32 which = COUNT_LIVE_ENTRIES;
	u64 *entries;

	if (!addr)
		return 0;
	object = bpf_map_lookup_elem(&live, &addr);
	if (!object || !object->ts_ns) {
		if (!object)
			count(COUNT_FREE_UNMATCHED);
		return 0;
	}
	end_object(addr, object, CAUSE_CALL);
	if (object->weight & DELETE_WHEN_FREED) {
		entries = bpf_map_lookup_elem(&counters, &which);
		if (bpf_map_delete_elem(&live, &addr) == 0 && entries)
			*entries -= 1;
	}
	return 0;
}

PROGRAM("raw_tp/kmalloc")
int on_kmalloc(struct raw_tracepoint_args *ctx)
{
	struct allocation what = {};
	u32 gfp = ctx->args[4];

	what.addr = ctx->args[1];
	if (!what.addr)
		return 0;
	what.kind = SITE_KMALLOC;
	what.requested_bytes = ctx->args[2];
	what.size_bytes = ctx->args[3];
	what.site.call_site = ctx->args[0];
	what.site.what = (u64)what.size_bytes | (u64)gfp << 32;
	return kernel_alloc(ctx, &what);
}

/* Since v6.1 (2c1d697fb8ba, "mm/slab_common: drop kmem_alloc & avoid dereferencing fields when not using") the
 * tracepoint passes the kmem_cache itself, before that the sizes: (call site, object, cache | requested, … | allocated). */
PROGRAM("raw_tp/kmem_cache_alloc")
int on_kmem_cache_alloc(struct raw_tracepoint_args *ctx)
{
	struct allocation what = {};
	u64 third = ctx->args[2];
	u32 fourth = ctx->args[3];

	what.addr = ctx->args[1];
	if (!what.addr)
		return 0;
	what.kind = SITE_SLAB;
	what.site.call_site = ctx->args[0];
	what.site.what = third;
	if (!CONFIG_SLAB_HAS_CACHE) {
		what.site.what = fourth;
		what.size_bytes = fourth;
		what.object_bytes = third;
		what.requested_bytes = third;
	}
	return kernel_alloc(ctx, &what);
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
	struct live_object fresh = {};
	struct live_object *old;
	struct allocation what = {};
	struct site_info *site;
	u64 page = ctx->args[0];
	u32 order = ctx->args[1];
	u32 gfp = ctx->args[2];
	u32 migratetype = ctx->args[3];

	if (!page)
		return 0;
	if (migratetype == MIGRATE_MOVABLE) { /* RSS and the page cache show these: counted, not streamed */
		count(COUNT_PAGE_USER);
		return 0;
	}
	old = bpf_map_lookup_elem(&live_pages, &page);
	if (old && old->ts_ns)
		end_object(page, old, CAUSE_REUSE);
	if (!in_scope(current_tgid()))
		return 0;
	if (CONFIG_MODE == MODE_CENSUS && has_ended(current_tgid()))
		return 0;
	what.addr = page;
	what.kind = SITE_PAGE;
	what.size_bytes = CONFIG_PAGE_SIZE << (order & 31);
	what.site.what = order | migratetype << 8 | (u64)gfp << 32;
	site = site_of(&what);
	if (!site || !is_chosen(site->size_bytes))
		return 0;
	describe(ctx, &fresh, site, 0, bpf_ktime_get_ns());
	if (CONFIG_MODE == MODE_CENSUS) {
		fresh.identity = identity_of(&fresh);
		if (!fresh.identity)
			return 0;
	}
	if (old) {
		*old = fresh;
	} else if (bpf_map_update_elem(&live_pages, &page, &fresh, BPF_ANY)) {
		count(COUNT_LIVE_FULL);
		if (CONFIG_MODE == MODE_CENSUS)
			return 0;
	}
	if (CONFIG_MODE == MODE_CENSUS)
		count_allocation(&fresh);
	else
		send_mem(page, &fresh, fresh.ts_ns, OP_ALLOC, CAUSE_CALL);
	return 0;
}

PROGRAM("raw_tp/mm_page_free")
int on_mm_page_free(struct raw_tracepoint_args *ctx)
{
	u64 page = ctx->args[0];
	struct live_object *object = bpf_map_lookup_elem(&live_pages, &page);

	if (!object || !object->ts_ns)
		return 0;
	end_object(page, object, CAUSE_CALL);
	return 0;
}
