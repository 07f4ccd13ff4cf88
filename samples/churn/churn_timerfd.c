/* Healthy: creates, arms and closes timerfds. Their frees go through kfree_rcu and fire no event. */
#include "../common.h"
#include <sys/timerfd.h>

static struct sample sample = {.name = "churn_timerfd", .count = 3000, .pause_us = 700};

SITE void arm_and_close(void)
{
    struct itimerspec in_an_hour = {.it_value.tv_sec = 3600};
    int timer = timerfd_create(CLOCK_MONOTONIC, 0);
    if (timer < 0 || timerfd_settime(timer, 0, &in_an_hour, NULL))
        die(&sample, "timerfd");
    close(timer);
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    for (long i = 0; i < sample.count; i++) {
        arm_and_close();
        pause_us(sample.pause_us);
    }
    finish_sample(&sample, NULL, 0, sample.count, "");
}
