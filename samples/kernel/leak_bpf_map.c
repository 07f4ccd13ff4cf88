/* Leaks BPF array maps of one 4,096-byte value: kmalloc-cg-8k (header + value), filp, dentry. Needs CAP_BPF.
 */
#include "../common.h"
#include <linux/bpf.h>
#include <sys/syscall.h>

enum { VALUE_BYTES = 4096 };
static struct sample sample = {.name = "leak_bpf_map", .count = 1000, .pause_us = 500, .churn = 2};

NO_FRAME int create_map(void)
{
    union bpf_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.map_type = BPF_MAP_TYPE_ARRAY;
    attr.key_size = 4;
    attr.value_size = VALUE_BYTES;
    attr.max_entries = 1;
    int fd = (int)syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof attr);
    if (fd < 0)
        die(&sample, "bpf(BPF_MAP_CREATE), which needs root or CAP_BPF");
    return fd;
}

SITE int load_policy_map_and_forget(void)
{
    return create_map();
}

SITE void load_policy_map_and_close(void)
{
    close(create_map());
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    raise_descriptor_limit();
    for (long i = 0; i < sample.count; i++) {
        load_policy_map_and_forget();
        for (long c = 0; c < sample.churn; c++)
            load_policy_map_and_close();
        pause_us(sample.pause_us);
    }
    struct site site = {"load_policy_map_and_forget", "kernel", "kmalloc", "bpf", sample.count,
                        sample.count * VALUE_BYTES};
    finish_sample(&sample, &site, 1, sample.count * sample.churn, "");
}
