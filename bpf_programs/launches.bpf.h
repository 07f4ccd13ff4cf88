/* Kernel launches: their shape, and those words of their parameters that may be pointers.
 *
 * `kernelParams` is an array of pointers to the parameters and carries no count. User space learns the parameters of
 * a kernel from its image and says in `launch_layouts` which words to read; until then the first word of each slot is
 * read, up to a slot that holds no readable pointer. Only the outermost launch of nested ones is read: the runtime
 * hands the same array to the driver. */
#pragma once
#include "ranges.bpf.h"

static inline int is_launch(u8 role)
{
	return role == ROLE_LAUNCH_DRIVER || role == ROLE_LAUNCH_RUNTIME ||
		(role >= ROLE_LAUNCH_COOPERATIVE && role <= ROLE_LAUNCH_CONFIG_RUNTIME);
}

/* The n-th argument (from 0) of a function at its entry, where it is passed on the stack. */
static inline u64 stack_argument(u64 sp, int n)
{
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
	return user_u64(sp + 8 * (n - 8));
#else
	return user_u64(sp + 8 * (n - 5));
#endif
}

/* Grid and block go where a call_record has sizes and its first argument, the stream where it has the context. */
static inline void describe_launch(u8 role, struct call_in_flight *call, struct call_record *values)
{
	u64 *args = call->args;
	u32 config[6] = {}; /* gridDim, blockDim of CUlaunchConfig and of cudaLaunchConfig_t */

	values->addr = args[0];
	if (role == ROLE_LAUNCH_DRIVER || role == ROLE_LAUNCH_COOPERATIVE) {
		/* (f, gx, gy, gz, bx, by, bz, shared, stream, kernelParams[, extra]) */
		values->size_bytes = (u32)args[1] | args[2] << 32;
		values->requested_bytes = (u32)args[3] | args[4] << 32;
		values->arg0 = (u32)args[5] | args[6] << 32;
		values->context = stack_argument(call->sp, 8);
	} else if (role == ROLE_LAUNCH_RUNTIME) { /* (f, dim3 grid, dim3 block, args, shared, stream): a dim3 takes two */
		values->size_bytes = args[1];
		values->requested_bytes = (u32)args[2] | args[3] << 32;
		values->arg0 = args[3] >> 32 | args[4] << 32;
		values->context = args[7];
	} else { /* (config, f, args[, extra]); the stream stands at 32 in both structures */
		bpf_probe_read_user(config, sizeof(config), (void *)args[0]);
		values->addr = args[1];
		values->size_bytes = (u64)config[1] << 32 | config[0];
		values->requested_bytes = (u64)config[3] << 32 | config[2];
		values->arg0 = (u64)config[5] << 32 | config[4];
		values->context = user_u64(args[0] + 32);
	}
}

/* Where the parameters of a launch are: an array of pointers, or one packed buffer. */
struct launch_source {
	u64 params;
	u64 buffer;
	u64 buffer_bytes;
};

/* `extra` is a list of (key, value): 1 the buffer's address, 2 the address of its size, 0 the end (cuda.h:
 * CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END). */
static inline void read_extra(u64 extra, struct launch_source *source)
{
	u64 key;
	int i;

#pragma clang loop unroll(disable)
	for (i = 0; i < 4; i++) {
		key = user_u64(extra + 16 * i);
		if (key == 1)
			source->buffer = user_u64(extra + 16 * i + 8);
		else if (key == 2)
			source->buffer_bytes = user_u64(user_u64(extra + 16 * i + 8));
		else
			return;
	}
}

/* Reads word `number` of a launch into *value; 0 where there are no more. A word that a layout names and that cannot
 * be read is 0. */
static inline int read_word(struct launch_source *source, struct launch_layout *layout, u32 number, u64 *value)
{
	u64 at = 8 * number;
	u64 slot;

	if (layout) {
		if (number >= layout->words)
			return 0;
		slot = layout->word[number & (LAUNCH_WORDS_MAX - 1)].slot;
		if (source->params)
			at = user_u64(source->params + 8 * slot) + layout->word[number & (LAUNCH_WORDS_MAX - 1)].offset;
		else
			at = source->buffer + layout->word[number & (LAUNCH_WORDS_MAX - 1)].buffer_offset;
		bpf_probe_read_user(value, sizeof(*value), (void *)at);
		return 1;
	}
	if (source->params) {
		at = user_u64(source->params + at);
		return at && !bpf_probe_read_user(value, sizeof(*value), (void *)at);
	}
	return at + 8 <= source->buffer_bytes && !bpf_probe_read_user(value, sizeof(*value), (void *)(source->buffer + at));
}

static inline void send_launch_arguments(u8 role, struct call_in_flight *call)
{
	struct launch_source source = {};
	struct launch_layout *layout;
	struct launch_record *record;
	struct launch_key key = {};
	u64 extra = 0;
	u64 value;
	u32 first;
	u32 i;
	int more = 1;

	key.function = call->args[0];
	key.pid = current_tgid();
	if (role == ROLE_LAUNCH_DRIVER || role == ROLE_LAUNCH_COOPERATIVE) {
		source.params = stack_argument(call->sp, 9);
		if (role == ROLE_LAUNCH_DRIVER)
			extra = stack_argument(call->sp, 10);
	} else if (role == ROLE_LAUNCH_RUNTIME) {
		source.params = call->args[5];
	} else {
		key.function = call->args[1];
		source.params = call->args[2];
		if (role == ROLE_LAUNCH_CONFIG_DRIVER)
			extra = call->args[3];
	}
	if (!source.params && extra)
		read_extra(extra, &source);
	if (!source.params && !source.buffer)
		return; /* a kernel without parameters */
	layout = bpf_map_lookup_elem(&launch_layouts, &key);
	if (layout && !layout->words)
		return;
#pragma clang loop unroll(disable)
	for (first = 0; first < LAUNCH_WORDS_MAX; first += LAUNCH_WORDS) {
		if (!more || first >= CONFIG_LAUNCH_ARGS)
			return;
		record = bpf_ringbuf_reserve(&launch_ring, sizeof(*record), 0);
		if (!record) {
			count_exactly(COUNT_LAUNCH_DROPPED);
			return;
		}
		record->launch_id = call->id;
		record->ts_ns = call->enter_ns;
		record->function = key.function;
		record->pid = key.pid;
		record->layout = layout ? layout->id : 0;
		record->first = first;
		record->count = 0;
		record->flags = source.params ? 0 : LAUNCH_BUFFER;
#pragma clang loop unroll(disable)
		for (i = 0; i < LAUNCH_WORDS; i++) {
			value = 0;
			if (more && (first + i >= CONFIG_LAUNCH_ARGS || !read_word(&source, layout, first + i, &value)))
				more = 0;
			record->values[i] = value;
			record->count += more;
		}
		bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	}
}
