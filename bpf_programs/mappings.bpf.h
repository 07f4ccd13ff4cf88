/* Mappings at system-call level: mmap, munmap, mremap, brk, madvise, with user stacks. Catches allocators that
 * bypass libc. A munmap that ends exactly one known mapping is matched here; anything else (parts, several at once,
 * MAP_FIXED over old ranges) is flagged CALL_PARTIAL and split in user space, where ranges can be walked. */
#pragma once
#include "common.h"

#define MAP_FIXED_FLAG 0x10

static inline int map_enter(void *ctx, u32 call)
{
	struct map_call_in_flight in_flight = {};
	u32 tid = (u32)bpf_get_current_pid_tgid();

	if (!in_scope(current_tgid()))
		return 0;
	in_flight.enter_ns = bpf_ktime_get_ns();
	in_flight.call = call;
	TRACEPOINT_FIELD(in_flight.args, ctx, SYSCALL_ARG_OFFSET(0));
	in_flight.user_stack = user_stack_id(ctx);
	if (in_flight.user_stack >= 0)
		in_flight.caller = word_at_syscall_sp();
	if (bpf_map_update_elem(&map_calls_in_flight, &tid, &in_flight, BPF_ANY))
		count(COUNT_CALL_MAP_FULL);
	return 0;
}

static inline void send_map_call(struct map_call_in_flight *in, struct call_record *values)
{
	struct call_record *record = reserve_call();
	struct thread_call *enclosing;
	u32 tid = (u32)bpf_get_current_pid_tgid();

	if (!record)
		return;
	enclosing = bpf_map_lookup_elem(&thread_calls, &tid);
	record->enter_ns = in->enter_ns;
	record->exit_ns = values->exit_ns;
	record->id = 0;
	record->parent_id = enclosing ? enclosing->id : 0;
	record->addr = values->addr;
	record->size_bytes = values->size_bytes;
	record->requested_bytes = values->requested_bytes;
	record->alloc_ts_ns = values->alloc_ts_ns;
	record->context = values->context;
	record->caller = in->caller;
	record->arg0 = values->arg0;
	record->arg1 = values->arg1;
	record->pid = current_tgid();
	record->tid = tid;
	record->user_stack = in->user_stack;
	record->result = values->result;
	record->function = in->call;
	record->cpu = bpf_get_smp_processor_id();
	record->type = CALL_MAP;
	record->flags = values->flags;
	record->cause = CAUSE_CALL;
	submit_call(record);
}

static inline u64 whole_pages(u64 bytes)
{
	return (bytes + CONFIG_PAGE_SIZE - 1) & ~(u64)(CONFIG_PAGE_SIZE - 1);
}

static inline void send_mapping_end(struct range_key *key, struct live_range *range, u64 now, u8 cause)
{
	struct call_record *record = reserve_call();

	if (!record)
		return;
	record->enter_ns = now;
	record->exit_ns = now;
	record->id = 0;
	record->parent_id = 0;
	record->addr = key->addr;
	record->size_bytes = range->size_bytes;
	record->requested_bytes = range->requested_bytes;
	record->alloc_ts_ns = range->ts_ns;
	record->context = range->context;
	record->caller = range->caller;
	record->arg0 = (u32)range->context;
	record->arg1 = range->context >> 32;
	record->pid = key->pid;
	record->tid = (u32)bpf_get_current_pid_tgid();
	record->user_stack = range->user_stack;
	record->result = 0;
	record->function = range->function;
	record->cpu = bpf_get_smp_processor_id();
	record->type = CALL_MAP_FREE;
	record->flags = 0;
	record->cause = cause;
	submit_call(record);
}

/* 1 when [addr, addr + size) is exactly one known mapping, which then ends here. */
static inline int end_exact_mapping(u64 addr, u64 size, u64 now)
{
	struct range_key key = {};
	struct live_range *known;

	key.addr = addr;
	key.pid = current_tgid();
	key.space = SPACE_MAP_CALLS;
	known = bpf_map_lookup_elem(&live_ranges, &key);
	if (!known || known->size_bytes != size)
		return 0;
	send_mapping_end(&key, known, now, CAUSE_CALL);
	bpf_map_delete_elem(&live_ranges, &key);
	return 1;
}

static inline void begin_mapping(struct map_call_in_flight *in, u64 addr, u64 size, u64 requested, u64 flags_prot, u64 now)
{
	struct range_key key = {};
	struct live_range fresh = {};
	struct live_range *old;

	key.addr = addr;
	key.pid = current_tgid();
	key.space = SPACE_MAP_CALLS;
	fresh.ts_ns = now;
	fresh.size_bytes = size;
	fresh.requested_bytes = requested;
	fresh.caller = in->caller;
	fresh.context = flags_prot;
	fresh.user_stack = in->user_stack;
	fresh.function = in->call;
	old = bpf_map_lookup_elem(&live_ranges, &key);
	if (old)
		send_mapping_end(&key, old, now, CAUSE_REUSE);
	if (bpf_map_update_elem(&live_ranges, &key, &fresh, BPF_ANY))
		count(COUNT_LIVE_FULL);
}

