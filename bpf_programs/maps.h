/* All maps of the recorder. */
#pragma once
#include "records.h"

struct live_object { /* a kernel object or page believed live */
	u64 ts_ns;           /* 0: it is not */
	u32 pid;
	s32 user_stack;
	s32 kernel_stack;
	u32 site;
	u32 weight;
	u32 requested_bytes;
	u32 python_stack;
	union {
		u32 mark;        /* stream: NVTX range */
		u32 identity;    /* census: of `identity_counts` */
	};
};

enum live_sizes { LIVE_WAYS = 4 }; /* slots of a bucket */

struct live_slot { /* 64 bytes, a cache line */
	u64 word;            /* address | state (live.bpf.h), 0 = never used */
	struct live_object object;
	u64 unused[2];
};

struct live_bucket {
	struct live_slot slots[LIVE_WAYS];
};

struct bucket { /* of stacks that may be taken: refilled with time, emptied by taking */
	u64 refilled_ns;
	u64 tokens;
};

enum stack_budgets { BUDGET_ALL = 0, BUDGET_STARTS = 1 };
#define PROCESS_START_NS 100000000ULL

struct site_state { /* a CPU's own part of a site */
	struct bucket bucket;
};

/* Census: whose objects are counted together. */
struct identity_key {
	u32 pid;
	u32 site;
	s32 kernel_stack;
	s32 user_stack;
	u32 python_stack;
	u32 weight;
	s32 call_stack;      /* of the outermost probed call around the allocation */
	u32 call_function;   /* index of that call's function + 1, 0 = none */
};

struct identity_count { /* this CPU's part */
	u64 allocated;
	u64 freed;
	u64 reused;          /* ended unseen: the address was handed out again */
	u64 exited;          /* freed after the exit of their process had begun */
	u64 first_ns;        /* of the allocations */
	u64 last_ns;
};

struct outermost_call { /* the probed call that a thread is in */
	s32 user_stack;
	u32 function;        /* index + 1 */
};

struct process_end {
	u64 exit_ns;         /* when the latest exit of this PID began */
	u64 ended;           /* 0: the PID was given to a new process since */
};

struct byte_countdown { /* bytes that this CPU lets pass before the next sampled allocation */
	s64 left;
	u64 drawn;
};

#define SAMPLE_GAPS 4096 /* quantiles of the exponential distribution that countdowns are drawn from */

struct call_key {
	u32 tid;
	u32 function;
};

struct call_in_flight {
	u64 enter_ns;
	u64 id;
	u64 parent_id;
	u64 parent_sp;
	u64 caller;
	u64 sp;
	u64 args[8];
	u64 expected_alloc_ts_ns;
	s32 user_stack;
	u32 nested;          /* inside another allocating call of its family */
	u32 enclosing_owner;
	u32 python_stack;
};

struct thread_call { /* innermost probed call open on a thread */
	u64 id;
	u64 sp;
	u64 owner;           /* OWNER_* bits: inside an allocating call of that family, whose detail it is */
};

enum owner { OWNER_DEVICE = 1, OWNER_HEAP = 2, OWNER_LAUNCH = 4 };

struct thread_contexts {
	u64 current_context;
	u64 below[7];
	u32 depth;
	u32 pad;
};

struct range_key {
	u64 addr;
	u32 pid;
	u32 space;
};

struct live_range { /* a mapping, a device or heap object, a VMM handle */
	u64 ts_ns;
	u64 size_bytes;
	u64 requested_bytes;
	u64 context;
	u64 call_id;
	s32 user_stack;
	u32 function;
	u32 references;      /* VMM: mappings of the handle; above bit 16, extra references to it */
	u32 released;        /* VMM: the handle was released */
	u32 python_stack;
	u32 mark;            /* NVTX range */
};

enum space {
	SPACE_MEMORY = 0,
	SPACE_HANDLE = 1,
	SPACE_MAPPED = 2,
	SPACE_HEAP = 3,
	SPACE_ARRAY = 4,
	SPACE_ENDING = 5, /* what a free in flight is about to end, by thread */
};

/* What a probed function does; filled by user space, one row a function (the attach cookie is its index). */
struct function_spec {
	u8 role;
	u8 size_how;
	u8 size_arg;
	u8 size_arg2;
	u8 addr_how;
	u8 addr_arg;
	u8 success;
	u8 space;
	u8 enabled;
	u8 log_call;
	u8 pad[6];
};

