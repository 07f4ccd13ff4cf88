/* What the probes hand to user space. Mirrored by numpy dtypes in leakscope/record/records.py.
 *
 * All records of a ring have one size, so that the reader decodes them in bulk. `mem_record` is the hot one;
 * `call_record` carries everything rarer: map calls, CUDA calls, process ends, frees with a call's identity. */
#pragma once

enum mem_op { OP_ALLOC = 0, OP_FREE = 1 };
enum mem_cause { CAUSE_CALL = 0, CAUSE_REUSE = 1 };

struct mem_record { /* 64 bytes */
	u64 ts_ns;
	u64 addr;
	u64 alloc_ts_ns;     /* of the allocation that a free ends; 0 in an alloc */
	u32 pid;             /* owner: the allocating process, in frees as well */
	u32 tid;             /* the thread that made this call */
	s32 user_stack;      /* number of a stack_record, or of a dump | STACK_DUMP_BIT; negative = none */
	s32 kernel_stack;
	u32 site;            /* row of `sites`: call site, kind, size, slab cache */
	u32 requested_bytes;
	u16 cpu;
	u8 op;
	u8 cause;
	u32 weight;          /* 1 own stack, N sampled 1 in N, 0 no stack taken */
	u32 python_stack;    /* id of a python_record, 0 = none */
	u32 mark;            /* number of the NVTX range that the allocation was made in, 0 = none */
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
	CALL_EXIT = 3,       /* the last thread of a process began to exit */
	CALL_EXEC = 4,       /* the process image was replaced */
	CALL_LAUNCH = 5,     /* a kernel launch returned */
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
	u64 context;         /* functions: current CUDA context; mremap: its flags */
	u64 arg0;            /* maps: flags; functions: first argument; frees: id of the allocating call */
	u64 arg1;            /* maps: prot, or the second size or address */
	u32 pid;
	u32 tid;
	s32 user_stack;
	s32 result;
	u32 function;        /* index of the function or map call; in frees that of the allocation */
	u16 cpu;
	u8 type;
	u8 flags;            /* CALL_NESTED: inside another allocating call; CALL_IN_HEAP: made by malloc for itself */
	u8 cause;
	u8 pad[3];
	u32 python_stack;    /* id of a python_record, 0 = none */
	u32 mark;            /* number of the NVTX range that the call was made in; in frees that of the allocation */
	u32 pad2;
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

/* An NVTX range or mark, or the end of a range. */
enum mark_event { MARK_PUSH = 0, MARK_POP = 1, MARK_START = 2, MARK_END = 3, MARK_INSTANT = 4, MARK_TOO_DEEP = 5 };
enum mark_sizes { MARK_NAME_BYTES = 96, MARK_DOMAIN_BYTES = 48, MARK_NAME_UNREADABLE = 0xffff };

struct mark_record { /* 176 bytes */
	u64 ts_ns;
	u32 number;          /* unique in the process; that of the range which begins or ends */
	u32 outer;           /* the innermost range open on the thread before it, 0 = none */
	u32 pid;
	u32 tid;
	u32 type;
	u32 bytes;           /* of the name; more than MARK_NAME_BYTES: it goes on, MARK_NAME_UNREADABLE: it is not known */
	char domain[MARK_DOMAIN_BYTES];
	char name[MARK_NAME_BYTES];
};

/* Words of a kernel launch that may be pointer arguments, 16 a record; a launch with more sends several. */
enum launch_words { LAUNCH_WORDS = 16, LAUNCH_WORDS_MAX = 64 };
enum launch_flag { LAUNCH_BUFFER = 1 }; /* from the packed buffer of `extra`, not from kernelParams */

struct launch_record { /* 168 bytes */
	u64 launch_id;
	u64 ts_ns;
	u64 function;
	u32 pid;
	u32 layout;          /* id of the launch_layout that said what to read; 0: each slot's first word */
	u16 first;           /* number of values[0] among the words of the launch */
	u16 count;
	u32 flags;
	u64 values[LAUNCH_WORDS];
};

/* Where a handle of a kernel, module or library comes from, and the kernel's name. */
enum kernel_names { KERNEL_NAME_BYTES = 960 };

struct kernel_record { /* 1024 bytes */
	u64 ts_ns;
	u64 handle;          /* of the kernel, module or library; cuFuncGetParamInfo: the kernel asked about */
	u64 container;       /* module or library of a kernel, what an alias stands for, index of a parameter, the wrapper
	                      * of a registered fat binary */
	u64 address;         /* of the image; of the name; offset of a parameter */
	u64 size_bytes;      /* of a parameter */
	u32 pid;
	u32 role;
	s32 result;
	u32 name_bytes;      /* with the final 0; 0: not read, KERNEL_NAME_BYTES: cut off */
	u64 pad;
	char name[KERNEL_NAME_BYTES];
};

/* A stack as far as frame pointers lead, sent before the first event that names its number. The only record that is not
 * sent whole: `depth` tells how many addresses it has. */
enum stack_kind { STACK_KERNEL = 0, STACK_USER = 1, STACK_BESIDE_DUMP = 2 /* of user code, and a dump may name it */ };
enum stack_words { STACK_WORDS = 128, STACK_GENERATION_SHIFT = 16 };

struct stack_record { /* 32 bytes and the addresses */
	u64 ts_ns;
	u64 caller;          /* the word at the user stack pointer: a caller that the walk missed, if it is code */
	u32 number;
	u32 pid;
	u32 kind;
	u32 depth;
	u64 addresses[STACK_WORDS]; /* innermost first */
};

/* A stack dump, sent before the first event that names its id. */
enum dump_sizes {
	STACK_DUMP_BIT = 1 << 30, /* in `user_stack`: the id of a dump, not the number of a stack */
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

enum call_flag { CALL_NESTED = 1, CALL_IN_HEAP = 2 };
#define MAP_IN_HEAP 0x80000000U /* put beside mmap's own flags: malloc took this mapping for itself */
enum map_call { MAP_MMAP = 0, MAP_MUNMAP = 1, MAP_MREMAP = 2, MAP_BRK = 3, MAP_MADVISE = 4 };
