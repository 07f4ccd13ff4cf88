/* What the probes hand to user space. Mirrored by numpy dtypes in leakscope/record/records.py.
 *
 * All records of a ring have one size, so that the reader decodes them in bulk. `mem_record` is the hot one;
 * `call_record` carries everything rarer: map calls, CUDA calls, process ends, frees with a call's identity. */
#pragma once

enum mem_op { OP_ALLOC = 0, OP_FREE = 1 };
enum mem_cause { CAUSE_CALL = 0, CAUSE_REUSE = 1 };

struct mem_record { /* 72 bytes */
	u64 ts_ns;
	u64 addr;
	u64 alloc_ts_ns;     /* of the allocation that a free ends; 0 in an alloc */
	u64 caller;          /* the word at the user stack pointer: caller of a frameless libc stub, if it is code */
	u32 pid;             /* owner: the allocating process, in frees as well */
	u32 tid;             /* the thread that made this call */
	s32 user_stack;      /* stack map id, negative = none */
	s32 kernel_stack;
	u32 site;            /* row of `sites`: call site, kind, size, slab cache */
	u32 requested_bytes;
	u16 cpu;
	u8 op;
	u8 cause;
	u32 weight;          /* 1 own stack, N sampled 1 in N, 0 no stack taken */
	u32 python_stack;    /* id of a python_record, 0 = none */
	u32 pad;
};

/* A kernel allocation site: who called the allocator for what. */
enum site_kind { SITE_KMALLOC = 0, SITE_SLAB = 1, SITE_PAGE = 2 };

struct site_key {
	u64 call_site;       /* return address of the allocator's caller; 0 for pages */
	u64 what;            /* kmem_cache pointer; kmalloc: bytes_alloc | gfp << 32; pages: order | migratetype << 8 | gfp << 32 */
};

struct site_info {
	u32 id;
	u32 kind;
	u32 size_bytes;      /* what the layer takes for one object */
	u32 object_bytes;
	u64 first_addr;      /* one object of the site, to ask the kernel for its cache */
	char cache[32];      /* slab cache name, empty for kmalloc and pages */
};

enum call_type {
	CALL_FUNCTION = 0,   /* a CUDA or malloc function returned */
	CALL_FREE = 1,       /* a live object of such a function ended: identity of its allocation */
	CALL_MAP = 2,        /* an mmap, munmap, mremap, brk or madvise returned */
	CALL_MAP_FREE = 3,   /* a live mapping ended as a whole: identity of its allocation */
	CALL_EXIT = 4,       /* the last thread of a process began to exit */
	CALL_EXEC = 5,       /* the process image was replaced */
	CALL_LAUNCH = 6,     /* a kernel launch returned */
};

struct call_record { /* 128 bytes */
	u64 enter_ns;
	u64 exit_ns;
	u64 id;
	u64 parent_id;
	u64 addr;
	u64 size_bytes;
	u64 requested_bytes;
	u64 alloc_ts_ns;
	u64 context;
	u64 caller;
	u64 arg0;            /* maps: flags; functions: first argument; frees: id of the allocating call */
	u64 arg1;            /* maps: prot, or the second size or address */
	u32 pid;
	u32 tid;
	s32 user_stack;
	s32 result;
	u32 function;        /* index of the function or map call; in frees that of the allocation */
	u16 cpu;
	u8 type;
	u8 flags;            /* CALL_NESTED: inside another allocating call; CALL_PARTIAL: range does not match one mapping;
	                      * CALL_IN_HEAP: made by malloc for itself */
	u8 cause;
	u8 pad[3];
	u32 python_stack;    /* id of a python_record, 0 = none */
};

/* A Python stack, sent once, before the first event that names its id. */
enum python_frames { PYTHON_FRAMES = 64 };

struct python_frame {
	u64 code;            /* address of the code object, 0 for a frame of the interpreter's own: C code called the
	                      * frame before it. 3.11 has none such, there bit 0 is set in those that C code called. */
	u64 instruction;     /* address of the instruction that runs or calls */
};

struct python_record { /* 1040 bytes */
	u32 id;
	u32 pid;
	u32 depth;
	u32 pad;
	struct python_frame frames[PYTHON_FRAMES]; /* innermost first */
};

/* A stack dump, sent before the first event that names its id. */
enum dump_sizes {
	STACK_DUMP_BIT = 1 << 29, /* in `user_stack`: the id of a dump, not of the stack map */
	DUMP_BYTES = 16384,
	DUMP_REGISTERS = 34,      /* words of struct pt_regs that user mode has, on the architecture with most */
	OPEN_RETURNS = 4,
};

struct open_return {
	u64 sp;              /* where the return address of the call stood, 0 = none */
	u64 caller;          /* that address: a probe of the return replaces it on the stack */
};

struct open_returns {
	struct open_return calls[OPEN_RETURNS]; /* innermost first */
};

struct dump_record { /* 16,744 bytes */
	u64 ts_ns;
	u32 id;
	u32 pid;
	s32 user_stack;      /* by frame pointers: what counts where the dump cannot be unwound */
	u32 bytes;           /* of `stack` that could be read; what is behind them is no one's */
	u64 registers[DUMP_REGISTERS]; /* struct pt_regs */
	struct open_returns open;
	u64 stack[DUMP_BYTES / 8]; /* from the stack pointer upwards */
};

enum call_flag { CALL_NESTED = 1, CALL_PARTIAL = 2, CALL_IN_HEAP = 4 };
#define MAP_IN_HEAP 0x80000000U /* put beside mmap's own flags: malloc took this mapping for itself */
enum map_call { MAP_MMAP = 0, MAP_MUNMAP = 1, MAP_MREMAP = 2, MAP_BRK = 3, MAP_MADVISE = 4 };
