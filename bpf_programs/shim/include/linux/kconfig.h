/* Shim for bcc: just enough of the kernel's headers to compile leakscope without any kernel headers. */
#pragma once
#define CONFIG_BPF_SYSCALL 1
#if defined(__x86_64__) || defined(__TARGET_ARCH_x86)
#define CONFIG_X86_64 1
#endif
