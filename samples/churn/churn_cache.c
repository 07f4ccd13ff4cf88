/*
 * Healthy: two bounded caches, one of mapped pages (host) and one of sockets with queued data (kernel). They
 * fill in the first fifth of the run; from then on every insertion evicts the oldest entry.
 */
#include "../common.h"
#include <sys/mman.h>
#include <sys/socket.h>

enum { PAGE_BYTES = 64 * 1024, QUEUED_BYTES = 3000, MAX_ENTRIES = 4096 };
static struct sample sample = {.name = "churn_cache", .count = 3000, .pause_us = 1000};
static struct entry {
    char *page;
    int pair[2];
} cache[MAX_ENTRIES];
static const char payload[QUEUED_BYTES];

SITE void cache_insert(struct entry *entry)
{
    entry->page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (entry->page == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, entry->pair))
        die(&sample, "cache entry");
    if (write(entry->pair[0], payload, sizeof payload) != sizeof payload)
        die(&sample, "write");
    touch(entry->page, PAGE_BYTES);
}

SITE void cache_evict(struct entry *entry)
{
    munmap(entry->page, PAGE_BYTES);
    close(entry->pair[0]);
    close(entry->pair[1]);
}

int main(int argc, char **argv)
{
    char more[128];
    start_sample(argc, argv, &sample, NULL);
    raise_descriptor_limit();
    long capacity = sample.count / 5 < MAX_ENTRIES ? sample.count / 5 : MAX_ENTRIES;
    capacity += !capacity;
    for (long i = 0; i < sample.count; i++) {
        struct entry *entry = &cache[i % capacity];
        if (i >= capacity)
            cache_evict(entry);
        cache_insert(entry);
        pause_us(sample.pause_us);
    }
    snprintf(more, sizeof more,
             ",\"cached\":{\"function\":\"cache_insert\",\"objects\":%ld,\"host_bytes\":%ld}", capacity,
             capacity * PAGE_BYTES);
    finish_sample(&sample, NULL, 0, sample.count, more);
}
