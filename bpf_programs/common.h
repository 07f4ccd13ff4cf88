/* Scope, counters and stacks: what every probe uses. */
#pragma once
#include "maps.h"
#include "verifier.h"

enum scope { SCOPE_HOST = 0, SCOPE_PROCESSES = 1, SCOPE_CGROUP = 2 };
enum stack_policy { STACKS_NONE = 0, STACKS_SAMPLED = 1, STACKS_ALL = 2 };

static inline void count(u32 which)
{
	u64 *value = bpf_map_lookup_elem(&counters, &which);

	if (value)
		*value += 1;
}

/* Exact: an interrupt's probe may count between the load and the store of the plain form. */
static inline void count_exactly(u32 which)
{
	u64 *value = bpf_map_lookup_elem(&counters, &which);

	if (value)
		__sync_fetch_and_add(value, 1);
}

/* A number of this recording that no other caller gets: this CPU's next one with the CPU in its low twelve bits. The
 * addition is one step, for an interrupt's probe or a thread that preempts this one may count between a load and a
 * store. 0 where it cannot be had. */
static inline u64 next_number(u32 sequence)
{
	u64 *value = bpf_map_lookup_elem(&counters, &sequence);

	if (!value)
		return 0;
	return (__sync_fetch_and_add(value, 1) + 1) << 12 | (bpf_get_smp_processor_id() & 4095);
}

/* The next one of numbers that stay dense: 1, 2, … For what is rare, as all CPUs share the count. */
static inline u64 next_dense_number(u32 sequence)
{
	u64 *value = bpf_map_lookup_elem(&sequences, &sequence);

	return value ? __sync_fetch_and_add(value, 1) + 1 : 0;
}

static inline u32 current_tgid(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

/* The recorder never records itself: it would feed its own ring. */
static inline int in_scope(u32 tgid)
{
	if (tgid == CONFIG_SELF_TGID)
		return 0;
	if (CONFIG_SCOPE == SCOPE_HOST)
		return 1;
	if (CONFIG_SCOPE == SCOPE_CGROUP)
		return bpf_get_current_ancestor_cgroup_id(CONFIG_CGROUP_LEVEL) == CONFIG_CGROUP_ID;
	return bpf_map_lookup_elem(&targets, &tgid) != 0;
}

/* Frame-pointer walks at syscall depth miss the caller of a libc stub, which pushes no frame; at a function's
 * entry they miss its direct caller. Both stand in the word at the user stack pointer. User space inserts it
 * where it lies in executable text. 0 where the thread is not inside a system call (an interrupt or fault
 * leaves an arbitrary word there). */
static inline u64 word_at_syscall_sp(void)
{
	struct task_struct *task = bpf_get_current_task_btf();
	char *regs = (char *)bpf_task_pt_regs(task);
	u64 sp = 0;
	u64 word = 0;
	s64 syscall = 0;

	if (REG_SYSCALL_OFFSET >= 0) {
		bpf_probe_read_kernel(&syscall, sizeof(syscall), regs + REG_SYSCALL_OFFSET);
		if (syscall < 0)
			return 0;
	}
	bpf_probe_read_kernel(&sp, sizeof(sp), regs + REG_SP_OFFSET);
	if (sp)
		bpf_probe_read_user(&word, sizeof(word), (void *)sp);
	return word;
}

static inline u64 user_u64(u64 addr)
{
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)addr);
	return value;
}

static inline u64 mixed(u64 place, u64 value)
{
	u64 mix = (place ^ value * 0x9E3779B97F4A7C15ULL) * 0xC2B2AE3D27D4EB4FULL;

	return mix ^ mix >> 29;
}

static inline void refill(struct bucket *bucket, u64 now, u64 every_shift, u64 most)
{
	u64 earned = (now - bucket->refilled_ns) >> every_shift;

	if (!earned)
		return;
	bucket->refilled_ns = now;
	bucket->tokens += earned;
	if (bucket->tokens > most)
		bucket->tokens = most;
}

static inline struct call_record *reserve_call(void)
{
	struct call_record *record;

	record = bpf_ringbuf_reserve(&call_ring, sizeof(*record), 0);
	if (!record)
		count_exactly(COUNT_CALL_DROPPED);
	return record;
}

static inline void submit_call(struct call_record *record)
{
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}
