/* What spares the verifier work. */
#pragma once

/* A number that the verifier takes for any: what follows is then verified once, not once for each value that it may have.
 * `any` has to be unknown to it. */
static inline u64 unknown_to_verifier(u64 value, u64 any)
{
#ifdef __bpf__
	asm volatile("%0 += %1\n\t%0 -= %1" : "+r"(value) : "r"(any));
#endif
	return value;
}
