/* What the CUDA samples share beside common.h: checked calls, and the stand-in's own count for comparison. */
#ifndef SAMPLES_CUDA_COMMON_H
#define SAMPLES_CUDA_COMMON_H

#include "../common.h"
#include "../cuda_standin/runtime_abi.h"

/* Stop unless the call succeeded. */
#define MUST(call) must((int)(call), #call)

static inline void must(int result, const char *call)
{
    if (result) {
        fprintf(stderr, "%s failed with CUDA error %d\n", call, result);
        exit(EXIT_FAILURE);
    }
}

/* Append the stand-in's usage to the JSON members in `more`; nothing with a real driver. */
static inline void append_usage(char *more, size_t room)
{
    struct standin_usage usage;
    size_t used = strlen(more);
    if (!standin_read_usage)
        return;
    standin_read_usage(&usage);
    snprintf(
        more + used, room - used,
        ",\"standin\":{\"device_bytes\":%zu,\"device_objects\":%zu,\"pooled_bytes\":%zu,\"pinned_bytes\":%zu,"
        "\"pinned_objects\":%zu,\"launches\":%zu,\"ioctls_held\":%zu}",
        usage.device_bytes, usage.device_objects, usage.pooled_bytes, usage.pinned_bytes,
        usage.pinned_objects, usage.launches, usage.ioctls_held);
}

#endif
