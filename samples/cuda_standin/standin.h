/* What only the stand-in has. Programs look the function up weakly: with a real libcuda it is absent. */
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

/* What the stand-in's device and pinned host memory hold now. */
struct standin_usage {
    size_t device_bytes;   /* as asked for, blocks cached by pools included */
    size_t device_objects; /* the same, counted */
    size_t pooled_bytes;   /* of these, freed by cuMemFreeAsync and kept by their pool */
    size_t pinned_bytes;   /* pinned host memory, allocated or registered */
    size_t pinned_objects;
    size_t launches;    /* kernel and graph launches since the start */
    size_t ioctls_held; /* allocations that hold a kernel object, made inside an ioctl */
};

__attribute__((visibility("default"), weak)) void standin_read_usage(struct standin_usage *usage);

#endif
