/* One C source for two loaders: bcc (LEAKSCOPE_BCC defined) and clang with libbpf.
 *
 * Rules that keep the source common: map access only through the inline functions that MAP_* macros make
 * (bcc cannot rewrite a method call inside a macro, so each pair is spelt out in maps.h); kernel memory only
 * through bpf_probe_read_kernel at offsets that the loader takes from BTF; CONFIG_* values are preprocessor
 * constants under bcc and read-only data under libbpf. */
#pragma once

#ifdef LEAKSCOPE_BCC
#include <uapi/linux/ptrace.h>
#define PROGRAM(section)
/* By names of our own: for each call of bcc's names it reads all of /proc/kallsyms, to look whether the kernel has them
 * (check_bpf_probe_read_user in its b_frontend_action.cc), which made most of the time of compiling. */
static long (*read_user_memory)(void *, u32, const void *) = (void *)BPF_FUNC_probe_read_user;
static long (*read_user_string)(void *, u32, const void *) = (void *)BPF_FUNC_probe_read_user_str;
#define bpf_probe_read_user read_user_memory
#define bpf_probe_read_user_str read_user_string
#define raw_tracepoint_args bpf_raw_tracepoint_args
#else
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
#define PROGRAM(name) SEC(name)
#define raw_tracepoint_args bpf_raw_tracepoint_args
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#else
struct pt_regs {
	u64 regs[31];
	u64 sp;
	u64 pc;
	u64 pstate;
};
#endif
char LICENSE[] SEC("license") = "Dual BSD/GPL";
#endif

#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
#define REG_RETURN(ctx) ((ctx)->regs[0])
#define REG_SP(ctx) ((ctx)->sp)
#define REG_SP_OFFSET (31 * 8)
#define REG_SYSCALL_OFFSET -1
#define REG_SYSCALL_NUMBER_OFFSET (8 * 8)
#define REG_IP_OFFSET (32 * 8)
#define REG_MODE_OFFSET (33 * 8) /* pstate */
#define IS_USER_MODE(mode) (((mode) & 15) == 0)
#define REG_SAVED_OFFSET (19 * 8) /* what a call preserves: x19 to x29, the frame pointer last */
#define REG_SAVED_COUNT 11
/* Where a system call's arguments still stand at its exit; the first one moved to orig_x0, behind user_pt_regs. */
#define REG_SYSCALL_ARG_OFFSET(n) ((n) ? (n) * 8 : 34 * 8)
#else
#define REG_RETURN(ctx) ((ctx)->ax)
#define REG_SP(ctx) ((ctx)->sp)
#define REG_SP_OFFSET (19 * 8)
#define REG_SYSCALL_OFFSET (15 * 8)
#define REG_SYSCALL_NUMBER_OFFSET REG_SYSCALL_OFFSET
#define REG_IP_OFFSET (16 * 8)
#define REG_MODE_OFFSET (17 * 8) /* cs */
#define IS_USER_MODE(mode) (((mode) & 3) == 3)
#define REG_SAVED_OFFSET 0 /* what a call preserves: r15 to r12, rbp, rbx */
#define REG_SAVED_COUNT 6
/* Where a system call's arguments still stand at its exit: rdi, rsi, rdx, r10, r8. */
#define REG_SYSCALL_ARG_OFFSET(n) (((n) == 0 ? 14 : (n) == 1 ? 13 : (n) == 2 ? 12 : (n) == 3 ? 7 : 9) * 8)
#endif

/* A field of a classic tracepoint at an offset that the loader read from the format file. */
#define TRACEPOINT_FIELD(destination, ctx, offset) \
	bpf_probe_read_kernel(&(destination), sizeof(destination), (void *)((char *)(ctx) + (offset)))

/* Layouts of syscall tracepoints (include/trace/events/syscalls.h): common 8 bytes, number, arguments. */
#define SYSCALL_ARG_OFFSET(n) (16 + 8 * (n))
#define SYSCALL_NUMBER_OFFSET 8
#define SYSCALL_RETURN_OFFSET 16
