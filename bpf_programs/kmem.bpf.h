/* Kernel objects and pages: kmalloc, kmem_cache_alloc, kfree, kmem_cache_free, mm_page_alloc, mm_page_free.
 *
 * An allocation that finds its address still live ends the old object with cause "reuse": its free fired no tracepoint
 * (kfree_rcu) or was skipped (nested program). */
#pragma once
#include "live.bpf.h"
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

/* Whether an allocation belongs to the start of a process: it is made by a fork, or in the process's first 100 ms. */
static inline int starts_process(u64 now)
{
	struct task_struct *task = bpf_get_current_task_btf();
	char *regs;
	u64 leader = 0;
	u64 started = 0;
	s64 call = -1;

	bpf_probe_read_kernel(&started, sizeof(started), (char *)task + CONFIG_TASK_START_TIME);
	if (now - started < PROCESS_START_NS) { /* a young thread, at least */
		bpf_probe_read_kernel(&leader, sizeof(leader), (char *)task + CONFIG_TASK_GROUP_LEADER);
		bpf_probe_read_kernel(&started, sizeof(started), (void *)(leader + CONFIG_TASK_START_TIME));
		if (now - started < PROCESS_START_NS)
			return 1;
	}
	regs = (char *)bpf_task_pt_regs(task);
	bpf_probe_read_kernel(&call, sizeof(call), regs + REG_SYSCALL_NUMBER_OFFSET);
	return call == CONFIG_NR_CLONE || call == CONFIG_NR_CLONE3 || call == CONFIG_NR_FORK || call == CONFIG_NR_VFORK;
}

/* Weight of this allocation's stacks: 1 takes its own, N was picked 1 in N at random and speaks for the rest, 0 takes
 * none. Never another allocation's stack. A site has a bucket of stacks on each CPU, so that every allocation of a slow
 * site takes its own; the CPU has one for all sites, of which the starts of processes have an eighth, so that
 * short ones leave the rest to those that stay. While a bucket is empty, and for a busy site whose frees keep up with its
 * allocations, stacks cost the site CONFIG_SCARCE_COST tokens (of starts four times as many): these make room for slow
 * sites and growing ones. */
