/*
 * The stand-in's device: one table of blocks behind one lock. It hands out device addresses from a reserved,
 * inaccessible range (so device memory costs nothing), reuses them after a free, and enforces a device size.
 */
#ifndef STANDIN_DEVICE_H
#define STANDIN_DEVICE_H

#include "driver_abi.h"
#include <pthread.h>
#include <stdbool.h>

enum kind { /* what a block is; kinds up to MEMORY take device memory */
            DEVICE,
            MANAGED,
            STREAM_ORDERED,
            ARRAY,
            MIPMAPPED_ARRAY,
            MEMORY,      /* physical memory of cuMemCreate */
            RESERVATION, /* addresses of cuMemAddressReserve */
            IPC,         /* memory of another allocation, opened by cuIpcOpenMemHandle */
            MAPPING,     /* of MEMORY into a RESERVATION */
            PINNED,      /* host memory of cuMemHostAlloc */
            REGISTERED,  /* host memory of cuMemHostRegister */
};

enum state { UNUSED, LIVE, POOLED /* freed in stream order and kept by its pool */ };

struct block {
    unsigned long long address;
    size_t bytes; /* as asked for */
    size_t span;  /* of addresses: bytes rounded up */
    enum kind kind;
    enum state state;
    int references;        /* of MEMORY: its handle and its mappings */
    int ioctl_fd;          /* the kernel object it holds, or -1 */
    CUcontext context;     /* it dies with this one; NULL = with none */
    CUmemoryPool pool;     /* of a STREAM_ORDERED block */
    struct block *backing; /* of a MAPPING: its MEMORY */
    struct block *next_at_address, *next_reusable;
};

extern pthread_mutex_t device_lock;

/* All that follows is called with device_lock held, except where said otherwise. */

/* A new block at an address of the device's choosing, or NULL when the device is full. */
struct block *block_create(enum kind kind, size_t bytes, CUcontext context);
/* A new block at an address that exists already (MAPPING, PINNED, REGISTERED), or NULL. */
struct block *block_create_at(enum kind kind, unsigned long long address, size_t bytes, CUcontext context);
/* The LIVE block of this kind that begins at the address, or NULL. */
struct block *block_find(enum kind kind, unsigned long long address);
void block_free(struct block *block);

void pool_keep(struct block *block);                      /* LIVE → POOLED */
struct block *pool_take(CUmemoryPool pool, size_t bytes); /* POOLED → LIVE, or NULL */
void pool_adopt(struct block *block, CUmemoryPool pool);  /* DEVICE → STREAM_ORDERED of that pool */
unsigned long long pool_any(CUmemoryPool pool);           /* address of a POOLED block, or 0 */
void blocks_free_of_context(CUcontext context);           /* what a context's end frees without a call */
size_t device_size(void);
size_t device_used(void);
void count_launch(void); /* takes the lock itself */

/* The context current on the calling thread, or NULL (driver_context.c; needs no lock). */
CUcontext current_context(void);
/* CUDA_SUCCESS when the driver is initialised and a context is current (driver_context.c; needs no lock). */
CUresult ready(void);

#endif
