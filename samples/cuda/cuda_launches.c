/*
 * Launches kernels in every form that the driver and the runtime have, and says which buffers each launch was given.
 * Blocks that one launch fills and nobody touches again are leaked beside blocks that no launch ever gets, at addresses
 * that others had before; one buffer stays in use. --log FILE gets a line of JSON a launch.
 */
#include "cuda_common.h"
#include "cuda_kernels.h"
#include <sys/mman.h>

enum { FORM_OF_ASKED = 4, STALE_BYTES = 100000, RECYCLED_BYTES = 50000, IN_USE_BYTES = 300000, PINNED_BYTES = 20000, MAPPED_BYTES = 2 << 20, EVERY_FORM = 11 };
static struct sample sample = {.name = "cuda_launches", .count = 44, .pause_us = 500};
static const char *log_path = "/dev/null";
static const char *settle_path;
static long known = 1, bare;
static const struct extra_option extras[] = {
    {"log", NULL, &log_path, "file for a line of JSON a launch"},
    {"settle", NULL, &settle_path, "file to wait for once every kernel was launched in every form"},
    {"bare", &bare, NULL, "1: launch one kernel COUNT times and print the CPU time of each, ns; default 0"},
    {NULL, NULL, NULL, NULL},
};

static FILE *log_file;
static long launches, graph_launches;
static CUmodule module;
static CUgraphExec graph;

enum kernel { FILL, SCALE, GATHER_VIEW, TICKING, OPAQUE, ASKED, KERNELS };
static const char *const names[] = {FILL_BLOCK, SCALE_INTO, GATHER, TICK, "", SCALE_INTO};
static void (*const stubs[])(void) = {_Z10fill_blockPfii, _Z10scale_intoPfPKff, _Z6gather4view, _Z4ticki};
static CUfunction functions[KERNELS];
static char opaque_handle[64]; /* what no probe ever named */

static long clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

struct request { /* one launch: its kernel, the pointers to its parameters, and the same parameters packed */
    enum kernel kernel;
    void **params;
    void *packed;
    size_t packed_bytes;
};

static const char *const forms[EVERY_FORM] = {
    "cudaLaunchKernel",       "cudaLaunchKernel_ptsz", "cudaLaunchKernelExC",      "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",         "cuLaunchKernel extra",  "cuLaunchKernel_ptsz",      "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz extra", "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz",
};

/* The seventh and following arguments go over the stack: numbers that tell each from the others. */
static void launch_in_form(int form, struct request request, CUstream stream, unsigned g, unsigned b)
{
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, request.packed, CU_LAUNCH_PARAM_BUFFER_SIZE,
                     &request.packed_bytes, CU_LAUNCH_PARAM_END};
    CUlaunchConfig config = {g, 2, 3, b, 4, 5, 6, stream, NULL, 0};
    cudaLaunchConfig_t runtime_config = {{g, 2, 3}, {b, 4, 5}, 6, stream, NULL, 0};
    CUfunction f = functions[request.kernel];
    const void *stub = (const void *)(request.kernel == OPAQUE ? (void (*)(void))opaque_handle : stubs[request.kernel]);
    void **params = request.params;
    switch (form) {
    case 0:
        MUST(cudaLaunchKernel(stub, runtime_config.gridDim, runtime_config.blockDim, params, 6, stream));
        break;
    case 1:
        MUST(cudaLaunchKernel_ptsz(stub, runtime_config.gridDim, runtime_config.blockDim, params, 6, stream));
        break;
    case 2:
        MUST(cudaLaunchKernelExC(&runtime_config, stub, params));
        break;
    case 3:
        MUST(cudaLaunchCooperativeKernel(stub, runtime_config.gridDim, runtime_config.blockDim, params, 6, stream));
        break;
    case 4:
        MUST(cuLaunchKernel(f, g, 2, 3, b, 4, 5, 6, stream, params, NULL));
        break;
    case 5:
        MUST(cuLaunchKernel(f, g, 2, 3, b, 4, 5, 6, stream, NULL, extra));
        break;
    case 6:
        MUST(cuLaunchKernel_ptsz(f, g, 2, 3, b, 4, 5, 6, stream, params, NULL));
        break;
    case 7:
        MUST(cuLaunchKernelEx(&config, f, params, NULL));
        break;
    case 8:
        MUST(cuLaunchKernelEx_ptsz(&config, f, NULL, extra));
        break;
    case 9:
        MUST(cuLaunchCooperativeKernel(f, g, 2, 3, b, 4, 5, 6, stream, params));
        break;
    default:
        MUST(cuLaunchCooperativeKernel_ptsz(f, g, 2, 3, b, 4, 5, 6, stream, params));
    }
}

