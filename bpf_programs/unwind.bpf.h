/* Stack dumps: registers and the top of the user stack, for code without frame pointers. User space unwinds them
 * by the tables of the mapped files (leakscope/record/unwind).
 *
 * What a dump is unwound to depends on a few of its words alone: return addresses, and saved registers that point into
 * the stack. User space puts these into `unwound_paths`, and where they stand at their places again the same path is
 * known by its dump's id: no second dump, and not even a walk by frame pointers. The id takes the place of a
 * stack number in `user_stack`, marked by STACK_DUMP_BIT. */
#pragma once
#include "stacks.bpf.h"

enum unwind_policy { UNWIND_NONE = 0, UNWIND_GPU = 1, UNWIND_ALL = 2 };

/* New dumps of a CPU: one each 2^20 ns (954 a second) with bursts; beyond that frame pointers have to do. Calls of
 * functions have a share of their own, so that kernel objects never take theirs. */
#define DUMP_EVERY_SHIFT 20
#define FUNCTION_DUMP_BURST 256
#define KERNEL_DUMP_BURST 128
enum dump_share { SHARE_FUNCTIONS = 0, SHARE_KERNEL = 1 };

static inline int dump_allowed(u32 share)
{
	struct bucket *budget = bpf_map_lookup_elem(&dump_budget, &share);

	if (!budget)
		return 0;
	refill(budget, bpf_ktime_get_ns(), DUMP_EVERY_SHIFT,
	       share == SHARE_FUNCTIONS ? FUNCTION_DUMP_BURST : KERNEL_DUMP_BURST);
	if (!budget->tokens) {
		count(COUNT_DUMP_SKIPPED);
		return 0;
	}
	budget->tokens -= 1;
	return 1;
}

/* The word of the user stack at `place`; of a return address that a probe replaced, what it was. */
static inline u64 stack_word(u64 place)
{
	struct open_returns *open;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 word = user_u64(place);
	int i;

	if (CONFIG_UNWIND != UNWIND_ALL)
		return word;
	open = bpf_map_lookup_elem(&open_returns, &tid);
	if (!open)
		return word;
#pragma unroll
	for (i = 0; i < OPEN_RETURNS; i++)
		if (open->calls[i].sp == place)
			word = open->calls[i].caller;
	return word;
}

/* The path that this stack may have taken, 0 if none is known. */
static inline struct unwound_path *find_path(struct path_key *key)
{
	struct unwound_path *known;
	int depth;

#pragma clang loop unroll(disable)
	for (depth = 0; depth < PATH_BRANCHES; depth++) {
		known = bpf_map_lookup_elem(&unwound_paths, key);
		if (!known || known->words != PATH_BRANCH)
			return known;
		key->tag = mixed(key->tag, stack_word(key->sp + known->places[0]));
	}
	return 0;
}

struct path_comparison {
	struct unwound_path *known;
	u64 sp;
	u64 differ;
};

static inline long next_path_word(u32 turn, struct path_comparison *at)
{
	struct unwound_path *known = at->known;
	u64 place;
	u64 value;

	if (turn >= PATH_WORDS || turn >= known->words)
		return LOOP_STOP;
	place = at->sp + known->places[turn];
	value = known->values[turn];
	if (user_u64(place) != value)
		at->differ += mixed(place, value);
	return LOOP_ON;
}

/* Whether the words that decided how the known dump was unwound stand at their places on this stack too. Those that do
 * not have to be exactly the return addresses that probes of returns replaced, with what these replaced; sums of mixed
 * bits tell, so that the loop has no branch whose both ways the verifier would follow 256 times. */
static inline int same_path(struct unwound_path *known, char *registers, u64 sp)
{
	u64 saved[REG_SAVED_COUNT] = {};
	struct open_returns *open;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct path_comparison at = {};
	u64 replaced = known->id;
	int i;

	bpf_probe_read_kernel(saved, sizeof(saved), registers + REG_SAVED_OFFSET);
#pragma unroll
	for (i = 0; i < REG_SAVED_COUNT; i++)
		if (known->checked_registers & (1 << i) && saved[i] != known->registers[i])
			return 0;
	at.known = known;
	at.sp = sp;
	at.differ = known->id;
	LOOP(PATH_WORDS, next_path_word, &at);
	if (at.differ == known->id)
		return 1;
	open = bpf_map_lookup_elem(&open_returns, &tid);
	if (!open)
		return 0;
#pragma unroll
	for (i = 0; i < OPEN_RETURNS; i++)
		if (open->calls[i].sp >= sp)
			replaced += mixed(open->calls[i].sp, open->calls[i].caller);
	return at.differ == replaced;
}

