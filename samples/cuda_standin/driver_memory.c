/* Device, managed, stream-ordered, pinned and array memory, and memory of other processes. */
#include "device.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PITCH_ALIGNMENT = 512 };

struct CUmemPoolHandle_st {
    CUdevice device;
};
static struct CUmemPoolHandle_st default_pool;

static CUresult allocate(unsigned long long *address, enum kind kind, size_t bytes)
{
    CUresult result = ready();
    if (result || !address || !bytes)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device_lock);
    struct block *block = block_create(kind, bytes, current_context());
    pthread_mutex_unlock(&device_lock);
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = block->address;
    return CUDA_SUCCESS;
}

static CUresult release(unsigned long long address, enum kind kind)
{
    pthread_mutex_lock(&device_lock);
    struct block *block = block_find(kind, address);
    if (block)
        block_free(block);
    pthread_mutex_unlock(&device_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    return allocate(address, DEVICE, bytes);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                            unsigned int element)
{
    (void)element;
    *pitch = (width + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT;
    return allocate(address, DEVICE, *pitch * height);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    (void)flags;
    return allocate(address, MANAGED, bytes);
}

/* Back to its pool, which keeps it for the next allocation of the same size. */
static CUresult free_in_stream_order(CUdeviceptr address)
{
    pthread_mutex_lock(&device_lock);
    struct block *block = block_find(STREAM_ORDERED, address);
    if (block)
        pool_keep(block);
    pthread_mutex_unlock(&device_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    if (!address || !release(address, DEVICE) || !release(address, MANAGED))
        return CUDA_SUCCESS;
    return free_in_stream_order(address);
}

/* A pool that has no block of this size grows by one, through the public cuMemAlloc_v2: a call within a call.
 */
static CUresult allocate_in_stream_order(CUdeviceptr *address, size_t bytes, CUmemoryPool pool)
{
    pthread_mutex_lock(&device_lock);
    struct block *kept = pool_take(pool, bytes);
    pthread_mutex_unlock(&device_lock);
    if (kept) {
        *address = kept->address;
        return CUDA_SUCCESS;
    }
    CUresult result = cuMemAlloc_v2(address, bytes);
    if (result)
        return result;
    pthread_mutex_lock(&device_lock);
    pool_adopt(block_find(DEVICE, *address), pool);
    pthread_mutex_unlock(&device_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    (void)stream;
    return allocate_in_stream_order(address, bytes, &default_pool);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    (void)stream;
    return allocate_in_stream_order(address, bytes, &default_pool);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    (void)stream;
    return allocate_in_stream_order(address, bytes, pool);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    (void)stream;
    return allocate_in_stream_order(address, bytes, pool);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    (void)stream;
    return free_in_stream_order(address);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    (void)stream;
    return free_in_stream_order(address);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    *pool = calloc(1, sizeof **pool);
    if (!*pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*pool)->device = properties->location.id;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    if (pool == &default_pool)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device_lock);
    for (unsigned long long address; (address = pool_any(pool));)
        block_free(block_find(STREAM_ORDERED, address));
    pthread_mutex_unlock(&device_lock);
    free(pool);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    *pool = &default_pool;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

static CUresult pin(enum kind kind, void *memory, size_t bytes)
{
    pthread_mutex_lock(&device_lock);
    struct block *block = block_create_at(kind, (unsigned long long)memory, bytes, current_context());
    pthread_mutex_unlock(&device_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_pinned(void **memory, size_t bytes)
{
    CUresult result = ready();
    if (result || !bytes)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = pin(PINNED, mapped, bytes);
    if (result)
        munmap(mapped, bytes);
    else
        *memory = mapped;
    return result;
}

CUresult cuMemAllocHost_v2(void **memory, size_t bytes)
{
    return allocate_pinned(memory, bytes);
}

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    (void)flags;
    return allocate_pinned(memory, bytes);
}

CUresult cuMemFreeHost(void *memory)
{
    pthread_mutex_lock(&device_lock);
    struct block *block = block_find(PINNED, (unsigned long long)memory);
    if (block) {
        munmap(memory, block->bytes);
        block_free(block);
    }
    pthread_mutex_unlock(&device_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags)
{
    (void)flags;
    CUresult result = ready();
    if (result || !memory || !bytes)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device_lock);
    bool registered = block_find(REGISTERED, (unsigned long long)memory);
    pthread_mutex_unlock(&device_lock);
    return registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : pin(REGISTERED, memory, bytes);
}

CUresult cuMemHostUnregister(void *memory)
{
    CUresult result = release((unsigned long long)memory, REGISTERED);
    return result ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS;
}

static size_t channel_bytes(CUarray_format format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    default:
        return 4;
    }
}

/* A height or depth of 0 says that the array lacks that dimension. */
static size_t array_bytes(size_t width, size_t height, size_t depth, CUarray_format format,
                          unsigned int channels)
{
    return width * (height ? height : 1) * (depth ? depth : 1) * channels * channel_bytes(format);
}

static CUresult create_array(void *array, enum kind kind, size_t bytes)
{
    unsigned long long address;
    CUresult result = allocate(&address, kind, bytes);
    if (!result)
        memcpy(array, &address, sizeof address);
    return result;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d)
{
    return create_array(array, ARRAY, array_bytes(d->Width, d->Height, 0, d->Format, d->NumChannels));
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    return create_array(array, ARRAY, array_bytes(d->Width, d->Height, d->Depth, d->Format, d->NumChannels));
}

CUresult cuArrayDestroy(CUarray array)
{
    return release((unsigned long long)array, ARRAY) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

static size_t halved(size_t extent, unsigned int times)
{
    return extent && !(extent >> times) ? 1 : extent >> times;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d,
                                unsigned int levels)
{
    size_t bytes = 0;
    for (unsigned int level = 0; level < levels; level++)
        bytes += array_bytes(halved(d->Width, level), halved(d->Height, level), halved(d->Depth, level),
                             d->Format, d->NumChannels);
    return create_array(array, MIPMAPPED_ARRAY, bytes);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    return release((unsigned long long)array, MIPMAPPED_ARRAY) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    pthread_mutex_lock(&device_lock);
    struct block *block = block_find(DEVICE, address);
    memset(handle, 0, sizeof *handle);
    if (block)
        memcpy(handle, &block->bytes, sizeof block->bytes);
    pthread_mutex_unlock(&device_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The real driver refuses a handle of the same process; the stand-in opens it, so that one program suffices.
 */
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    (void)flags;
    size_t bytes;
    memcpy(&bytes, &handle, sizeof bytes);
    return allocate(address, IPC, bytes);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    return release(address, IPC);
}
