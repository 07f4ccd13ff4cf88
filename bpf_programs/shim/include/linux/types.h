/* Shim for bcc's <linux/types.h>: the integer types that bcc's own headers and leakscope use. */
#ifndef LEAKSCOPE_SHIM_TYPES_H
#define LEAKSCOPE_SHIM_TYPES_H
typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u8 u8;
typedef __s8 s8;
typedef __u16 u16;
typedef __s16 s16;
typedef __u32 u32;
typedef __s32 s32;
typedef __u64 u64;
typedef __s64 s64;
typedef __s8 int8_t;
typedef __u8 uint8_t;
typedef __s16 int16_t;
typedef __u16 uint16_t;
typedef __s32 int32_t;
typedef __u32 uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u16 __le16;
typedef __u32 __le32;
typedef __u32 __wsum;
typedef __u16 __sum16;
typedef __u64 __attribute__((aligned(8))) __aligned_u64;
typedef unsigned long uintptr_t;
typedef unsigned long size_t;
typedef long ssize_t;
typedef int pid_t;
typedef _Bool bool;
typedef unsigned int gfp_t;
#define NULL ((void *)0)
#define true 1
#define false 0
#define inline inline __attribute__((always_inline))
#define __always_inline inline
struct sk_buff;
struct task_struct;
#endif
