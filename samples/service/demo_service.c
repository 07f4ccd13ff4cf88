/*
 * A service that leaks in three layers at once, each from one function, amid healthy work and caches that
 * fill during the first fifth of the run and then stop. Every request is healthy but for the leaks' own
 * requests: kernel  session_open_without_close   every 11th request: a socket pair with 3,000 unread bytes
 *   host    response_buffer_map          every 13th: 64 KiB mapped and touched
 *   gpu     kv_block_alloc               every 17th: 256 KiB of device memory
 */
#include "../cuda/cuda_common.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

enum { KIB = 1024, MIB = 1024 * KIB };
enum { SESSION_EVERY = 11, RESPONSE_EVERY = 13, KV_BLOCK_EVERY = 17 };
enum { SESSION_BYTES = 3000, RESPONSE_BYTES = 64 * KIB, KV_BLOCK_BYTES = 256 * KIB };
enum {
    WARM_UP_SHARE = 5,
    POOL_FILL_EVERY = 2,
    PREFIX_FILL_EVERY = 25,
    PREFIX_HOST_BYTES = MIB,
    PREFIX_GPU_BYTES = 4 * MIB
};
static struct sample sample = {.name = "demo_service", .count = 4000, .pause_us = 2000};
static const char payload[SESSION_BYTES];

/* ---- the leaks ---- */

SITE void session_open_without_close(void)
{
    int session[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, session))
        die(&sample, "socketpair");
    if (write(session[0], payload, sizeof payload) != sizeof payload)
        die(&sample, "write");
}

SITE void response_buffer_map(void)
{
    char *buffer = mmap(NULL, RESPONSE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED)
        die(&sample, "mmap");
    touch(buffer, RESPONSE_BYTES);
}

SITE void kv_block_alloc(void)
{
    void *block;
    MUST(cudaMalloc(&block, KV_BLOCK_BYTES));
}

/* ---- caches that fill and stop ---- */

SITE void connection_pool_fill(void)
{
    int connection[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, connection))
        die(&sample, "socketpair");
    if (write(connection[0], payload, sizeof payload) != sizeof payload)
        die(&sample, "write");
}

SITE void prefix_cache_fill(void)
{
    void *device;
    char *host = mmap(NULL, PREFIX_HOST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        die(&sample, "mmap");
    touch(host, PREFIX_HOST_BYTES);
    MUST(cudaMalloc(&device, PREFIX_GPU_BYTES));
}

/* ---- healthy work: everything taken is given back ---- */

SITE void request_parse(void)
{
    char *body = malloc(5000);
    if (!body)
        die(&sample, "malloc");
    memset(body, 1, 5000);
    free(body);
}

SITE void access_log_write(void)
{
    int log = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (log < 0 || write(log, payload, sizeof payload) != sizeof payload)
        die(&sample, "/dev/null");
    close(log);
}

SITE void backend_call(void)
{
    int connection[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, connection))
        die(&sample, "socketpair");
    if (write(connection[0], payload, sizeof payload) != sizeof payload)
        die(&sample, "write");
    close(connection[0]);
    close(connection[1]);
}

SITE void staging_buffer_use(void)
{
    char *buffer = mmap(NULL, RESPONSE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED)
        die(&sample, "mmap");
    touch(buffer, RESPONSE_BYTES);
    munmap(buffer, RESPONSE_BYTES);
}

SITE void decode_kernel(void) {} /* the host side of a GPU kernel: only its address is used */

SITE void activations_compute(void)
{
    void *activations, *args[] = {&activations};
    MUST(cudaMalloc(&activations, KV_BLOCK_BYTES));
    cudaLaunchKernel((const void *)decode_kernel, (dim3){64, 1, 1}, (dim3){128, 1, 1}, args, 0, NULL);
    MUST(cudaFree(activations));
}

SITE void request_handle(long i)
{
    request_parse();
    backend_call();
    staging_buffer_use();
    activations_compute();
    if (i % SESSION_EVERY == 0)
        session_open_without_close();
    if (i % RESPONSE_EVERY == 0)
        response_buffer_map();
    if (i % KV_BLOCK_EVERY == 0)
        kv_block_alloc();
    access_log_write();
}

SITE void caches_warm(long i)
{
    if (i % POOL_FILL_EVERY == 0)
        connection_pool_fill();
    if (i % PREFIX_FILL_EVERY == 0)
        prefix_cache_fill();
}

/* How many of the requests 0 … requests - 1 are multiples of `every`. */
static long multiples(long requests, long every)
{
    return (requests + every - 1) / every;
}

/* Requests arrive at a steady rate however long each takes. */
static void wait_for_request(const struct timespec *start, long i)
{
    long long at_ns = start->tv_nsec + (long long)i * sample.pause_us * 1000;
    struct timespec at = {start->tv_sec + at_ns / 1000000000, at_ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

int main(int argc, char **argv)
{
    struct timespec start;
    char more[1024];
    start_sample(argc, argv, &sample, NULL);
    raise_descriptor_limit();
    long warm_up = sample.count / WARM_UP_SHARE;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long i = 0; i < sample.count; i++) {
        wait_for_request(&start, i);
        request_handle(i);
        if (i < warm_up)
            caches_warm(i);
    }
    long sessions = multiples(sample.count, SESSION_EVERY),
         responses = multiples(sample.count, RESPONSE_EVERY);
    long kv_blocks = multiples(sample.count, KV_BLOCK_EVERY),
         prefixes = multiples(warm_up, PREFIX_FILL_EVERY);
    long connections = multiples(warm_up, POOL_FILL_EVERY);
    struct site sites[] = {
        {"session_open_without_close", "kernel", "slab", "socketpair", sessions, sessions * SESSION_BYTES},
        {"response_buffer_map", "host", "mmap_anon", "mmap", responses, responses * RESPONSE_BYTES},
        {"kv_block_alloc", "gpu", "device", "cudaMalloc", kv_blocks, kv_blocks * KV_BLOCK_BYTES},
    };
    snprintf(more, sizeof more,
             ",\"cached\":[{\"function\":\"connection_pool_fill\",\"layer\":\"kernel\",\"objects\":%ld,"
             "\"bytes\":%ld},"
             "{\"function\":\"prefix_cache_fill\",\"layer\":\"host\",\"objects\":%ld,\"bytes\":%ld},"
             "{\"function\":\"prefix_cache_fill\",\"layer\":\"gpu\",\"objects\":%ld,\"bytes\":%ld}]",
             connections, connections * SESSION_BYTES, prefixes, prefixes * PREFIX_HOST_BYTES, prefixes,
             prefixes * PREFIX_GPU_BYTES);
    append_usage(more, sizeof more);
    finish_sample(&sample, sites, 3, sample.count, more);
}
