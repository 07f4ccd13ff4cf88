/* Leaks eventfd descriptors: filp, dentry, kmalloc-64 (the counter), lsm_file_cache. */
#include "../common.h"
#include <sys/eventfd.h>

static struct sample sample = {.name = "leak_eventfd", .count = 3000, .pause_us = 200, .churn = 2};

SITE int subscribe_and_forget(void)
{
    int fd = eventfd(0, EFD_NONBLOCK);
    if (fd < 0)
        die(&sample, "eventfd");
    return fd;
}

SITE void subscribe_and_close(void)
{
    int fd = eventfd(0, EFD_NONBLOCK);
    if (fd < 0)
        die(&sample, "eventfd");
    close(fd);
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    raise_descriptor_limit();
    for (long i = 0; i < sample.count; i++) {
        subscribe_and_forget();
        for (long c = 0; c < sample.churn; c++)
            subscribe_and_close();
        pause_us(sample.pause_us);
    }
    struct site site = {"subscribe_and_forget", "kernel", "slab", "eventfd", sample.count, 0};
    finish_sample(&sample, &site, 1, sample.count * sample.churn, "");
}
