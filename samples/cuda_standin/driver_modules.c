/*
 * Modules, libraries and the kernels in them. An image is an uncompressed cubin, alone or as the first entry of a fat
 * binary, of which the stand-in reads the parameters of kernels as tools do that know the format from cuobjdump.
 */
#include "device.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A module and a library are the same to the stand-in, and so are a function and a kernel. */
struct CUmod_st {
    const void *image;
    void *copy; /* of a file */
};

struct CUfunc_st {
    const void *image;
    char name[];
};

enum { ATTRIBUTE_WITH_PAYLOAD = 4, KPARAM_INFO = 0x17 };

static const unsigned char *cubin_of(const void *image)
{
    const uint32_t *words = image;
    if (*words == 0x466243B1) { /* the wrapper of a fat binary */
        memcpy(&image, (const char *)image + 8, sizeof image);
        words = image;
    }
    if (*words == 0xBA55ED50) /* header of 16 bytes, header of the first entry: its length in its second word */
        return (const unsigned char *)image + 16 + words[5];
    return image;
}

static CUresult load(CUmodule *module, const void *image)
{
    CUresult result = ready();
    if (result)
        return result;
    if (!image || memcmp(cubin_of(image), ELFMAG, SELFMAG))
        return CUDA_ERROR_INVALID_VALUE;
    *module = calloc(1, sizeof **module);
    (*module)->image = cubin_of(image);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    return load(module, image);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                            void **values)
{
    (void)count, (void)options, (void)values;
    return load(module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return load(module, image);
}

CUresult cuModuleLoad(CUmodule *module, const char *file)
{
    enum { MOST = 1 << 20 };
    FILE *opened = fopen(file, "rb");
    char *copy = opened ? calloc(1, MOST) : NULL;
    if (!copy || !fread(copy, 1, MOST, opened))
        return CUDA_ERROR_NOT_FOUND;
    fclose(opened);
    CUresult result = load(module, copy);
    if (result)
        free(copy);
    else
        (*module)->copy = copy;
    return result;
}

CUresult cuModuleUnload(CUmodule module)
{
    free(module->copy);
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit_options,
                           void **jit_values, unsigned int jit_count, CUlibraryOption *options, void **values,
                           unsigned int count)
{
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return load((CUmodule *)library, image);
}

CUresult cuLibraryUnload(CUlibrary library)
{
    return cuModuleUnload((CUmodule)library);
}

static const Elf64_Shdr *info_of(const void *image, const char *kernel)
{
    const Elf64_Ehdr *header = image;
    const Elf64_Shdr *sections = (const void *)((const char *)image + header->e_shoff);
    const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (!strncmp(name, ".nv.info.", 9) && !strcmp(name + 9, kernel))
            return &sections[i];
    }
    return NULL;
}

static CUresult look_up(CUfunction *function, CUmodule module, const char *name)
{
    if (!module || !info_of(module->image, name))
        return module ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
    *function = calloc(1, sizeof **function + strlen(name) + 1);
    (*function)->image = module->image;
    strcpy((*function)->name, name);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return look_up(function, module, name);
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return look_up((CUfunction *)kernel, (CUmodule)library, name);
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    const struct CUfunc_st *known = (const void *)kernel;
    struct CUmod_st module = {known->image, NULL};
    return look_up(function, &module, known->name);
}

static CUresult parameter(const struct CUfunc_st *function, size_t index, size_t *offset, size_t *size)
{
    const Elf64_Shdr *section = info_of(function->image, function->name);
    const unsigned char *info = (const unsigned char *)function->image + section->sh_offset;
    for (size_t at = 0; at + 4 <= section->sh_size;) {
        uint16_t length = 0, ordinal, place;
        uint32_t packed;
        if (info[at] == ATTRIBUTE_WITH_PAYLOAD)
            memcpy(&length, info + at + 2, sizeof length);
        memcpy(&ordinal, info + at + 8, sizeof ordinal);
        if (info[at + 1] == KPARAM_INFO && ordinal == index) {
            memcpy(&place, info + at + 10, sizeof place);
            memcpy(&packed, info + at + 12, sizeof packed);
            *offset = place;
            if (size)
                *size = packed >> 18;
            return CUDA_SUCCESS;
        }
        at += 4 + length;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size)
{
    return parameter(function, index, offset, size);
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
    return parameter((const void *)kernel, index, offset, size);
}