enum counter {
	COUNT_MEM_DROPPED = 0,      /* records refused by a full ring: exact, for the ring itself counts what it took */
	COUNT_CALL_DROPPED = 1,
	COUNT_LIVE_FULL = 2,        /* allocations whose free will not be seen: the live map is full */
	COUNT_LIVE_BUSY = 3,        /* the same: the map's lock was held on this CPU */
	COUNT_STACK_DROPPED = 4,    /* stacks lost to a full ring */
	COUNT_STACK_FAULT = 5,      /* stacks that could not be walked */
	COUNT_FREE_UNMATCHED = 6,   /* frees of objects that were never seen */
	COUNT_PAGE_USER = 7,        /* pages of user memory: counted here, not streamed */
	COUNT_SITE_FULL = 8,
	COUNT_CALL_MAP_FULL = 9,
	COUNT_PYTHON_DROPPED = 10,  /* Python stacks lost to a full ring */
	COUNT_PYTHON_BUSY = 11,     /* not walked: another walk was under way on the CPU */
	COUNT_CALL_SEQUENCE = 12,
	COUNT_STACK_BUSY = 13,      /* not walked: too many other walks were under way on the CPU */
	COUNT_MARK_DROPPED = 14,    /* NVTX ranges or their ends lost to a full ring */
	COUNT_MARK_TOO_DEEP = 15,   /* NVTX ranges inside too many others */
	COUNT_MARK_THREADS_FULL = 16,
	COUNT_LAUNCH_DROPPED = 17,  /* launch arguments and names of kernels lost to full rings */
	COUNT_KERNEL_DROPPED = 18,
	COUNT_IDENTITY_SEQUENCE = 19,
	COUNT_IDENTITY_FULL = 20,   /* allocations counted without their stacks: the map of identities is full */
	COUNT_SMALL_OBJECTS = 21,   /* allocations below the least size, and their bytes */
	COUNT_SMALL_BYTES = 22,
	COUNT_UNSAMPLED_OBJECTS = 23, /* allocations that the sampling by bytes passed over, and their bytes */
	COUNT_UNSAMPLED_BYTES = 24,
	COUNT_DUMP_DROPPED = 25,    /* stack dumps lost to a full ring */
	COUNT_DUMP_SKIPPED = 26,    /* not dumped: the CPU's share was used up */
	COUNT_DUMP_SEQUENCE = 27,
	COUNTERS = 28,
};

/* Numbers without gaps, shared by all CPUs. */
enum sequence { SEQUENCE_SITES = 0, SEQUENCE_STACKS = 1, SEQUENCE_PYTHON = 2, SEQUENCES = 3 };

/* Which words of a kernel's parameters to read: put here by user space once it knows them. */
struct launch_word {
	u16 slot;            /* of kernelParams */
	u16 offset;          /* in that parameter */
	u32 buffer_offset;   /* in the packed buffer of `extra` */
};

struct launch_layout {
	u32 id;
	u32 words;
	struct launch_word word[LAUNCH_WORDS_MAX];
};

struct launch_key {
	u64 function;
	u32 pid;
	u32 pad;
};

#define PYTHON_NO_OFFSET 0xffff

/* Where a process keeps its interpreters, and offsets in the structures of its CPython version; from user space. */
struct python_process {
	u64 runtime;         /* address of _PyRuntime */
	u16 interpreters;    /* in _PyRuntime: the newest interpreter */
	u16 interpreter_next;
	u16 threads;         /* in an interpreter: its newest thread state */
	u16 thread_next;
	u16 thread_native_id;
	u16 thread_frame;    /* in a thread state: the current frame, or what holds it */
	u16 cframe_frame;    /* in that: the current frame; PYTHON_NO_OFFSET where the thread state has it */
	u16 frame_code;
	u16 frame_instruction;
	u16 frame_previous;
	u16 frame_owner;
	u16 frame_bytes;     /* what is read of a frame: up to its last member here */
	u16 frame_is_entry;  /* whether C code called it; PYTHON_NO_OFFSET where a frame without code says so */
	u16 pad[3];
};

