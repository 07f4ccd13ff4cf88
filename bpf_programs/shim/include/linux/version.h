#pragma once
/* Only feeds the version section that kernels before 5.0 checked for kprobes. */
#define LINUX_VERSION_CODE 0x060112
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
