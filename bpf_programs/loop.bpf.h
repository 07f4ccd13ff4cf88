/* Loops that the verifier reads once instead of once a turn, so that the programs load in tens of milliseconds.
 *
 * LOOP(most, step, state) calls `step(turn, state)` until it returns LOOP_STOP, at most `most` times. The helper bpf_loop
 * (kernel 5.17, e6f2dd0f8067) takes the step as a function; where it is missing, and under bcc, which loads each
 * program alone, the same step runs in a plain bounded loop. What a step has to keep stands in `state`. */
#pragma once
#include "config.h"

enum loop { LOOP_ON = 0, LOOP_STOP = 1 };

#define BOUNDED_LOOP(most, step, state) \
	for (u32 turn = 0; turn < (most); turn++) \
		if (step(turn, state) == LOOP_STOP) \
			break

#ifdef LEAKSCOPE_BCC
#define SUBPROGRAM inline
#define GLOBAL_SUBPROGRAM static inline
#define LOOP(most, step, state) \
	_Pragma("clang loop unroll(disable)") \
	BOUNDED_LOOP(most, step, state)
#else
#define SUBPROGRAM __attribute__((noinline))
#define GLOBAL_SUBPROGRAM __attribute__((noinline))
#define LOOP(most, step, state) \
	do { \
		if (CONFIG_HAS_LOOP) { \
			bpf_loop(most, step, state, 0); \
		} else { \
			_Pragma("clang loop unroll(disable)") \
			BOUNDED_LOOP(most, step, state); \
		} \
	} while (0)
#endif
