/* The runtime: every call reaches the driver's public function, as a call within a call. */
#include "runtime_abi.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static unsigned int resets; /* cudaDeviceReset calls so far: each makes every thread take the context anew */
static _Thread_local unsigned int context_taken;
static _Thread_local cudaError_t last_error;

static cudaError_t status(CUresult result)
{
    if (result)
        last_error = (cudaError_t)result;
    return (cudaError_t)result;
}

/* Make a context current on this thread, once: the program's own if it set one, else the primary one. */
static CUresult take_context(void)
{
    unsigned int wanted = __atomic_load_n(&resets, __ATOMIC_RELAXED) + 1;
    if (context_taken == wanted)
        return CUDA_SUCCESS;
    CUcontext context = NULL;
    CUresult result = cuInit(0);
    if (!result)
        result = cuCtxGetCurrent(&context);
    if (!result && !context) {
        result = cuDevicePrimaryCtxRetain(&context, 0);
        if (!result)
            result = cuCtxSetCurrent(context);
    }
    if (!result)
        context_taken = wanted;
    return result;
}

/* Run the driver call on a thread that has a context. */
#define CALL(driver_call)                                                                                    \
    do {                                                                                                     \
        CUresult result_ = take_context();                                                                   \
        return status(result_ ? result_ : (driver_call));                                                    \
    } while (0)

static CUdeviceptr device_pointer(const void *memory)
{
    return (CUdeviceptr)memory;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    CALL(cuDeviceGetCount(count));
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    CALL(device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS);
}

cudaError_t cudaDeviceReset(void)
{
    CUresult result = take_context();
    if (!result)
        result = cuDevicePrimaryCtxReset_v2(0);
    __atomic_add_fetch(&resets, 1, __ATOMIC_RELAXED);
    return status(result);
}

cudaError_t cudaDeviceSynchronize(void)
{
    CALL(cuCtxSynchronize());
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess                 ? "no error"
           : error == cudaErrorMemoryAllocation ? "out of memory"
                                                : "failed";
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    CALL(cuMemGetInfo_v2(free_bytes, total_bytes));
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    CALL(cuMemAlloc_v2((CUdeviceptr *)memory, bytes));
}

cudaError_t cudaFree(void *memory)
{
    CALL(cuMemFree_v2(device_pointer(memory)));
}

cudaError_t cudaMallocPitch(void **memory, size_t *pitch, size_t width, size_t height)
{
    CALL(cuMemAllocPitch_v2((CUdeviceptr *)memory, pitch, width, height, 4));
}

cudaError_t cudaMalloc3D(struct cudaPitchedPtr *memory, struct cudaExtent extent)
{
    memory->xsize = extent.width;
    memory->ysize = extent.height;
    CALL(cuMemAllocPitch_v2((CUdeviceptr *)&memory->ptr, &memory->pitch, extent.width,
                            extent.height * extent.depth, 4));
}

cudaError_t cudaMallocManaged(void **memory, size_t bytes, unsigned int flags)
{
    CALL(cuMemAllocManaged((CUdeviceptr *)memory, bytes, flags));
}

cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t stream)
{
    CALL(cuMemAllocAsync((CUdeviceptr *)memory, bytes, stream));
}

cudaError_t cudaMallocAsync_ptsz(void **memory, size_t bytes, cudaStream_t stream)
{
    CALL(cuMemAllocAsync_ptsz((CUdeviceptr *)memory, bytes, stream));
}

cudaError_t cudaMallocFromPoolAsync(void **memory, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    CALL(cuMemAllocFromPoolAsync((CUdeviceptr *)memory, bytes, pool, stream));
}

cudaError_t cudaMallocFromPoolAsync_ptsz(void **memory, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    CALL(cuMemAllocFromPoolAsync_ptsz((CUdeviceptr *)memory, bytes, pool, stream));
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream)
{
    CALL(cuMemFreeAsync(device_pointer(memory), stream));
}

cudaError_t cudaFreeAsync_ptsz(void *memory, cudaStream_t stream)
{
    CALL(cuMemFreeAsync_ptsz(device_pointer(memory), stream));
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    CALL(cuDeviceGetDefaultMemPool(pool, device));
}

cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    CALL(cuMemAllocHost_v2(memory, bytes));
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    CALL(cuMemHostAlloc(memory, bytes, flags));
}

cudaError_t cudaFreeHost(void *memory)
{
    CALL(cuMemFreeHost(memory));
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned int flags)
{
    CALL(cuMemHostRegister_v2(memory, bytes, flags));
}

cudaError_t cudaHostUnregister(void *memory)
{
    CALL(cuMemHostUnregister(memory));
}

static CUDA_ARRAY3D_DESCRIPTOR describe(const struct cudaChannelFormatDesc *format, struct cudaExtent extent)
{
    CUDA_ARRAY3D_DESCRIPTOR descriptor = {
        .Width = extent.width, .Height = extent.height, .Depth = extent.depth};
    descriptor.Format = format->x == 8    ? CU_AD_FORMAT_UNSIGNED_INT8
                        : format->x == 16 ? CU_AD_FORMAT_HALF
                                          : CU_AD_FORMAT_FLOAT;
    descriptor.NumChannels = 1u + (format->y > 0) + (format->z > 0) + (format->w > 0);
    return descriptor;
}

