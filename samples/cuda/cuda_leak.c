/*
 * Leaks through every CUDA allocation family, runtime and driver: one function a family, named leak_FAMILY,
 * beside churn_FAMILY which frees what it takes, and beside calls that fail and must not be counted.
 */
#include "cuda_common.h"

enum { VMM_BYTES = 2 << 20, REGISTERED_BYTES = 24576, MAX_REGISTERED = 1024 };
static struct sample sample = {.name = "cuda_leak", .count = 50, .pause_us = 500, .churn = 2};
static const struct cudaChannelFormatDesc float4_texel = {32, 32, 32, 32, cudaChannelFormatKindFloat};
static const struct cudaChannelFormatDesc half_texel = {16, 0, 0, 0, cudaChannelFormatKindFloat};
static const CUDA_ARRAY_DESCRIPTOR rgba_image = {
    .Width = 128, .Height = 16, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 4};
static const CUDA_ARRAY3D_DESCRIPTOR mipmap_base = {
    .Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
static const CUmemAllocationProp on_device = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                              .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

/* ---- runtime; each leak_… returns the bytes that it leaked ---- */

SITE size_t leak_device(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, 250000));
    return 250000;
}

SITE void churn_device(void)
{
    void *memory;
    MUST(cudaMalloc(&memory, 250000));
    MUST(cudaFree(memory));
    MUST(cudaFree(NULL));
}

/* The pitch is the device's choice, so the bytes are what it chose times the rows. */
SITE size_t leak_pitch(void)
{
    void *memory;
    size_t pitch;
    MUST(cudaMallocPitch(&memory, &pitch, 1000, 16));
    return pitch * 16;
}

SITE void churn_pitch(void)
{
    void *memory;
    size_t pitch;
    MUST(cudaMallocPitch(&memory, &pitch, 1000, 16));
    MUST(cudaFree(memory));
}

SITE size_t leak_volume(void)
{
    struct cudaPitchedPtr volume;
    MUST(cudaMalloc3D(&volume, (struct cudaExtent){1000, 8, 4}));
    return volume.pitch * 8 * 4;
}

SITE void churn_volume(void)
{
    struct cudaPitchedPtr volume;
    MUST(cudaMalloc3D(&volume, (struct cudaExtent){1000, 8, 4}));
    MUST(cudaFree(volume.ptr));
}

SITE size_t leak_managed(void)
{
    void *memory;
    MUST(cudaMallocManaged(&memory, 130000, CU_MEM_ATTACH_GLOBAL));
    return 130000;
}

SITE void churn_managed(void)
{
    void *memory;
    MUST(cudaMallocManaged(&memory, 130000, CU_MEM_ATTACH_GLOBAL));
    MUST(cudaFree(memory));
}

/* Stream-ordered churn has sizes of its own: its blocks stay in the pool and are handed out again. */
SITE size_t leak_async(void)
{
    void *memory;
    MUST(cudaMallocAsync(&memory, 65000, NULL));
    return 65000;
}

SITE void churn_async(void)
{
    void *memory;
    MUST(cudaMallocAsync(&memory, 64000, NULL));
    MUST(cudaFreeAsync(memory, NULL));
}

SITE size_t leak_async_per_thread(void)
{
    void *memory;
    MUST(cudaMallocAsync_ptsz(&memory, 12000, NULL));
    return 12000;
}

SITE void churn_async_per_thread(void)
{
    void *memory;
    MUST(cudaMallocAsync_ptsz(&memory, 11000, NULL));
    MUST(cudaFreeAsync_ptsz(memory, NULL));
}

SITE size_t leak_pool(void)
{
    cudaMemPool_t pool;
    void *memory;
    MUST(cudaDeviceGetDefaultMemPool(&pool, 0));
    MUST(cudaMallocFromPoolAsync(&memory, 33000, pool, NULL));
    return 33000;
}

SITE void churn_pool(void)
{
    cudaMemPool_t pool;
    void *memory;
    MUST(cudaDeviceGetDefaultMemPool(&pool, 0));
    MUST(cudaMallocFromPoolAsync(&memory, 32000, pool, NULL));
    MUST(cudaFreeAsync(memory, NULL));
}

SITE size_t leak_pinned(void)
{
    void *memory;
    MUST(cudaHostAlloc(&memory, 50000, 0));
    return 50000;
}

SITE void churn_pinned(void)
{
    void *memory;
    MUST(cudaHostAlloc(&memory, 50000, 0));
    MUST(cudaFreeHost(memory));
}

SITE size_t leak_pinned_default(void)
{
    void *memory;
    MUST(cudaMallocHost(&memory, 40000));
    return 40000;
}

SITE void churn_pinned_default(void)
{
    void *memory;
    MUST(cudaMallocHost(&memory, 40000));
    MUST(cudaFreeHost(memory));
}

