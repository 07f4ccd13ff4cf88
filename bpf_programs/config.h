/* What a loader sets before the programs are loaded: compiled in by bcc, read-only data for libbpf.
 *
 * The list is read by leakscope/record/loader/core.py: one 64-bit value a line, in this order. The verifier knows
 * read-only data, so what a recording does not use is pruned under both loaders. */
#pragma once

#ifndef LEAKSCOPE_BCC
#define CONFIG_WITH_MAPS 1
#define CONFIG_WITH_FUNCTIONS 1
/* Sizes of maps: set by the loader before loading. */
#define CONFIG_MEM_RING_BYTES 4096
#define CONFIG_CALL_RING_BYTES 4096
#define CONFIG_MARK_RING_BYTES 4096
#define CONFIG_DUMP_RING_BYTES 4096
#define CONFIG_PATH_ENTRIES 64
#define CONFIG_LIVE_ENTRIES 1024
#define CONFIG_SPILL_ENTRIES 1024
#define CONFIG_SPILLED_FROM_ENTRIES 1024
#define CONFIG_RANGE_ENTRIES 1024
#define CONFIG_STACK_RING_BYTES 4096
#define CONFIG_STACK_ENTRIES 1024
#define CONFIG_SITE_ENTRIES 1024
#define CONFIG_SITE_STATE_ENTRIES 1024
#define CONFIG_LAUNCH_RING_BYTES 4096
#define CONFIG_KERNEL_RING_BYTES 4096
#define CONFIG_LAYOUT_ENTRIES 1024
#define CONFIG_IDENTITY_ENTRIES 1024
#define CONFIG_OUTERMOST_ENTRIES 1024
#define CONFIG_PROCESS_END_ENTRIES 1024
#define CONFIG_TARGET_ENTRIES 1024

struct config {
	u64 sources; /* what the object was built from: set by the Makefile, checked by the loader */
	u64 self_tgid;
	u64 scope;
	u64 cgroup_id;
	u64 cgroup_level;
	u64 stacks;
	u64 site_stack_every_shift;
	u64 site_stack_burst;
	u64 cpu_stack_every_shift;
	u64 cpu_stack_burst;
	u64 scarce_cost;
	u64 sample_one_in;
	u64 live_buckets; /* entries of the map `live`, a power of two */
	u64 stack_buckets; /* of the map `known_stacks`, likewise */
	u64 page_size;
	u64 slab_has_cache;
	u64 cache_name;
	u64 cache_size;
	u64 cache_object_size;
	u64 task_pid;
	u64 exit_has_group_dead;
	u64 nr_mmap;
	u64 nr_munmap;
	u64 nr_mremap;
	u64 nr_brk;
	u64 nr_madvise;
	u64 nr_clone;
	u64 nr_clone3;
	u64 nr_fork;
	u64 nr_vfork;
	u64 task_mm;
	u64 task_self_exec_id;
	u64 task_group_leader;
	u64 task_start_time;
	u64 mm_rss;          /* in mm_struct: the counters of its resident set */
	u64 counter_bytes;   /* one of them */
	u64 counter_count;   /* in one: its pages */
	u64 task_thread_pid;
	u64 pid_level;
	u64 pid_numbers;
	u64 has_loop;
	u64 nvtx;
	u64 launch_args; /* words of a launch's parameters that are read, 0 = none */
	u64 mode;
	u64 min_size;
	u64 sample_bytes;
	u64 unwind;
	u64 cpus;
	u64 site_numbers; /* entries of the map of sites */
};

const volatile struct config config = { .sources = LEAKSCOPE_SOURCES };

#define CONFIG_SELF_TGID config.self_tgid
#define CONFIG_SCOPE config.scope
#define CONFIG_CGROUP_ID config.cgroup_id
#define CONFIG_CGROUP_LEVEL config.cgroup_level
#define CONFIG_STACKS config.stacks
#define CONFIG_SITE_STACK_EVERY_SHIFT config.site_stack_every_shift
#define CONFIG_SITE_STACK_BURST config.site_stack_burst
#define CONFIG_CPU_STACK_EVERY_SHIFT config.cpu_stack_every_shift
#define CONFIG_CPU_STACK_BURST config.cpu_stack_burst
#define CONFIG_SCARCE_COST config.scarce_cost
#define CONFIG_SAMPLE_ONE_IN config.sample_one_in
#define CONFIG_LIVE_BUCKETS config.live_buckets
#define CONFIG_PAGE_SIZE config.page_size
#define CONFIG_SLAB_HAS_CACHE config.slab_has_cache
#define CONFIG_CACHE_NAME config.cache_name
#define CONFIG_CACHE_SIZE config.cache_size
#define CONFIG_CACHE_OBJECT_SIZE config.cache_object_size
#define CONFIG_TASK_PID config.task_pid
#define CONFIG_EXIT_HAS_GROUP_DEAD config.exit_has_group_dead
#define CONFIG_NR_MMAP config.nr_mmap
#define CONFIG_NR_MUNMAP config.nr_munmap
#define CONFIG_NR_MREMAP config.nr_mremap
#define CONFIG_NR_BRK config.nr_brk
#define CONFIG_NR_CLONE config.nr_clone
#define CONFIG_NR_CLONE3 config.nr_clone3
#define CONFIG_NR_FORK config.nr_fork
#define CONFIG_NR_VFORK config.nr_vfork
#define CONFIG_TASK_MM config.task_mm
#define CONFIG_STACK_BUCKETS config.stack_buckets
#define CONFIG_TASK_SELF_EXEC_ID config.task_self_exec_id
#define CONFIG_TASK_GROUP_LEADER config.task_group_leader
#define CONFIG_TASK_START_TIME config.task_start_time
#define CONFIG_MM_RSS config.mm_rss
#define CONFIG_COUNTER_BYTES config.counter_bytes
#define CONFIG_COUNTER_COUNT config.counter_count
#define CONFIG_TASK_THREAD_PID config.task_thread_pid
#define CONFIG_PID_LEVEL config.pid_level
#define CONFIG_PID_NUMBERS config.pid_numbers
#define CONFIG_HAS_LOOP config.has_loop
#define CONFIG_NVTX config.nvtx
#define CONFIG_LAUNCH_ARGS config.launch_args
#define CONFIG_MODE config.mode
#define CONFIG_MIN_SIZE config.min_size
#define CONFIG_SAMPLE_BYTES config.sample_bytes
#define CONFIG_UNWIND config.unwind
#define CONFIG_CPUS config.cpus
#define CONFIG_SITE_NUMBERS config.site_numbers
#endif