static inline int map_exit(void *ctx)
{
	struct map_call_in_flight in = {};
	struct map_call_in_flight *in_flight;
	struct call_record values = {};
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 tgid = current_tgid();
	s64 returned = 0;
	u64 now;
	u64 before;
	u64 *known_break;
	int failed;

	in_flight = bpf_map_lookup_elem(&map_calls_in_flight, &tid);
	if (!in_flight)
		return 0;
	in = *in_flight;
	bpf_map_delete_elem(&map_calls_in_flight, &tid);
	TRACEPOINT_FIELD(returned, ctx, SYSCALL_RETURN_OFFSET);
	now = bpf_ktime_get_ns();
	failed = returned < 0 && returned > -4096;
	values.exit_ns = now;
	values.result = failed ? (s32)returned : 0;

	if (in.call == MAP_MMAP) { /* (addr, length, prot, flags, fd) */
		values.addr = failed ? 0 : returned;
		values.size_bytes = whole_pages(in.args[1]);
		values.requested_bytes = in.args[1];
		values.arg0 = in.args[3];
		values.arg1 = in.args[2];
		if (!failed) {
			if (in.args[3] & MAP_FIXED_FLAG)
				values.flags = CALL_PARTIAL;
			send_map_call(&in, &values);
			begin_mapping(&in, returned, values.size_bytes, in.args[1], (u32)in.args[3] | in.args[2] << 32, now);
			return 0;
		}
	} else if (in.call == MAP_MUNMAP) { /* (addr, length) */
		values.addr = in.args[0];
		values.size_bytes = whole_pages(in.args[1]);
		if (!failed && !end_exact_mapping(in.args[0], values.size_bytes, now))
			values.flags = CALL_PARTIAL;
		else if (!failed)
			return 0;
	} else if (in.call == MAP_MREMAP) { /* (old, old length, new length, flags, new) */
		struct range_key key = {};
		struct live_range *old;
		u64 flags_prot = 0x22 | 3ULL << 32; /* unless the old mapping is known: private, anonymous, read-write */

		values.addr = failed ? 0 : returned;
		values.size_bytes = whole_pages(in.args[2]);
		values.requested_bytes = in.args[2];
		values.arg0 = in.args[0];
		values.arg1 = whole_pages(in.args[1]);
		if (!failed) {
			key.addr = in.args[0];
			key.pid = tgid;
			key.space = SPACE_MAP_CALLS;
			old = bpf_map_lookup_elem(&live_ranges, &key);
			if (old)
				flags_prot = old->context;
			if (!end_exact_mapping(in.args[0], whole_pages(in.args[1]), now))
				values.flags = CALL_PARTIAL;
			values.context = flags_prot;
			send_map_call(&in, &values);
			begin_mapping(&in, returned, values.size_bytes, in.args[2], flags_prot, now);
			return 0;
		}
	} else if (in.call == MAP_BRK) { /* (new break): returns the break that holds now */
		known_break = bpf_map_lookup_elem(&breaks, &tgid);
		before = known_break ? *known_break : 0;
		bpf_map_update_elem(&breaks, &tgid, &returned, BPF_ANY);
		if (!before || before == (u64)returned)
			return 0;
		values.addr = before;
		values.arg0 = returned;
	} else { /* madvise(addr, length, advice) */
		values.addr = in.args[0];
		values.size_bytes = whole_pages(in.args[1]);
		values.arg0 = in.args[2];
	}
	send_map_call(&in, &values);
	return 0;
}

PROGRAM("tracepoint/syscalls/sys_enter_mmap")
int on_enter_mmap(void *ctx)
{
	return map_enter(ctx, MAP_MMAP);
}

PROGRAM("tracepoint/syscalls/sys_enter_munmap")
int on_enter_munmap(void *ctx)
{
	return map_enter(ctx, MAP_MUNMAP);
}

PROGRAM("tracepoint/syscalls/sys_enter_mremap")
int on_enter_mremap(void *ctx)
{
	return map_enter(ctx, MAP_MREMAP);
}

PROGRAM("tracepoint/syscalls/sys_enter_brk")
int on_enter_brk(void *ctx)
{
	return map_enter(ctx, MAP_BRK);
}

PROGRAM("tracepoint/syscalls/sys_enter_madvise")
int on_enter_madvise(void *ctx)
{
	return map_enter(ctx, MAP_MADVISE);
}

PROGRAM("tracepoint/syscalls/sys_exit_mmap")
int on_exit_map_call(void *ctx)
{
	return map_exit(ctx);
}
