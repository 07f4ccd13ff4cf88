/* Launches and graphs, which run nothing, and the look-up of functions by name. */
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static CUresult launch(const void *what)
{
    CUresult result = ready();
    if (result || !what)
        return result ? result : CUDA_ERROR_INVALID_HANDLE;
    count_launch();
    return CUDA_SUCCESS;
}

#define UNUSED_LAUNCH_ARGUMENTS                                                                              \
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z,                   \
        (void)shared_bytes, (void)stream, (void)params, (void)extra

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z,
                        unsigned int shared_bytes, CUstream stream, void **params, void **extra)
{
    UNUSED_LAUNCH_ARGUMENTS;
    return launch(function);
}

CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **params,
                             void **extra)
{
    UNUSED_LAUNCH_ARGUMENTS;
    return launch(function);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    (void)config, (void)params, (void)extra;
    return launch(function);
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    (void)config, (void)params, (void)extra;
    return launch(function);
}

#define UNUSED_COOPERATIVE_ARGUMENTS                                                                         \
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z,                   \
        (void)shared_bytes, (void)stream, (void)params

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                   void **params)
{
    UNUSED_COOPERATIVE_ARGUMENTS;
    return launch(function);
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                        unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                        void **params)
{
    UNUSED_COOPERATIVE_ARGUMENTS;
    return launch(function);
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    *graph = malloc(1);
    return flags || !*graph ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph)
{
    free(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    *executable = graph ? malloc(1) : NULL;
    return *executable ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream)
{
    (void)stream;
    return launch(executable);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec executable, CUstream stream)
{
    (void)stream;
    return launch(executable);
}

CUresult cuGraphExecDestroy(CUgraphExec executable)
{
    free(executable);
    return CUDA_SUCCESS;
}

/* Callers ask for the plain name and get the current ABI of it: the per-thread twin first if they want that.
 */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    static const char *const suffixes[] = {"_ptsz", "_v2", "WithFlags", ""};
    Dl_info self;
    char name[96];
    (void)version;
    *function = NULL;
    dladdr((const void *)(uintptr_t)cuGetProcAddress_v2, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    size_t first = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? 0 : 1;
    for (size_t i = first; library && !*function && i < sizeof suffixes / sizeof *suffixes; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        *function = dlsym(library, name);
    }
    if (library)
        dlclose(library);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
