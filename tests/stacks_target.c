/* What test_stacks_table records: a main thread and another one keep a kernel object, a mapping and device memory, each
 * some calls deep, in rounds: at the last one their paths have been seen. Compiled as C with and without frame pointers,
 * and as C++. */
#include <pthread.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __cplusplus
#define NAMESPACE namespace cache {
#define END }
#define USE cache::
extern "C" int cudaMalloc(void **, size_t);
#else
#define NAMESPACE
#define END
#define USE
int cudaMalloc(void **, size_t);
#endif
#define APART __attribute__((noinline, noclone))

enum { MAP_BYTES = 65536, DEVICE_BYTES = 4096, ROUNDS = 3, ROUND_US = 400000 };
static volatile long kept;

NAMESPACE
APART long keep_object(int depth)
{
    volatile char local[64];
    local[depth] = 1;
    return eventfd(0, 0) + local[depth];
}

APART long keep_map(int depth)
{
    volatile char local[96];
    local[depth] = 1;
    return (long)mmap(NULL, MAP_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + local[depth];
}

APART long keep_device(int depth)
{
    void *memory;
    volatile char local[160];
    local[depth] = 1;
    return cudaMalloc(&memory, DEVICE_BYTES) + local[depth];
}

APART long middle(int depth, long (*keep)(int))
{
    volatile char local[200];
    local[depth] = (char)depth;
    return keep(depth) + local[depth];
}

APART long outer(int depth)
{
    long sum = middle(depth, keep_object) + depth;
    sum += middle(depth + 1, keep_map);
    return sum + middle(depth + 2, keep_device);
}
END

static void *worker(void *argument)
{
    for (int round = 0; round < ROUNDS; round++) {
        usleep(ROUND_US);
        kept += USE outer((int)(size_t)argument);
    }
    return NULL;
}

int main(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, (void *)2))
        return 1;
    for (int round = 0; round < ROUNDS; round++) {
        usleep(ROUND_US);
        kept += USE outer(1);
    }
    pthread_join(thread, NULL);
    _exit(0);
}
