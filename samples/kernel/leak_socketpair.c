/* Leaks UNIX socket pairs, each with 3,000 unread bytes queued: kmalloc-cg-4k (the data), sockets, inodes,
 * files. */
#include "../common.h"
#include <sys/socket.h>

enum { UNREAD_BYTES = 3000 };
static struct sample sample = {.name = "leak_socketpair", .count = 1000, .pause_us = 500, .churn = 2};
static const char payload[UNREAD_BYTES];

NO_FRAME void open_pair(int pair[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        die(&sample, "socketpair");
    if (write(pair[0], payload, sizeof payload) != sizeof payload)
        die(&sample, "write");
}

SITE void open_session_and_forget(void)
{
    int pair[2];
    open_pair(pair);
}

SITE void open_session_and_close(void)
{
    int pair[2];
    open_pair(pair);
    close(pair[0]);
    close(pair[1]);
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    raise_descriptor_limit();
    for (long i = 0; i < sample.count; i++) {
        open_session_and_forget();
        for (long c = 0; c < sample.churn; c++)
            open_session_and_close();
        pause_us(sample.pause_us);
    }
    struct site site = {"open_session_and_forget",  "kernel", "slab", "socketpair", sample.count,
                        sample.count * UNREAD_BYTES};
    finish_sample(&sample, &site, 1, sample.count * sample.churn, "");
}
