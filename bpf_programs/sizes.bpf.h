/* How many bytes a call asks for, and how many the layer takes, from its arguments. */
#pragma once
#include "common.h"
#include "loop.bpf.h"

enum size_how {
	SIZE_NONE = 0,
	SIZE_ARG = 1,
	SIZE_PRODUCT = 2,          /* args[size_arg] * args[size_arg2]: calloc */
	SIZE_PITCH = 3,            /* *args[1] (pitch, known at return) * args[3] rows */
	SIZE_ARRAY = 4,            /* CUDA_ARRAY_DESCRIPTOR at args[1] */
	SIZE_ARRAY_3D = 5,         /* CUDA_ARRAY3D_DESCRIPTOR at args[1] */
	SIZE_RUNTIME_ARRAY = 6,    /* cudaChannelFormatDesc at args[1], width args[2], height args[3] */
	SIZE_RUNTIME_ARRAY_3D = 7, /* cudaChannelFormatDesc at args[1], cudaExtent by value on the stack */
	SIZE_PITCHED_PTR = 8,      /* cudaPitchedPtr at args[0], cudaExtent by value on the stack */
	SIZE_MIPMAPPED = 9,        /* CUDA_ARRAY3D_DESCRIPTOR at args[1], args[2] levels */
};

/* CUarray_format: 8-, 16- and 32-bit integers and floats (cuda.h); others are not known here and count 0. */
static inline u64 format_bytes(u32 format)
{
	if (format == 1 || format == 8)
		return 1;
	if (format == 2 || format == 9 || format == 0x10)
		return 2;
	if (format == 3 || format == 10 || format == 0x20)
		return 4;
	return 0;
}

static inline u64 at_least_one(u64 value)
{
	return value ? value : 1;
}

static inline u64 runtime_element_bytes(u64 description)
{
	u32 bits[4] = {};

	bpf_probe_read_user(bits, sizeof(bits), (void *)description);
	return ((u64)bits[0] + bits[1] + bits[2] + bits[3]) / 8;
}

static inline u64 halved(u64 extent)
{
	return extent > 1 ? extent / 2 : extent;
}

struct mipmap {
	u64 width;
	u64 height;
	u64 depth;
	u64 levels;
	u64 texels;
};

static inline long next_level(u32 turn, struct mipmap *mipmap)
{
	if (turn >= mipmap->levels)
		return LOOP_STOP;
	mipmap->texels += mipmap->width * mipmap->height * mipmap->depth;
	mipmap->width = halved(mipmap->width);
	mipmap->height = halved(mipmap->height);
	mipmap->depth = halved(mipmap->depth);
	return LOOP_ON;
}

/* Texels of all levels: each level halves every extent, down to 1 (cuMipmappedArrayCreate). */
static SUBPROGRAM u64 mipmapped_texels(u64 width, u64 height, u64 depth, u64 levels)
{
	struct mipmap mipmap = {};

	mipmap.width = width;
	mipmap.height = height;
	mipmap.depth = depth;
	mipmap.levels = levels;
	LOOP(16, next_level, &mipmap);
	return mipmap.texels;
}

/* What the caller asks for. */
GLOBAL_SUBPROGRAM u64 requested_bytes(struct function_spec *spec, struct call_in_flight *call)
{
	u64 *args;
	u32 tail[2] = {};

	if (!spec || !call)
		return 0;
	args = call->args;
	if (spec->size_how == SIZE_ARG)
		return args[spec->size_arg & 7];
	if (spec->size_how == SIZE_PRODUCT)
		return args[spec->size_arg & 7] * args[spec->size_arg2 & 7];
	if (spec->size_how == SIZE_PITCH)
		return args[2] * args[3];
	if (spec->size_how == SIZE_ARRAY) {
		bpf_probe_read_user(tail, sizeof(tail), (void *)(args[1] + 16));
		return user_u64(args[1]) * at_least_one(user_u64(args[1] + 8)) * format_bytes(tail[0]) * tail[1];
	}
	if (spec->size_how == SIZE_ARRAY_3D) {
		bpf_probe_read_user(tail, sizeof(tail), (void *)(args[1] + 24));
		return user_u64(args[1]) * at_least_one(user_u64(args[1] + 8)) *
			at_least_one(user_u64(args[1] + 16)) * format_bytes(tail[0]) * tail[1];
	}
	if (spec->size_how == SIZE_MIPMAPPED) {
		bpf_probe_read_user(tail, sizeof(tail), (void *)(args[1] + 24));
		return format_bytes(tail[0]) * tail[1] *
			mipmapped_texels(user_u64(args[1]), at_least_one(user_u64(args[1] + 8)),
					 at_least_one(user_u64(args[1] + 16)), args[2]);
	}
	if (spec->size_how == SIZE_RUNTIME_ARRAY)
		return args[2] * at_least_one(args[3]) * runtime_element_bytes(args[1]);
	if (spec->size_how == SIZE_RUNTIME_ARRAY_3D)
		return user_u64(call->sp + 8) * at_least_one(user_u64(call->sp + 16)) *
			at_least_one(user_u64(call->sp + 24)) * runtime_element_bytes(args[1]);
	if (spec->size_how == SIZE_PITCHED_PTR)
		return user_u64(call->sp + 8) * at_least_one(user_u64(call->sp + 16)) *
			at_least_one(user_u64(call->sp + 24));
	return 0;
}

/* What the layer takes for it: rows of the pitch that it chose, which is known at the return. */
static inline u64 taken_bytes(struct function_spec *spec, struct call_in_flight *call, u64 requested)
{
	u64 size = 0;

	if (spec->size_how == SIZE_PITCH)
		size = user_u64(call->args[1]) * call->args[3];
	else if (spec->size_how == SIZE_PITCHED_PTR) /* cudaPitchedPtr.pitch */
		size = user_u64(call->args[0] + 8) * at_least_one(user_u64(call->sp + 16)) *
			at_least_one(user_u64(call->sp + 24));
	return size ? size : requested;
}