cudaError_t cudaMallocArray(cudaArray_t *array, const struct cudaChannelFormatDesc *format, size_t width,
                            size_t height, unsigned int flags)
{
    (void)flags;
    CUDA_ARRAY3D_DESCRIPTOR whole = describe(format, (struct cudaExtent){width, height, 0});
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = width, .Height = height, .Format = whole.Format};
    flat.NumChannels = whole.NumChannels;
    CALL(cuArrayCreate_v2((CUarray *)array, &flat));
}

cudaError_t cudaMalloc3DArray(cudaArray_t *array, const struct cudaChannelFormatDesc *format,
                              struct cudaExtent extent, unsigned int flags)
{
    (void)flags;
    CUDA_ARRAY3D_DESCRIPTOR descriptor = describe(format, extent);
    CALL(cuArray3DCreate_v2((CUarray *)array, &descriptor));
}

cudaError_t cudaFreeArray(cudaArray_t array)
{
    CALL(cuArrayDestroy((CUarray)array));
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory)
{
    CALL(cuIpcGetMemHandle((CUipcMemHandle *)handle, device_pointer(memory)));
}

cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t handle, unsigned int flags)
{
    CUipcMemHandle same;
    memcpy(&same, &handle, sizeof same);
    CALL(cuIpcOpenMemHandle_v2((CUdeviceptr *)memory, same, flags));
}

cudaError_t cudaIpcCloseMemHandle(void *memory)
{
    CALL(cuIpcCloseMemHandle(device_pointer(memory)));
}

/*
 * Kernels of registered fat binaries. As in the real runtime, a fat binary is given to the driver at the first launch
 * of a kernel of it, and the driver's handle of that kernel is launched. A stub that was never registered is itself
 * taken for a handle.
 */
enum { MAX_BINARIES = 16, MAX_STUBS = 256 };

static struct binary {
    const void *container;
    CUlibrary library;
} binaries[MAX_BINARIES];

static struct stub {
    const void *address;
    const char *name;
    struct binary *binary;
    CUkernel kernel;
} stubs[MAX_STUBS];

static size_t binary_count, stub_count;
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;

void **__cudaRegisterFatBinary(void *wrapper)
{
    const struct fatbin_wrapper *wrapped = wrapper;
    if (binary_count == MAX_BINARIES)
        abort();
    struct binary *binary = &binaries[binary_count++];
    binary->container = wrapped->container;
    return (void **)binary;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

void __cudaRegisterFunction(void **handle, const char *stub, char *device_function, const char *name,
                            int thread_limit, void *thread, void *block, void *block_size, void *grid_size,
                            int *warp_size)
{
    (void)device_function, (void)thread_limit, (void)thread, (void)block, (void)block_size, (void)grid_size,
        (void)warp_size;
    if (stub_count == MAX_STUBS)
        abort();
    stubs[stub_count++] = (struct stub){stub, name, (struct binary *)handle, NULL};
}

static CUresult function_of(const void *symbol, CUfunction *function)
{
    CUresult result = CUDA_SUCCESS;
    struct stub *stub = stubs, *end = stubs + stub_count;
    while (stub < end && stub->address != symbol)
        stub++;
    *function = (CUfunction)symbol;
    if (stub == end)
        return result;
    pthread_mutex_lock(&registry_lock);
    if (!stub->binary->library)
        result = cuLibraryLoadData(&stub->binary->library, stub->binary->container, NULL, NULL, 0, NULL, NULL, 0);
    if (!result && !stub->kernel)
        result = cuLibraryGetKernel(&stub->kernel, stub->binary->library, stub->name);
    pthread_mutex_unlock(&registry_lock);
    *function = (CUfunction)stub->kernel;
    return result;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol)
{
    CALL(function_of(symbol, (CUfunction *)function));
}

/* Run the driver's launch of the kernel that a symbol stands for. */
#define LAUNCH(symbol, driver_launch)                                                                        \
    do {                                                                                                     \
        CUfunction kernel;                                                                                   \
        CUresult found_ = take_context();                                                                    \
        if (!found_)                                                                                         \
            found_ = function_of(symbol, &kernel);                                                           \
        return status(found_ ? found_ : (driver_launch));                                                    \
    } while (0)

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared_bytes,
                             cudaStream_t stream)
{
    LAUNCH(function, cuLaunchKernel(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                    (unsigned int)shared_bytes, stream, args, NULL));
}

cudaError_t cudaLaunchKernel_ptsz(const void *function, dim3 grid, dim3 block, void **args,
                                  size_t shared_bytes, cudaStream_t stream)
{
    LAUNCH(function, cuLaunchKernel_ptsz(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                         (unsigned int)shared_bytes, stream, args, NULL));
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args,
                                        size_t shared_bytes, cudaStream_t stream)
{
    LAUNCH(function, cuLaunchCooperativeKernel(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                               (unsigned int)shared_bytes, stream, args));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args)
{
    CUlaunchConfig same = {config->gridDim.x,  config->gridDim.y,  config->gridDim.z, config->blockDim.x,
                           config->blockDim.y, config->blockDim.z, 0,                 config->stream,
                           NULL,               0};
    same.sharedMemBytes = (unsigned int)config->dynamicSmemBytes;
    LAUNCH(function, cuLaunchKernelEx(&same, kernel, args, NULL));
}