static void launch(int form, struct request request, void *first, void *second)
{
    long number = launches++;
    unsigned g = (unsigned)(number % 1009 + 1), b = (unsigned)(number % 127 + 1);
    long from = clock_ns(CLOCK_MONOTONIC);
    launch_in_form(form, request, (CUstream)(number + 1), g, b);
    long to = clock_ns(CLOCK_MONOTONIC);
    fprintf(log_file,
            "{\"form\":\"%s\",\"kernel\":\"%s\",\"from_ns\":%ld,\"to_ns\":%ld,\"known\":%ld,\"grid\":[%u,2,3],"
            "\"block\":[%u,4,5],\"stream\":%ld,\"buffers\":[%lu,%lu]}\n",
            forms[form], names[request.kernel], from, to, known, g, b, number + 1, (unsigned long)first,
            (unsigned long)second);
}

static void fill(int form, void *block)
{
    struct {
        void *out;
        int value, count;
    } packed = {block, 7, 11};
    void *params[] = {&packed.out, &packed.value, &packed.count, NULL};
    launch(form, (struct request){FILL, params, &packed, sizeof packed}, block, NULL);
}

/* The pointer of `in` is one into the middle of its buffer. Behind the third parameter stands what looks like a fourth:
 * kernelParams has no end. */
static void scale(int form, enum kernel kernel, void *out, char *in, void *not_given)
{
    struct {
        void *out, *in;
        float factor;
    } packed = {out, in + 4096, 0.5f};
    void *params[] = {&packed.out, &packed.in, &packed.factor, &not_given, NULL};
    launch(form, (struct request){kernel, params, &packed, 20}, out, in + 4096);
}

static void gather(int form, void *rows, void *columns)
{
    struct view view = {rows, columns, 3};
    void *params[] = {&view, NULL};
    launch(form, (struct request){GATHER_VIEW, params, &view, sizeof view}, rows, columns);
}

static void tick(int form)
{
    int value = 5;
    void *params[] = {&value, NULL};
    launch(form, (struct request){TICKING, params, &value, sizeof value}, NULL, NULL);
}

static void launch_opaque(int form, void *block)
{
    void *params[] = {&block, NULL};
    launch(form, (struct request){OPAQUE, params, &block, sizeof block}, block, NULL);
}

SITE void *keep_in_use(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, IN_USE_BYTES));
    return memory;
}

SITE void *keep_pinned(void)
{
    void *memory;
    MUST(cudaHostAlloc(&memory, PINNED_BYTES, 0));
    return memory;
}

/* Physical memory, mapped: it is known by its handle, and kernels get the address of the mapping. */
SITE CUdeviceptr keep_mapped(void)
{
    const CUmemAllocationProp on_device = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    MUST(cuMemCreate(&handle, MAPPED_BYTES, &on_device, 0));
    MUST(cuMemAddressReserve(&address, MAPPED_BYTES, 0, 0, 0));
    MUST(cuMemMap(address, MAPPED_BYTES, 0, handle, 0));
    return address;
}

SITE void *keep_stale_block(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, STALE_BYTES));
    return memory;
}

SITE void *keep_recycled_block(void)
{
    CUdeviceptr memory;
    MUST(cuMemAlloc_v2(&memory, RECYCLED_BYTES));
    return (void *)memory;
}

SITE void *borrow_block(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, RECYCLED_BYTES));
    return memory;
}

/* A kernel from an image that nobody else can read again. The program asks for its parameters, until there are no more. */
static void load_asked_kernel(void)
{
    char path[64];
    size_t offset, size, index = 0;
    CUmodule hidden;
    int memory = memfd_create("image", MFD_CLOEXEC);
    if (memory < 0 || write(memory, &image.cubin, sizeof image.cubin) != sizeof image.cubin)
        die(&sample, "memfd_create");
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
    MUST(cuModuleLoad(&hidden, path));
    close(memory);
    MUST(cuModuleGetFunction(&functions[ASKED], hidden, SCALE_INTO));
    while (!cuFuncGetParamInfo(functions[ASKED], index, &offset, &size))
        index++;
}

