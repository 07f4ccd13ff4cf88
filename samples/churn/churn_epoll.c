/* Healthy: creates an epoll instance, watches a pipe, closes it. Its frees go through kfree_rcu and fire no
 * event. */
#include "../common.h"
#include <sys/epoll.h>

static struct sample sample = {.name = "churn_epoll", .count = 3000, .pause_us = 700};

SITE void watch_and_close(int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    int epoll = epoll_create1(0);
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
        die(&sample, "epoll");
    close(epoll);
}

int main(int argc, char **argv)
{
    int pipe_ends[2];
    start_sample(argc, argv, &sample, NULL);
    if (pipe(pipe_ends))
        die(&sample, "pipe");
    for (long i = 0; i < sample.count; i++) {
        watch_and_close(pipe_ends[0]);
        pause_us(sample.pause_us);
    }
    finish_sample(&sample, NULL, 0, sample.count, "");
}
