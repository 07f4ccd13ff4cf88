/* Healthy: creates and deletes POSIX timers. Their frees go through kfree_rcu and fire no event. */
#include "../common.h"
#include <signal.h>

static struct sample sample = {.name = "churn_posix_timer", .count = 3000, .pause_us = 700};

SITE void create_and_delete_timer(void)
{
    struct sigevent silent = {.sigev_notify = SIGEV_NONE};
    timer_t timer;
    if (timer_create(CLOCK_MONOTONIC, &silent, &timer) || timer_delete(timer))
        die(&sample, "timer");
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    for (long i = 0; i < sample.count; i++) {
        create_and_delete_timer();
        pause_us(sample.pause_us);
    }
    finish_sample(&sample, NULL, 0, sample.count, "");
}
