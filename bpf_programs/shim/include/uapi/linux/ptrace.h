#pragma once
#include <linux/types.h>
/* The registers that a probe sees; the layouts are ABI (arch/x86, arch/arm64: uapi/asm/ptrace.h). */
#if defined(__aarch64__)
struct pt_regs {
	u64 regs[31];
	u64 sp;
	u64 pc;
	u64 pstate;
};
#else
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#endif