struct python_thread { /* by thread: its PyThreadState, or where the search for it goes on */
	u64 state;
	u64 interpreter;     /* 0: it starts at the first */
	u32 native_id;       /* the thread's id in its own PID namespace */
	u32 found;
	u32 misses;          /* events at which it was looked for */
	u32 pad;
};

struct python_scratch {
	u64 busy;
	u64 frame[16];
	struct python_record record;
};

enum stack_sizes { STACK_SCRATCHES = 4, STACK_HASH_WORDS = 8, STACK_WAYS = 4 };

struct stack_bucket {
	u64 entries[STACK_WAYS];
};

struct stack_scratch {
	u64 busy;
	struct stack_record record;
};

struct mark_arguments { /* of a function of the NVTX library */
	u64 name;
	u64 bytes;
	u64 domain;
	u32 number;
	u32 outer;
};

struct path_key {
	u64 sp;
	u64 ip;
	u32 pid;
	u32 tag;             /* 0, or mixed from the words at the branches that led here */
};

enum path_sizes { PATH_WORDS = 256, PATH_REGISTERS = 12, PATH_BRANCHES = 8, PATH_BRANCH = 65535 };

struct unwound_path { /* what decided how a dump was unwound, and the dump's id */
	u32 id;
	u16 words;           /* PATH_BRANCH: several paths lead on from here, told apart by the word at places[0] */
	u16 checked_registers; /* bits of `registers` that matter */
	u64 registers[PATH_REGISTERS]; /* as they lie in struct pt_regs from REG_SAVED_OFFSET on */
	u64 values[PATH_WORDS];
	u16 places[PATH_WORDS]; /* bytes above the stack pointer */
};

enum rss_members { RSS_MEMBERS = 4 }; /* MM_FILEPAGES … MM_SHMEMPAGES (include/linux/mm_types_task.h) */

struct rss_peaks {
	u64 pages[RSS_MEMBERS];
};

#ifdef LEAKSCOPE_BCC
#define LRU_HASH(name, key, value, entries) BPF_TABLE("lru_hash", key, value, name, entries)
#define HASH(name, key, value, entries) BPF_TABLE("hash", key, value, name, entries)
#define PERCPU_HASH(name, key, value, entries) BPF_TABLE("percpu_hash", key, value, name, entries)
#define ARRAY(name, value, entries) BPF_TABLE("array", u32, value, name, entries)
#define PAGE_ALIGNED_ARRAY(name, value, entries) BPF_F_TABLE("array", u32, value, name, entries, BPF_F_MMAPABLE)
#define PERCPU_ARRAY(name, value, entries) BPF_TABLE("percpu_array", u32, value, name, entries)
#define RING(name, bytes) BPF_RINGBUF_OUTPUT(name, (bytes) / PAGE_SIZE)
#else
#define DEFINE_MAP(map_type, name, key_type, value_type, entries) \
	struct { \
		__uint(type, map_type); \
		__type(key, key_type); \
		__type(value, value_type); \
		__uint(max_entries, entries); \
	} name SEC(".maps")
#define HASH(name, key, value, entries) DEFINE_MAP(BPF_MAP_TYPE_HASH, name, key, value, entries)
#define LRU_HASH(name, key, value, entries) DEFINE_MAP(BPF_MAP_TYPE_LRU_HASH, name, key, value, entries)
#define PERCPU_HASH(name, key, value, entries) DEFINE_MAP(BPF_MAP_TYPE_PERCPU_HASH, name, key, value, entries)
#define ARRAY(name, value, entries) DEFINE_MAP(BPF_MAP_TYPE_ARRAY, name, u32, value, entries)
#define PAGE_ALIGNED_ARRAY(name, value_type, entries) \
	struct { \
		__uint(type, BPF_MAP_TYPE_ARRAY); \
		__uint(map_flags, BPF_F_MMAPABLE); \
		__type(key, u32); \
		__type(value, value_type); \
		__uint(max_entries, entries); \
	} name SEC(".maps")
#define PERCPU_ARRAY(name, value, entries) DEFINE_MAP(BPF_MAP_TYPE_PERCPU_ARRAY, name, u32, value, entries)
#define RING(name, bytes) \
	struct { \
		__uint(type, BPF_MAP_TYPE_RINGBUF); \
		__uint(max_entries, bytes); \
	} name SEC(".maps")
#endif

