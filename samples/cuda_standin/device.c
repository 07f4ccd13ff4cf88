#include "device.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BLOCKS = 1 << 18, BUCKETS = 1 << 16, GRANULE = 512 };
#define ADDRESS_RANGE (1ull << 38)
#define DEFAULT_DEVICE_BYTES (16ull << 30)

pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;

/* Static tables: untouched pages cost nothing, and an allocation of the device causes none in the heap. */
static struct block blocks[MAX_BLOCKS], *spare;
static struct block *by_address[BUCKETS], *reusable[BUCKETS];
static size_t blocks_made;
static unsigned long long next_address, end_address;
static struct standin_usage usage;

static bool takes_device_memory(enum kind kind)
{
    return kind <= MEMORY;
}

static bool has_own_address(enum kind kind)
{
    return kind <= IPC;
}

static size_t bucket_of(unsigned long long key)
{
    return (key / GRANULE * 0x9e3779b97f4a7c15ull) >> 48;
}

static size_t environment_bytes(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

size_t device_size(void)
{
    static size_t size;
    if (!size)
        size = environment_bytes("STANDIN_GPU_BYTES", DEFAULT_DEVICE_BYTES);
    return size;
}

size_t device_used(void)
{
    return usage.device_bytes;
}

/*
 * As NVIDIA's driver does for each allocation, make the kernel allocate inside an ioctl: opening a pseudo
 * terminal's peer allocates a `filp` slab object, held until the block is freed. At most a quarter of the
 * descriptor limit (or STANDIN_IOCTL_FDS) is held at a time, the rest of the blocks go without.
 */
static int hold_kernel_object(void)
{
    static int terminal = -2;
    static size_t most;
    if (terminal == -2) {
        struct rlimit limit = {.rlim_cur = 0};
        getrlimit(RLIMIT_NOFILE, &limit);
        most = environment_bytes("STANDIN_IOCTL_FDS", limit.rlim_cur / 4);
        terminal = most ? open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC) : -1;
        if (terminal >= 0)
            ioctl(terminal, TIOCSPTLCK, &(int){0});
    }
    if (terminal < 0 || usage.ioctls_held >= most)
        return -1;
    int fd = ioctl(terminal, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    usage.ioctls_held += fd >= 0;
    return fd;
}

/* With STANDIN_LOG=FILE each allocation and free of device and pinned memory becomes a line of that file:
 * A or F, CLOCK_MONOTONIC ns, process, thread, kind (enum kind), address, bytes. */
static void log_event(char what, const struct block *block)
{
    static int file = -2;
    struct timespec now;
    if (file == -2) {
        const char *path = getenv("STANDIN_LOG");
        file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    }
    if (file < 0 || (!takes_device_memory(block->kind) && block->kind != PINNED))
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    dprintf(file, "%c %lld %d %d %d %llu %zu\n", what, now.tv_sec * 1000000000ll + now.tv_nsec, getpid(),
            gettid(), block->kind, block->address, block->bytes);
}

static struct block *unused_block(void)
{
    struct block *block = spare;
    if (block)
        spare = block->next_reusable;
    else if (blocks_made < MAX_BLOCKS)
        block = &blocks[blocks_made++];
    return block;
}

static void link_address(struct block *block, unsigned long long address)
{
    struct block **bucket = &by_address[bucket_of(address)];
    block->address = address;
    block->next_at_address = *bucket;
    *bucket = block;
}

/* A freed block of exactly this span, whose address is handed out again, or a new address. */
static struct block *block_with_address(size_t span)
{
    for (struct block **link = &reusable[bucket_of(span)]; *link; link = &(*link)->next_reusable) {
        struct block *block = *link;
        if (block->state == UNUSED && block->span == span) {
            *link = block->next_reusable;
            return block;
        }
    }
    if (!next_address) {
        void *range =
            mmap(NULL, ADDRESS_RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED)
            return NULL;
        next_address = (unsigned long long)range;
        end_address = next_address + ADDRESS_RANGE;
    }
    struct block *block = span <= end_address - next_address ? unused_block() : NULL;
    if (block) {
        link_address(block, next_address);
        block->span = span;
        next_address += span;
    }
    return block;
}

static struct block *begin_life(struct block *block, enum kind kind, size_t bytes, CUcontext context)
{
    block->bytes = bytes;
    block->kind = kind;
    block->state = LIVE;
    block->references = 1;
    block->context = context;
    block->pool = NULL;
    block->backing = NULL;
    block->ioctl_fd = -1;
    if (takes_device_memory(kind)) {
        usage.device_bytes += bytes;
        usage.device_objects++;
        block->ioctl_fd = hold_kernel_object();
    } else if (kind == PINNED || kind == REGISTERED) {
        usage.pinned_bytes += bytes;
        usage.pinned_objects++;
    }
    log_event('A', block);
    return block;
}

struct block *block_create(enum kind kind, size_t bytes, CUcontext context)
{
    if (bytes > ADDRESS_RANGE || (takes_device_memory(kind) && bytes > device_size() - device_used()))
        return NULL;
    struct block *block = block_with_address((bytes + GRANULE - 1) / GRANULE * GRANULE);
    return block ? begin_life(block, kind, bytes, context) : NULL;
}

struct block *block_create_at(enum kind kind, unsigned long long address, size_t bytes, CUcontext context)
{
    struct block *block = unused_block();
    if (!block)
        return NULL;
    link_address(block, address);
    return begin_life(block, kind, bytes, context);
}

struct block *block_find(enum kind kind, unsigned long long address)
{
    struct block *block = by_address[bucket_of(address)];
    while (block && (block->address != address || block->kind != kind || block->state != LIVE))
        block = block->next_at_address;
    return block;
}

static void unlink_from(struct block **link, struct block *block, bool address_chain)
{
    while (*link != block)
        link = address_chain ? &(*link)->next_at_address : &(*link)->next_reusable;
    *link = address_chain ? block->next_at_address : block->next_reusable;
}

void block_free(struct block *block)
{
    log_event('F', block);
    if (block->ioctl_fd >= 0) {
        close(block->ioctl_fd);
        usage.ioctls_held--;
    }
    if (takes_device_memory(block->kind)) {
        usage.device_bytes -= block->bytes;
        usage.device_objects--;
    } else if (block->kind == PINNED || block->kind == REGISTERED) {
        usage.pinned_bytes -= block->bytes;
        usage.pinned_objects--;
    }
    block->state = UNUSED;
    struct block **free_list = &reusable[bucket_of(block->span)];
    if (!has_own_address(block->kind)) { /* the record is free, the address was never ours */
        unlink_from(&by_address[bucket_of(block->address)], block, true);
        free_list = &spare;
    }
    block->next_reusable = *free_list;
    *free_list = block;
}

void pool_keep(struct block *block)
{
    struct block **bucket = &reusable[bucket_of(block->span)];
    block->state = POOLED;
    block->next_reusable = *bucket;
    *bucket = block;
    usage.pooled_bytes += block->bytes;
}

static void leave_pool(struct block *block)
{
    unlink_from(&reusable[bucket_of(block->span)], block, false);
    usage.pooled_bytes -= block->bytes;
    block->state = LIVE;
}

struct block *pool_take(CUmemoryPool pool, size_t bytes)
{
    struct block *block = reusable[bucket_of((bytes + GRANULE - 1) / GRANULE * GRANULE)];
    while (block && (block->state != POOLED || block->pool != pool || block->bytes != bytes))
        block = block->next_reusable;
    if (block)
        leave_pool(block);
    return block;
}

void pool_adopt(struct block *block, CUmemoryPool pool)
{
    block->kind = STREAM_ORDERED;
    block->pool = pool;
}

unsigned long long pool_any(CUmemoryPool pool)
{
    for (size_t i = 0; i < blocks_made; i++)
        if (blocks[i].state == POOLED && blocks[i].pool == pool) {
            leave_pool(&blocks[i]);
            return blocks[i].address;
        }
    return 0;
}

void blocks_free_of_context(CUcontext context)
{
    for (size_t i = 0; i < blocks_made; i++) {
        struct block *block = &blocks[i];
        if (block->state == UNUSED || block->context != context)
            continue;
        if (block->state == POOLED)
            leave_pool(block);
        if (block->kind == PINNED)
            munmap((void *)block->address, block->bytes);
        block_free(block);
    }
}

void count_launch(void)
{
    pthread_mutex_lock(&device_lock);
    usage.launches++;
    pthread_mutex_unlock(&device_lock);
}

void standin_read_usage(struct standin_usage *out)
{
    pthread_mutex_lock(&device_lock);
    *out = usage;
    pthread_mutex_unlock(&device_lock);
}
