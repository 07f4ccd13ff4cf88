/*
 * Allocates in CUDA contexts and destroys them without freeing: the end of a context is the free. One context
 * is kept, and what was allocated in it is the leak.
 */
#include "cuda_common.h"

enum { BLOCK_BYTES = 100000, BLOCKS_A_CONTEXT = 16 };
static struct sample sample = {.name = "cuda_context", .count = 100, .pause_us = 1000, .churn = 1};

SITE void allocate_in_lasting_context(void)
{
    CUdeviceptr memory;
    MUST(cuMemAlloc_v2(&memory, BLOCK_BYTES));
}

SITE void allocate_in_passing_context(void)
{
    CUdeviceptr memory;
    MUST(cuMemAlloc_v2(&memory, BLOCK_BYTES));
}

SITE void run_in_passing_context(CUdevice device)
{
    CUcontext context;
    MUST(cuCtxCreate_v2(&context, 0, device));
    for (int i = 0; i < BLOCKS_A_CONTEXT; i++)
        allocate_in_passing_context();
    MUST(cuCtxDestroy_v2(context));
}

/* The primary context likewise: a reset of the device frees what it holds. */
SITE void run_until_reset(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, BLOCK_BYTES));
    MUST(cudaDeviceReset());
}

int main(int argc, char **argv)
{
    CUdevice device;
    CUcontext lasting, popped;
    long passed = 0;
    char more[512];
    start_sample(argc, argv, &sample, NULL);
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    run_until_reset();
    MUST(cuCtxSetCurrent(NULL));
    MUST(cuCtxCreate_v2(&lasting, 0, device));
    MUST(cuCtxPopCurrent_v2(&popped));
    for (long i = 0; i < sample.count; i++) {
        MUST(cuCtxPushCurrent_v2(lasting));
        allocate_in_lasting_context();
        MUST(cuCtxPopCurrent_v2(&popped));
        for (long c = 0; c < sample.churn; c++, passed++)
            run_in_passing_context(device);
        pause_us(sample.pause_us);
    }
    struct site site = {"allocate_in_lasting_context", "gpu", "device", "cuMemAlloc_v2", sample.count,
                        sample.count * BLOCK_BYTES};
    snprintf(more, sizeof more, ",\"freed_with_context\":{\"objects\":%ld,\"bytes\":%ld}",
             passed * BLOCKS_A_CONTEXT + 1, (passed * BLOCKS_A_CONTEXT + 1) * BLOCK_BYTES);
    append_usage(more, sizeof more);
    finish_sample(&sample, &site, 1, passed, more);
}
