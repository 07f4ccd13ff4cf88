/*
 * Four threads allocate at once, every tenth block for good; the others are freed by whichever thread comes
 * next. Three of four calls are cudaMalloc (one call within: cuMemAlloc_v2), the fourth is cudaMallocAsync
 * (two within).
 */
#include "cuda_common.h"
#include <pthread.h>

enum { THREADS = 4, SLOTS = 64, DEVICE_BYTES = 30000, ASYNC_BYTES = 20000, KEEP_EVERY = 10, ASYNC_EVERY = 4 };
static struct sample sample = {.name = "cuda_threads", .count = 20000};
static void *device_slots[SLOTS], *async_slots[SLOTS];

SITE void *reserve_block(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, DEVICE_BYTES));
    return memory;
}

SITE void *reserve_block_in_stream(void)
{
    void *memory;
    MUST(cudaMallocAsync(&memory, ASYNC_BYTES, NULL));
    return memory;
}

SITE void retain_block(void)
{
    reserve_block();
}

SITE void retain_block_in_stream(void)
{
    reserve_block_in_stream();
}

/* Leave a block for some thread to free, and free the one that lay there. */
SITE void exchange_block(long i)
{
    void *other = __atomic_exchange_n(&device_slots[i % SLOTS], reserve_block(), __ATOMIC_ACQ_REL);
    if (other)
        MUST(cudaFree(other));
}

SITE void exchange_block_in_stream(long i)
{
    void *other = __atomic_exchange_n(&async_slots[i % SLOTS], reserve_block_in_stream(), __ATOMIC_ACQ_REL);
    if (other)
        MUST(cudaFreeAsync(other, NULL));
}

static bool kept(long i)
{
    return i % KEEP_EVERY == 0;
}

/* Which calls are stream-ordered: every fourth of ten, so that kept and freed blocks are of both kinds. */
static bool in_stream(long i)
{
    return i / KEEP_EVERY % ASYNC_EVERY == 0;
}

static void *work(void *unused)
{
    for (long i = 0; i < sample.count; i++) {
        if (in_stream(i))
            kept(i) ? retain_block_in_stream() : exchange_block_in_stream(i);
        else
            kept(i) ? retain_block() : exchange_block(i);
        pause_us(sample.pause_us);
    }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    char more[512];
    long retained[2] = {0, 0}, frees = 0;
    start_sample(argc, argv, &sample, NULL);
    raise_descriptor_limit();
    for (int t = 0; t < THREADS; t++)
        if (pthread_create(&threads[t], NULL, work, NULL))
            die(&sample, "pthread_create");
    for (int t = 0; t < THREADS; t++)
        pthread_join(threads[t], NULL);
    for (int s = 0; s < SLOTS; s++) {
        MUST(cudaFree(device_slots[s]));
        if (async_slots[s])
            MUST(cudaFreeAsync(async_slots[s], NULL));
    }
    for (long i = 0; i < sample.count; i++) {
        retained[in_stream(i)] += kept(i) * THREADS;
        frees += !kept(i) * THREADS;
    }
    struct site sites[] = {
        {"retain_block", "gpu", "device", "cudaMalloc", retained[0], retained[0] * DEVICE_BYTES},
        {"retain_block_in_stream", "gpu", "async", "cudaMallocAsync", retained[1], retained[1] * ASYNC_BYTES},
    };
    snprintf(more, sizeof more, ",\"threads\":%d,\"allocations\":%ld,\"frees\":%ld", THREADS,
             sample.count * THREADS, frees);
    append_usage(more, sizeof more);
    finish_sample(&sample, sites, 2, frees, more);
}
