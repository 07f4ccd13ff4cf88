/* Virtual memory management: physical memory, reserved addresses, and mappings of the one into the other. */
#include "device.h"

/* Memory lives while its handle or a mapping of it does. */
static void drop_reference(struct block *memory)
{
    if (!--memory->references)
        block_free(memory);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    (void)properties, (void)flags;
    CUresult result = ready();
    if (result || !bytes)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device_lock);
    struct block *memory = block_create(MEMORY, bytes, NULL); /* outlives contexts, as with the real driver */
    pthread_mutex_unlock(&device_lock);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = memory->address;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&device_lock);
    struct block *memory = block_find(MEMORY, handle);
    if (memory)
        drop_reference(memory);
    pthread_mutex_unlock(&device_lock);
    return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags)
{
    (void)alignment, (void)hint, (void)flags;
    CUresult result = ready();
    if (result || !bytes)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device_lock);
    struct block *reservation = block_create(RESERVATION, bytes, NULL);
    pthread_mutex_unlock(&device_lock);
    if (!reservation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reservation->address;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    pthread_mutex_lock(&device_lock);
    struct block *reservation = block_find(RESERVATION, address);
    bool whole = reservation && reservation->bytes == bytes;
    if (whole)
        block_free(reservation);
    pthread_mutex_unlock(&device_lock);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device_lock);
    struct block *memory = block_find(MEMORY, handle);
    if (memory && !offset && !flags && bytes == memory->bytes && !block_find(MAPPING, address)) {
        struct block *mapping = block_create_at(MAPPING, address, bytes, NULL);
        result = mapping ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (mapping) {
            mapping->backing = memory;
            memory->references++;
        }
    }
    pthread_mutex_unlock(&device_lock);
    return result;
}

/* Unmaps one mapping or several that lie end to end. */
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    size_t unmapped = 0;
    pthread_mutex_lock(&device_lock);
    while (unmapped < bytes) {
        struct block *mapping = block_find(MAPPING, address + unmapped);
        if (!mapping)
            break;
        unmapped += mapping->bytes;
        drop_reference(mapping->backing);
        block_free(mapping);
    }
    pthread_mutex_unlock(&device_lock);
    return bytes && unmapped == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    (void)address;
    return bytes && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    pthread_mutex_lock(&device_lock);
    struct block *mapping = block_find(MAPPING, (unsigned long long)address);
    if (mapping) {
        mapping->backing->references++;
        *handle = mapping->backing->address;
    }
    pthread_mutex_unlock(&device_lock);
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