/* Kernels come from the program's own fat binary, from a copy on the heap, and by way of a library. */
static void load_kernels(void)
{
    CUlibrary library;
    CUkernel kernel;
    struct cubin *copy = malloc(sizeof *copy);
    memcpy(copy, &image.cubin, sizeof *copy);
    MUST(cuModuleLoadData(&module, copy));
    MUST(cuLibraryLoadData(&library, &wrapper, NULL, NULL, 0, NULL, NULL, 0));
    MUST(cuModuleGetFunction(&functions[FILL], module, FILL_BLOCK));
    MUST(cuModuleGetFunction(&functions[SCALE], module, SCALE_INTO));
    MUST(cuLibraryGetKernel(&kernel, library, GATHER));
    MUST(cuKernelGetFunction(&functions[GATHER_VIEW], kernel));
    MUST(cuLibraryGetKernel((CUkernel *)&functions[TICKING], library, TICK));
    functions[OPAQUE] = (CUfunction)opaque_handle;
    load_asked_kernel();
}

int main(int argc, char **argv)
{
    CUgraph empty;
    char more[512];
    start_sample(argc, argv, &sample, extras);
    log_file = fopen(log_path, "w");
    if (!log_file)
        die(&sample, log_path);
    void *pinned = keep_pinned(), *in_use = keep_in_use();
    CUdeviceptr mapped = keep_mapped();
    load_kernels();
    MUST(cuGraphCreate(&empty, 0));
    MUST(cuGraphInstantiateWithFlags(&graph, empty, 0));
    if (bare) {
        int value = 7, items = 11;
        void *params[] = {&in_use, &value, &items, NULL};
        long from = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
        for (long i = 0; i < sample.count; i++)
            MUST(cuLaunchKernel(functions[FILL], 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
        printf("%.1f\n", (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - from) / (double)sample.count);
        return 0;
    }
    known = 0;
    for (int form = 0; form < EVERY_FORM; form++) {
        fill(form, in_use);
        scale(form, SCALE, in_use, pinned, NULL);
        gather(form, in_use, pinned);
        tick(form);
    }
    while (settle_path && access(settle_path, F_OK))
        pause_us(10000);
    known = 1;
    for (long i = 0; i < sample.count; i++) {
        int form = (int)(i % EVERY_FORM);
        fill(form, keep_stale_block());
        fill(form, (void *)(mapped + MAPPED_BYTES - 8));
        void *borrowed = borrow_block();
        scale(form, SCALE, borrowed, in_use, borrowed);
        MUST(cudaFree(borrowed));
        void *recycled = keep_recycled_block(); /* where the borrowed block was */
        scale(form, SCALE, in_use, in_use, recycled);
        gather(form, in_use, pinned);
        tick(form);
        if (i % 5 == 0) {
            MUST(cuGraphLaunch(graph, NULL));
            graph_launches++;
        }
        if (i == sample.count / 2) {
            launch_opaque(form, in_use);
            scale(FORM_OF_ASKED, ASKED, in_use, in_use, recycled);
        }
        pause_us(sample.pause_us);
    }
    fclose(log_file);
    struct site sites[] = {
        {"keep_stale_block", "gpu", "device", "cudaMalloc", sample.count, sample.count * STALE_BYTES},
        {"keep_recycled_block", "gpu", "device", "cuMemAlloc_v2", sample.count, sample.count * RECYCLED_BYTES},
        {"keep_in_use", "gpu", "device", "cudaMalloc", 1, IN_USE_BYTES},
        {"keep_mapped", "gpu", "vmm", "cuMemCreate", 1, MAPPED_BYTES},
        {"keep_pinned", "host", "pinned", "cudaHostAlloc", 1, PINNED_BYTES},
    };
    snprintf(more, sizeof more, ",\"launches\":%ld,\"graph_launches\":%ld", launches, graph_launches);
    append_usage(more, sizeof more);
    finish_sample(&sample, sites, 5, sample.count, more);
}
