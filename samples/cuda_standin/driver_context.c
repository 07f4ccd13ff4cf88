/* Initialisation, the one device, and contexts: created, primary, and the current one of each thread. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_CURRENT = 16 };

struct CUctx_st {
    int retained; /* of the primary context; a created one has 0 */
};

static bool initialised;
static struct CUctx_st primary;
static _Thread_local CUcontext current[MAX_CURRENT];
static _Thread_local int depth;

CUcontext current_context(void)
{
    return depth ? current[depth - 1] : NULL;
}

CUresult ready(void)
{
    if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_NOT_INITIALIZED;
    return current_context() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult check_device(CUdevice device)
{
    if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_NOT_INITIALIZED;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    __atomic_store_n(&initialised, true, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = 12080; /* 1000 × major + 10 × minor */
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return check_device(ordinal);
}

CUresult cuDeviceGetCount(int *count)
{
    *count = 1;
    return check_device(0);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    strncpy(name, "stand-in (no GPU)", (size_t)length - 1);
    name[length - 1] = '\0';
    return check_device(device);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    *bytes = device_size();
    return check_device(device);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CUresult result = ready();
    pthread_mutex_lock(&device_lock);
    *total_bytes = device_size();
    *free_bytes = *total_bytes - device_used();
    pthread_mutex_unlock(&device_lock);
    return result;
}

static CUresult push(CUcontext context)
{
    if (!context || depth == MAX_CURRENT)
        return CUDA_ERROR_INVALID_CONTEXT;
    current[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *context, CUdevice device)
{
    CUresult result = check_device(device);
    if (result)
        return result;
    *context = calloc(1, sizeof **context);
    return *context ? push(*context) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    return create(context, device);
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
                        CUdevice device)
{
    (void)params, (void)count, (void)flags;
    return create(context, device);
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
    (void)params, (void)flags;
    return create(context, device);
}

static void forget_current(CUcontext context)
{
    int kept = 0;
    for (int i = 0; i < depth; i++)
        if (current[i] != context)
            current[kept++] = current[i];
    depth = kept;
}

static void end_context(CUcontext context)
{
    pthread_mutex_lock(&device_lock);
    blocks_free_of_context(context);
    pthread_mutex_unlock(&device_lock);
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
    if (!context || context == &primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    forget_current(context);
    end_context(context);
    free(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    if (depth)
        depth--;
    return context ? push(context) : CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = current_context();
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    return push(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = current[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    return ready();
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = check_device(device);
    if (result)
        return result;
    __atomic_add_fetch(&primary.retained, 1, __ATOMIC_RELAXED);
    *context = &primary;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = check_device(device);
    if (result)
        return result;
    int left = __atomic_sub_fetch(&primary.retained, 1, __ATOMIC_RELAXED);
    if (left < 0) {
        __atomic_store_n(&primary.retained, 0, __ATOMIC_RELAXED);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!left)
        end_context(&primary);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    CUresult result = check_device(device);
    if (!result)
        end_context(&primary);
    return result;
}