/* Pins pieces of a static array, so that the registration alone is leaked. */
static char registrable[MAX_REGISTERED + 1][REGISTERED_BYTES] __attribute__((aligned(4096)));

SITE size_t leak_registered(void)
{
    static long next = 1;
    if (next > MAX_REGISTERED)
        return 0;
    MUST(cudaHostRegister(registrable[next++], REGISTERED_BYTES, 0));
    return REGISTERED_BYTES;
}

SITE void churn_registered(void)
{
    MUST(cudaHostRegister(registrable[0], REGISTERED_BYTES, 0));
    MUST(cudaHostUnregister(registrable[0]));
}

SITE size_t leak_array(void)
{
    cudaArray_t array;
    MUST(cudaMallocArray(&array, &float4_texel, 64, 32, 0));
    return 64 * 32 * 16;
}

SITE void churn_array(void)
{
    cudaArray_t array;
    MUST(cudaMallocArray(&array, &float4_texel, 64, 32, 0));
    MUST(cudaFreeArray(array));
}

SITE size_t leak_array3d(void)
{
    cudaArray_t array;
    MUST(cudaMalloc3DArray(&array, &half_texel, (struct cudaExtent){16, 16, 8}, 0));
    return 16 * 16 * 8 * 2;
}

SITE void churn_array3d(void)
{
    cudaArray_t array;
    MUST(cudaMalloc3DArray(&array, &half_texel, (struct cudaExtent){16, 16, 8}, 0));
    MUST(cudaFreeArray(array));
}

/* Opens memory that another allocation owns. A real driver refuses this within one process: nothing leaks
 * then. */
static cudaIpcMemHandle_t exported;

SITE size_t leak_ipc(void)
{
    void *memory;
    return cudaIpcOpenMemHandle(&memory, exported, 1) ? 0 : 250000;
}

SITE void churn_ipc(void)
{
    void *memory;
    if (!cudaIpcOpenMemHandle(&memory, exported, 1))
        MUST(cudaIpcCloseMemHandle(memory));
}

/* ---- driver ---- */

SITE size_t leak_driver_device(void)
{
    CUdeviceptr memory;
    MUST(cuMemAlloc_v2(&memory, 70000));
    return 70000;
}

SITE void churn_driver_device(void)
{
    CUdeviceptr memory;
    MUST(cuMemAlloc_v2(&memory, 70000));
    MUST(cuMemFree_v2(memory));
}

SITE size_t leak_driver_async(void)
{
    CUdeviceptr memory;
    MUST(cuMemAllocAsync(&memory, 90000, NULL));
    return 90000;
}

SITE void churn_driver_async(void)
{
    CUdeviceptr memory;
    MUST(cuMemAllocAsync(&memory, 89000, NULL));
    MUST(cuMemFreeAsync(memory, NULL));
}

static CUdeviceptr map_memory(CUmemGenericAllocationHandle *handle)
{
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address;
    MUST(cuMemCreate(handle, VMM_BYTES, &on_device, 0));
    MUST(cuMemAddressReserve(&address, VMM_BYTES, 0, 0, 0));
    MUST(cuMemMap(address, VMM_BYTES, 0, *handle, 0));
    MUST(cuMemSetAccess(address, VMM_BYTES, &access, 1));
    return address;
}

SITE size_t leak_vmm(void)
{
    CUmemGenericAllocationHandle handle;
    map_memory(&handle);
    return VMM_BYTES;
}

/* The handle is released, but the mapping keeps the memory. */
SITE size_t leak_vmm_mapping(void)
{
    CUmemGenericAllocationHandle handle;
    map_memory(&handle);
    MUST(cuMemRelease(handle));
    return VMM_BYTES;
}

SITE void churn_vmm(void)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = map_memory(&handle);
    MUST(cuMemUnmap(address, VMM_BYTES));
    MUST(cuMemAddressFree(address, VMM_BYTES));
    MUST(cuMemRelease(handle));
}

/* Released first and unmapped last: the unmapping frees. */
SITE void churn_vmm_mapping(void)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = map_memory(&handle);
    MUST(cuMemRelease(handle));
    MUST(cuMemUnmap(address, VMM_BYTES));
    MUST(cuMemAddressFree(address, VMM_BYTES));
}

SITE size_t leak_driver_array(void)
{
    CUarray array;
    MUST(cuArrayCreate_v2(&array, &rgba_image));
    return 128 * 16 * 4;
}

SITE void churn_driver_array(void)
{
    CUarray array;
    MUST(cuArrayCreate_v2(&array, &rgba_image));
    MUST(cuArrayDestroy(array));
}

SITE size_t leak_mipmap(void)
{
    CUmipmappedArray array;
    MUST(cuMipmappedArrayCreate(&array, &mipmap_base, 3));
    return (64 * 64 + 32 * 32 + 16 * 16) * 4;
}

