/*
 * Leaks maps made past malloc: whole ones, ones grown by mremap, and ones of which a part was unmapped again
 * (the tail, and a hole in the middle), so that only exact accounting of address ranges gets the bytes right.
 */
#include "../common.h"
#include <sys/mman.h>
#include <sys/syscall.h>

enum { KIB = 1024, WHOLE = 64 * KIB, BEFORE = 16 * KIB, GROWN = 48 * KIB };
enum { TRIMMED = 128 * KIB, TAIL = 16 * KIB, HOLE_AT = 32 * KIB, HOLE = 32 * KIB };
static struct sample sample = {.name = "leak_mmap", .count = 200, .pause_us = 1000, .churn = 2};

NO_FRAME char *map(size_t bytes)
{
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die(&sample, "mmap");
    return memory;
}

SITE void map_whole_and_forget(void)
{
    touch(map(WHOLE), WHOLE);
}

/* By syscall(): glibc's mremap moves the stack pointer, so a walk of frame pointers would miss its caller. */
SITE void map_grow_and_forget(void)
{
    char *memory = map(BEFORE);
    touch(memory, BEFORE);
    memory = (char *)syscall(SYS_mremap, memory, BEFORE, GROWN, MREMAP_MAYMOVE, NULL);
    if (memory == MAP_FAILED)
        die(&sample, "mremap");
    touch(memory, GROWN);
}

SITE void map_trim_and_forget(void)
{
    char *memory = map(TRIMMED);
    touch(memory, TRIMMED);
    if (munmap(memory + TRIMMED - TAIL, TAIL) || munmap(memory + HOLE_AT, HOLE))
        die(&sample, "munmap");
}

SITE void map_and_unmap(void)
{
    char *memory = map(WHOLE);
    touch(memory, WHOLE);
    munmap(memory, WHOLE);
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    for (long i = 0; i < sample.count; i++) {
        map_whole_and_forget();
        map_grow_and_forget();
        map_trim_and_forget();
        for (long c = 0; c < sample.churn; c++)
            map_and_unmap();
        pause_us(sample.pause_us);
    }
    struct site sites[] = {
        {"map_whole_and_forget", "host", "mmap_anon", "mmap", sample.count, sample.count * WHOLE},
        {"map_grow_and_forget", "host", "mmap_anon", "mremap", sample.count, sample.count * GROWN},
        {"map_trim_and_forget", "host", "mmap_anon", "mmap", sample.count,
         sample.count * (TRIMMED - TAIL - HOLE)},
    };
    finish_sample(&sample, sites, 3, sample.count * sample.churn, "");
}
