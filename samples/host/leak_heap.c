/*
 * Leaks malloc blocks: small ones, which grow the heap through brk, and large ones, which malloc maps one by
 * one (glibc's threshold is 128 KiB until a mapped block is freed; this sample frees none).
 */
#include "../common.h"

enum { RECORD_BYTES = 1000, DOCUMENT_BYTES = 300000, RECORDS_A_DOCUMENT = 16 };
static struct sample sample = {.name = "leak_heap", .count = 4000, .pause_us = 200, .churn = 2};

/* The wrapper that both the leak and the healthy path call: the culprit is the frame above it. */
SITE void *allocate_checked(size_t bytes)
{
    char *memory = malloc(bytes);
    if (!memory)
        die(&sample, "malloc");
    touch(memory, bytes);
    return memory;
}

SITE void parse_record_and_forget(void)
{
    allocate_checked(RECORD_BYTES);
}

SITE void load_document_and_forget(void)
{
    allocate_checked(DOCUMENT_BYTES);
}

SITE void parse_record_and_free(void)
{
    free(allocate_checked(RECORD_BYTES));
}

int main(int argc, char **argv)
{
    long documents = 0;
    start_sample(argc, argv, &sample, NULL);
    for (long i = 0; i < sample.count; i++) {
        parse_record_and_forget();
        if (i % RECORDS_A_DOCUMENT == 0) {
            load_document_and_forget();
            documents++;
        }
        for (long c = 0; c < sample.churn; c++)
            parse_record_and_free();
        pause_us(sample.pause_us);
    }
    struct site sites[] = {
        {"parse_record_and_forget", "host", "heap", "malloc", sample.count, sample.count * RECORD_BYTES},
        {"load_document_and_forget", "host", "heap", "malloc", documents, documents * DOCUMENT_BYTES},
    };
    finish_sample(&sample, sites, 2, sample.count * sample.churn, "");
}