SITE void churn_mipmap(void)
{
    CUmipmappedArray array;
    MUST(cuMipmappedArrayCreate(&array, &mipmap_base, 3));
    MUST(cuMipmappedArrayDestroy(array));
}

/* ---- calls that fail: out of memory, through four families ---- */

enum { FAILING_CALLS = 4 };

SITE void ask_for_too_much(void)
{
    const size_t too_much = (size_t)1 << 50;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    void *memory;
    if (!cudaMalloc(&memory, too_much) || !cudaMallocAsync(&memory, too_much, NULL) ||
        !cuMemAlloc_v2(&address, too_much) || !cuMemCreate(&handle, too_much, &on_device, 0)) {
        fprintf(stderr, "%s: a petabyte was granted\n", sample.name);
        exit(EXIT_FAILURE);
    }
    cudaGetLastError();
}

static struct family {
    const char *name;
    size_t (*leak)(void);
    void (*churn)(void);
    struct site site;
} families[] = {
#define FAMILY(name, layer, kind, api)                                                                       \
    {                                                                                                        \
        #name, leak_##name, churn_##name,                                                                    \
        {                                                                                                    \
            "leak_" #name, layer, kind, api, 0, 0                                                            \
        }                                                                                                    \
    }
    FAMILY(device, "gpu", "device", "cudaMalloc"),
    FAMILY(pitch, "gpu", "device", "cudaMallocPitch"),
    FAMILY(volume, "gpu", "device", "cudaMalloc3D"),
    FAMILY(managed, "gpu", "managed", "cudaMallocManaged"),
    FAMILY(async, "gpu", "async", "cudaMallocAsync"),
    FAMILY(async_per_thread, "gpu", "async", "cudaMallocAsync_ptsz"),
    FAMILY(pool, "gpu", "async", "cudaMallocFromPoolAsync"),
    FAMILY(pinned, "host", "pinned", "cudaHostAlloc"),
    FAMILY(pinned_default, "host", "pinned", "cudaMallocHost"),
    FAMILY(registered, "host", "pinned", "cudaHostRegister"),
    FAMILY(array, "gpu", "array", "cudaMallocArray"),
    FAMILY(array3d, "gpu", "array", "cudaMalloc3DArray"),
    FAMILY(ipc, "gpu", "ipc", "cudaIpcOpenMemHandle"),
    FAMILY(driver_device, "gpu", "device", "cuMemAlloc_v2"),
    FAMILY(driver_async, "gpu", "async", "cuMemAllocAsync"),
    FAMILY(vmm, "gpu", "vmm", "cuMemCreate"),
    FAMILY(vmm_mapping, "gpu", "vmm", "cuMemCreate"),
    FAMILY(driver_array, "gpu", "array", "cuArrayCreate_v2"),
    FAMILY(mipmap, "gpu", "array", "cuMipmappedArrayCreate"),
};
enum { FAMILIES = sizeof families / sizeof *families };

static void run_family(struct family *family)
{
    for (long i = 0; i < sample.count; i++) {
        size_t bytes = family->leak();
        family->site.objects += bytes > 0;
        family->site.bytes += (long)bytes;
        for (long c = 0; c < sample.churn; c++)
            family->churn();
        pause_us(sample.pause_us);
    }
}

int main(int argc, char **argv)
{
    const char *chosen = "all";
    long failing = 20, run = 0;
    void *owner;
    struct site sites[FAMILIES];
    char more[512];
    const struct extra_option extras[] = {
        {"families", NULL, &chosen, "comma-separated names as in leak_NAME; default all"},
        {"failing", &failing, NULL, "rounds of four calls that fail; default 20"},
        {NULL, NULL, NULL, NULL},
    };
    start_sample(argc, argv, &sample, extras);
    MUST(cudaMalloc(&owner, 250000));
    MUST(cudaIpcGetMemHandle(&exported, owner));
    for (size_t f = 0; f < FAMILIES; f++)
        sites[f] = families[f].site;
    char *list = strdup(chosen);
    for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
        long matched = 0;
        for (size_t f = 0; f < FAMILIES; f++)
            if (!strcmp(name, "all") || !strcmp(name, families[f].name)) {
                run_family(&families[f]);
                sites[f] = families[f].site;
                matched++;
            }
        if (!matched)
            refuse(&sample, "no such family", name);
        run += matched;
    }
    free(list);
    for (long i = 0; i < failing; i++)
        ask_for_too_much();
    MUST(cudaFree(owner));
    snprintf(more, sizeof more, ",\"failed_calls\":%ld", failing * FAILING_CALLS);
    append_usage(more, sizeof more);
    finish_sample(&sample, sites, FAMILIES, run * sample.count * sample.churn, more);
}
