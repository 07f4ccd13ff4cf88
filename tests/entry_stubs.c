/* A library whose functions begin with instructions of every kind, and a program (-DPROGRAM) that calls each a known
 * number of times. The names are the CUDA driver's; what the functions do is only as much as a recorder looks at. */
#include <stddef.h>

#define FUNCTIONS(F)                    \
	F(cuMemAlloc_v2, 101)           \
	F(cuMemAllocManaged, 103)       \
	F(cuMemAllocAsync, 107)         \
	F(cuMemHostAlloc, 109)          \
	F(cuMemAllocHost_v2, 113)       \
	F(cuMemAllocFromPoolAsync, 127) \
	F(cuMemAlloc, 131)

#ifdef PROGRAM
#include <stdio.h>

#define DECLARE(name, count)                                        \
	int name(void **memory, size_t bytes);                      \
	__attribute__((noinline)) void call_##name(void)            \
	{                                                           \
		void *memory;                                       \
		for (int i = 0; i < count; i++) {                   \
			if (name(&memory, 1000 + i))                \
				__builtin_abort();                  \
		}                                                   \
		__asm__ volatile(""); /* no tail call */            \
	}
FUNCTIONS(DECLARE)
#undef DECLARE

int main(void)
{
#define CALL(name, count) call_##name();
	FUNCTIONS(CALL)
	return getchar() != 'g';
}
#else

static char memory[1 << 20];

__attribute__((used, visibility("hidden"))) int allocate(void **where, size_t bytes)
{
	static size_t taken;

	*where = memory + (taken += 16);
	return bytes == 0;
}

#define BEGIN(name) ".globl " #name "\n.type " #name ",@function\n" #name ":\n.cfi_startproc\n"
#define END(name) ".cfi_endproc\n.size " #name ",.-" #name "\n"

__asm__(".text\n"
	/* endbr64 and a push that a frame-pointer walk knows; one that it does not know; a branch */
	BEGIN(cuMemAlloc_v2) "endbr64; push %rbp; mov %rsp,%rbp; call allocate; pop %rbp; ret\n" END(cuMemAlloc_v2)
	BEGIN(cuMemAllocManaged) "endbr64; push %r12; call allocate; pop %r12; ret\n" END(cuMemAllocManaged)
	BEGIN(cuMemAllocAsync) "endbr64; jmp allocate\n" END(cuMemAllocAsync)
	/* without endbr64 */
	BEGIN(cuMemHostAlloc) "push %rbx; call allocate; pop %rbx; ret\n" END(cuMemHostAlloc)
	/* stepped, with endbr64 and without; a short nop and what the assembler makes of a long one */
	BEGIN(cuMemAllocHost_v2) "endbr64; sub $8,%rsp; call allocate; add $8,%rsp; ret\n" END(cuMemAllocHost_v2)
	BEGIN(cuMemAllocFromPoolAsync) "sub $8,%rsp; call allocate; add $8,%rsp; ret\n" END(cuMemAllocFromPoolAsync)
	BEGIN(cuMemAlloc) "nop; jmp allocate\n" END(cuMemAlloc));
#endif
