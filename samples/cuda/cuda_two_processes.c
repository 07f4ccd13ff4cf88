/*
 * Two processes on one device, each of which leaks blocks of its own size and launches a kernel on one of them: the
 * program that a GPU host is checked with. It needs nothing but the driver: its kernel is PTX, compiled by the driver.
 * The child's report comes first, then the parent's.
 */
#include "cuda_common.h"
#include <sys/wait.h>

enum { PARENT_BYTES = 262144, CHILD_BYTES = 524288, WORDS = 256 };
static struct sample sample = {.name = "cuda_two_processes", .count = 50, .pause_us = 2000, .churn = 2};
static const char *role = "both";
static const struct extra_option extras[] = {
    {"role", NULL, &role, "both (default), or parent or child alone"},
    {NULL, NULL, NULL, NULL},
};

static const char ptx[] = ".version 6.4\n"
                          ".target sm_75\n"
                          ".address_size 64\n"
                          ".visible .entry fill_block(.param .u64 block, .param .u32 words)\n"
                          "{\n"
                          "  .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<4>;\n"
                          "  ld.param.u64 %rd1, [block];\n"
                          "  ld.param.u32 %r1, [words];\n"
                          "  cvta.to.global.u64 %rd2, %rd1;\n"
                          "  mov.u32 %r2, %tid.x;\n"
                          "  setp.ge.u32 %p1, %r2, %r1;\n"
                          "  @%p1 bra DONE;\n"
                          "  mul.wide.u32 %rd3, %r2, 4;\n"
                          "  add.s64 %rd2, %rd2, %rd3;\n"
                          "  st.global.u32 [%rd2], %r2;\n"
                          "DONE:\n"
                          "  ret;\n"
                          "}\n";

SITE CUdeviceptr keep_parent_block(void)
{
    CUdeviceptr block;
    MUST(cuMemAlloc_v2(&block, PARENT_BYTES));
    return block;
}

SITE CUdeviceptr keep_child_block(void)
{
    CUdeviceptr block;
    MUST(cuMemAlloc_v2(&block, CHILD_BYTES));
    return block;
}

SITE void churn_block(void)
{
    CUdeviceptr block;
    MUST(cuMemAlloc_v2(&block, 100000));
    MUST(cuMemFree_v2(block));
}

SITE void launch_fill(CUfunction fill, CUdeviceptr block)
{
    unsigned words = WORDS;
    void *params[] = {&block, &words};
    MUST(cuLaunchKernel(fill, 1, 1, 1, WORDS, 1, 1, 0, NULL, params, NULL));
}

int main(int argc, char **argv)
{
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction fill;
    long churned = 0;
    pid_t child = 0;
    char more[512];
    start_sample(argc, argv, &sample, extras);
    if (!strcmp(role, "both")) { /* a context does not survive a fork: first the process, then CUDA */
        child = fork();
        if (child < 0)
            die(&sample, "fork");
        if (!child) {
            char count[32], pause[32];
            snprintf(count, sizeof count, "%ld", sample.count);
            snprintf(pause, sizeof pause, "%ld", sample.pause_us);
            execl("/proc/self/exe", argv[0], "--role", "child", "--count", count, "--pause-us", pause, (char *)NULL);
            die(&sample, "exec");
        }
    }
    bool is_child = !strcmp(role, "child");
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    MUST(cuCtxCreate_v2(&context, 0, device));
    MUST(cuModuleLoadData(&module, ptx));
    MUST(cuModuleGetFunction(&fill, module, "fill_block"));
    for (long i = 0; i < sample.count; i++) {
        launch_fill(fill, is_child ? keep_child_block() : keep_parent_block());
        for (long c = 0; c < sample.churn; c++, churned++)
            churn_block();
        pause_us(sample.pause_us);
    }
    MUST(cuCtxSynchronize());
    if (child && waitpid(child, NULL, 0) != child)
        die(&sample, "waitpid");
    struct site site = {is_child ? "keep_child_block" : "keep_parent_block", "gpu", "device", "cuMemAlloc_v2",
                        sample.count, sample.count * (is_child ? CHILD_BYTES : PARENT_BYTES)};
    snprintf(more, sizeof more, ",\"role\":\"%s\",\"launches\":%ld", is_child ? "child" : "parent", sample.count);
    append_usage(more, sizeof more);
    finish_sample(&sample, &site, 1, churned, more);
}