static inline u32 stack_weight(struct site_info *site, u64 now)
{
	u32 which = BUDGET_ALL;
	u32 starting = 0;
	u64 cost = 1;
	struct bucket *budget;
	struct bucket *starts;
	struct site_state *state;

	if (CONFIG_STACKS == STACKS_ALL)
		return 1;
	if (CONFIG_STACKS == STACKS_NONE)
		return 0;
	budget = bpf_map_lookup_elem(&stack_budget, &which);
	which = BUDGET_STARTS;
	starts = bpf_map_lookup_elem(&stack_budget, &which);
	state = state_of(site);
	if (!budget || !starts || !state)
		return 0;
	refill(&state->bucket, now, CONFIG_SITE_STACK_EVERY_SHIFT, CONFIG_SITE_STACK_BURST);
	if (state->bucket.tokens) {
		refill(budget, now, CONFIG_CPU_STACK_EVERY_SHIFT, CONFIG_CPU_STACK_BURST);
		refill(starts, now, CONFIG_CPU_STACK_EVERY_SHIFT + 3, CONFIG_CPU_STACK_BURST);
		if (!budget->tokens || is_settled(site))
			cost = CONFIG_SCARCE_COST;
		else
			starting = starts_process(now);
		if (starting && !starts->tokens)
			cost = 4 * CONFIG_SCARCE_COST;
		if (state->bucket.tokens >= cost) {
			state->bucket.tokens -= cost;
			if (budget->tokens)
				budget->tokens -= 1;
			if (starting && starts->tokens)
				starts->tokens -= 1;
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
	object->python_stack = 0;
	object->mark = CONFIG_MODE == MODE_STREAM ? current_mark() : 0; /* a census has the identity there */
	object->site = site->id;
	object->requested_bytes = requested;
	object->user_stack = -1;
	object->kernel_stack = -1;
	object->weight = stack_weight(site, now);
	if (object->weight) {
		object->kernel_stack = kernel_stack_number(ctx);
		object->user_stack = user_stack_of_task(ctx);
		object->python_stack = python_stack();
	}
}

/* An object ended: by a free, or unseen. */
static inline void end_object(u64 addr, struct live_place *place, u8 cause)
{
	if (CONFIG_MODE == MODE_CENSUS)
		count_end(place->object, cause);
	else
		send_mem(addr, place->object, bpf_ktime_get_ns(), OP_FREE, cause);
	end_live(addr, place);
}

static inline struct site_info *site_of(struct allocation *what)
{
	struct site_info *site = bpf_map_lookup_elem(&sites, &what->site);

	return site ? site : new_site(what);
}

static inline int kernel_alloc(void *ctx, struct allocation *what)
{
	struct live_object fresh = {};
	struct live_place place;
	struct site_info *site;
	u64 addr = what->addr;
	u32 tgid = current_tgid();

	/* Whoever gets the address, inside the scope or not, proves that its last object ended. */
	find_live(addr, &place);
	if (place.object)
		end_object(addr, &place, CAUSE_REUSE);
	if (!in_scope(tgid))
		return 0;
	if (CONFIG_MODE == MODE_CENSUS && has_ended(tgid))
		return 0;
	site = site_of(what);
	if (!site || !is_chosen(site->size_bytes))
		return 0;
	fresh.pid = tgid;
	describe(ctx, &fresh, site, what->requested_bytes, bpf_ktime_get_ns());
	if (CONFIG_MODE == MODE_CENSUS) {
		fresh.identity = identity_of(&fresh);
		if (fresh.identity && begin_live(addr, &place, &fresh))
			count_allocation(&fresh);
		return 0;
	}
	send_mem(addr, &fresh, fresh.ts_ns, OP_ALLOC, CAUSE_CALL);
	begin_live(addr, &place, &fresh);
	return 0;
}

/* Ends what is live at an address; 0 where nothing was ever recorded there. */
static inline int kernel_free(u64 addr)
{
	struct live_place place;
	int known;

	find_live(addr, &place);
	known = place.way < LIVE_WAYS || place.object;
	if (place.object)
		end_object(addr, &place, CAUSE_CALL);
	return known;
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
static inline int object_free(u64 addr)
{
	if (addr && !kernel_free(addr))
		count(COUNT_FREE_UNMATCHED);
	return 0;
}

PROGRAM("raw_tp/kfree")
int on_kfree(struct raw_tracepoint_args *ctx)
{
	return object_free(ctx->args[1]);
}

PROGRAM("raw_tp/kmem_cache_free")
int on_kmem_cache_free(struct raw_tracepoint_args *ctx)
{
	return object_free(ctx->args[1]);
}

#define MIGRATE_MOVABLE 1 /* include/linux/mmzone.h: pages of user memory and of the page cache */

PROGRAM("raw_tp/mm_page_alloc")
int on_mm_page_alloc(struct raw_tracepoint_args *ctx)
{
	struct allocation what = {};
	u32 order = ctx->args[1];
	u32 gfp = ctx->args[2];
	u32 migratetype = ctx->args[3];

	what.addr = ctx->args[0];
	if (!what.addr)
		return 0;
	if (migratetype == MIGRATE_MOVABLE) { /* RSS and the page cache show these: counted, not streamed */
		count(COUNT_PAGE_USER);
		return 0;
	}
	what.kind = SITE_PAGE;
	what.size_bytes = CONFIG_PAGE_SIZE << (order & 31);
	what.site.what = order | migratetype << 8 | (u64)gfp << 32;
	return kernel_alloc(ctx, &what);
}

PROGRAM("raw_tp/mm_page_free")
int on_mm_page_free(struct raw_tracepoint_args *ctx)
{
	if (ctx->args[0])
		kernel_free(ctx->args[0]);
	return 0;
}