RING(mem_ring, CONFIG_MEM_RING_BYTES);
RING(call_ring, CONFIG_CALL_RING_BYTES);
PERCPU_ARRAY(counters, u64, COUNTERS);
PERCPU_ARRAY(stack_budget, struct bucket, 2); /* by enum stack_budgets */
ARRAY(sequences, u64, SEQUENCES);

/* Stacks: the numbers of those that were sent last */
RING(stack_ring, CONFIG_STACK_RING_BYTES);
ARRAY(known_stacks, struct stack_bucket, CONFIG_STACK_ENTRIES);
PERCPU_ARRAY(stack_scratch, struct stack_scratch, STACK_SCRATCHES);

/* Scope */
HASH(targets, u32, u32, CONFIG_TARGET_ENTRIES);

/* Kernel objects and pages: sites, and what is live by address, which is that of the `struct page` for pages */
HASH(sites, struct site_key, struct site_info, CONFIG_SITE_ENTRIES);
ARRAY(site_states, struct site_state, CONFIG_SITE_STATE_ENTRIES); /* by CPU and site: made in no time, as per-CPU maps are not */
ARRAY(settled_sites, u32, CONFIG_SITE_ENTRIES); /* by site: 1 = frees keep up with allocations, as user space saw */
PAGE_ALIGNED_ARRAY(live, struct live_bucket, CONFIG_LIVE_ENTRIES); /* page-aligned, so that no slot is on two lines */
HASH(live_spilled, u64, struct live_object, CONFIG_SPILL_ENTRIES);
ARRAY(spilled_from, u64, CONFIG_SPILLED_FROM_ENTRIES);

/* Census: counts by identity in place of events. Ends of processes tell what was freed by an exit. */
HASH(identities, struct identity_key, u32, CONFIG_IDENTITY_ENTRIES);
PERCPU_HASH(identity_counts, u32, struct identity_count, CONFIG_IDENTITY_ENTRIES);
HASH(outermost_calls, u32, struct outermost_call, CONFIG_OUTERMOST_ENTRIES);
LRU_HASH(process_ends, u32, struct process_end, CONFIG_PROCESS_END_ENTRIES);

/* Sampling by bytes */
PERCPU_ARRAY(byte_countdowns, struct byte_countdown, 1);
ARRAY(sample_gaps, u64, SAMPLE_GAPS);

/* Calls and ranges */
ARRAY(functions, struct function_spec, 256);
HASH(calls_in_flight, struct call_key, struct call_in_flight, 16384);
HASH(thread_calls, u32, struct thread_call, 32768);
HASH(contexts, u32, struct thread_contexts, 32768);
HASH(map_calls_in_flight, u32, u64, 16384); /* when the unmapping that a thread is in was entered */
HASH(live_ranges, struct range_key, struct live_range, CONFIG_RANGE_ENTRIES);
HASH(breaks, u32, u64, 16384);
HASH(rss, u32, struct rss_peaks, 65536); /* by PID */

/* NVTX: the innermost open range of each thread. */
RING(mark_ring, CONFIG_MARK_RING_BYTES);
HASH(thread_marks, u32, u32, 32768);
/* GPU kernels and the arguments of their launches */
RING(launch_ring, CONFIG_LAUNCH_RING_BYTES);
RING(kernel_ring, CONFIG_KERNEL_RING_BYTES);
LRU_HASH(launch_layouts, struct launch_key, struct launch_layout, CONFIG_LAYOUT_ENTRIES);

/* Python. A stack that falls out of the cache of those sent is sent again under another id. */
#define PYTHON_RING_BYTES (2 << 20)
RING(python_ring, PYTHON_RING_BYTES);
HASH(python_processes, u32, struct python_process, 16384);
HASH(python_threads, u32, struct python_thread, 32768);
LRU_HASH(python_stacks, u64, u32, 32768);
PERCPU_ARRAY(python_scratch, struct python_scratch, 1);

/* Stack dumps */
RING(dump_ring, CONFIG_DUMP_RING_BYTES);
PERCPU_ARRAY(dump_budget, struct bucket, 2); /* by enum dump_share */
LRU_HASH(unwound_paths, struct path_key, struct unwound_path, CONFIG_PATH_ENTRIES);
LRU_HASH(open_returns, u32, struct open_returns, 16384);