/* Copy the stack from `sp` up to a page's end: the fourth, or the last that the stack has. Bytes copied. */
static inline u32 read_stack(struct dump_record *record, u64 sp)
{
	u32 bytes;
	int pages;

#pragma unroll
	for (pages = DUMP_BYTES / 4096; pages > 0; pages--) {
		bytes = pages * 4096 - (sp & 4095);
		if (!bpf_probe_read_user(record->stack, bytes, (void *)sp))
			return bytes;
	}
	return 0;
}

/* Send a dump; its id, 0 where none could be sent. */
static inline u32 dump_stack(char *registers, struct path_key *key, s32 user_stack)
{
	struct dump_record *record;
	struct open_returns *open;
	u32 which = COUNT_DUMP_SEQUENCE;
	u64 *sequence = bpf_map_lookup_elem(&counters, &which);
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 id;

	if (!sequence)
		return 0;
	id = (*sequence + 1) * CONFIG_CPUS + bpf_get_smp_processor_id();
	if (id >= STACK_DUMP_BIT) { /* used up: no id is given twice */
		count(COUNT_DUMP_SKIPPED);
		return 0;
	}
	record = bpf_ringbuf_reserve(&dump_ring, sizeof(*record), 0);
	if (!record) {
		count_exactly(COUNT_DUMP_DROPPED);
		return 0;
	}
	*sequence += 1;
	record->ts_ns = bpf_ktime_get_ns();
	record->id = id;
	record->pid = key->pid;
	record->user_stack = user_stack;
	bpf_probe_read_kernel(record->registers, sizeof(struct pt_regs), registers);
	__builtin_memset(&record->open, 0, sizeof(record->open));
	open = bpf_map_lookup_elem(&open_returns, &tid);
	if (open)
		record->open = *open;
	record->bytes = read_stack(record, key->sp);
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	return id;
}

/* Number of the user stack below `registers` (struct pt_regs of user mode): of a dump, or by frame pointers. */
static inline s32 unwound_stack(void *ctx, char *registers, u32 share, u64 caller)
{
	struct path_key key = {};
	struct unwound_path *known;
	s32 user_stack;
	u64 mode = 0;
	u32 id;

	bpf_probe_read_kernel(&mode, sizeof(mode), registers + REG_MODE_OFFSET);
	if (!IS_USER_MODE(mode)) /* a kernel thread */
		return user_stack_number(ctx, caller);
	bpf_probe_read_kernel(&key.sp, sizeof(key.sp), registers + REG_SP_OFFSET);
	bpf_probe_read_kernel(&key.ip, sizeof(key.ip), registers + REG_IP_OFFSET);
	key.pid = current_tgid();
	known = find_path(&key);
	if (known && same_path(known, registers, key.sp))
		return known->id | STACK_DUMP_BIT;
	user_stack = stack_number(ctx, BPF_F_USER_STACK, caller, STACK_BESIDE_DUMP);
	if (!key.sp || !dump_allowed(share))
		return user_stack;
	id = dump_stack(registers, &key, user_stack);
	return id ? (s32)(id | STACK_DUMP_BIT) : user_stack;
}

/* For probes in the kernel: the stack of the user code that entered it. */
static inline s32 unwound_stack_of_task(void *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();

	return unwound_stack(ctx, (char *)bpf_task_pt_regs(task), SHARE_KERNEL, word_at_syscall_sp());
}

/* For probes in the kernel, by what the recording wants. */
static inline s32 user_stack_of_task(void *ctx)
{
	return CONFIG_UNWIND == UNWIND_ALL ? unwound_stack_of_task(ctx) : user_stack_number(ctx, word_at_syscall_sp());
}

/* A call begins whose return is probed: its return address on the stack is about to be replaced. */
static inline void open_return(u64 sp, u64 caller)
{
	struct open_returns fresh = {};
	struct open_returns *open;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	int i;

	open = bpf_map_lookup_elem(&open_returns, &tid);
	fresh.calls[0].sp = sp;
	fresh.calls[0].caller = caller;
	if (open) {
#pragma unroll
		for (i = 0; i < OPEN_RETURNS - 1; i++) /* a frame below the new one is of a call that never returned */
			if (open->calls[i].sp > sp)
				fresh.calls[i + 1] = open->calls[i];
	}
	bpf_map_update_elem(&open_returns, &tid, &fresh, BPF_ANY);
}

/* A call returned, to `sp`: what is innermost again. */
static inline void close_return(u64 sp)
{
	struct open_returns *open;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	int i;

	open = bpf_map_lookup_elem(&open_returns, &tid);
	if (!open || open->calls[0].sp >= sp)
		return;
#pragma unroll
	for (i = 0; i < OPEN_RETURNS - 1; i++)
		open->calls[i] = open->calls[i + 1];
	open->calls[OPEN_RETURNS - 1].sp = 0;
}
