/*
 * A storm repeats one operation a fixed number of times and prints the mean wall time of one, in ns.
 * Usage: STORM COUNT. The first COUNT / 10 operations warm caches up and are not measured.
 */
#ifndef STORMS_STORM_H
#define STORMS_STORM_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline void fail(const char *what)
{
    perror(what);
    exit(EXIT_FAILURE);
}

static inline double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static inline int run_storm(int argc, char **argv, void (*operation)(void))
{
    char *end = "";
    long count = argc == 2 ? strtol(argv[1], &end, 10) : 0;
    if (count < 1 || *end) {
        fprintf(stderr, "usage: %s COUNT\n", argv[0]);
        return 2;
    }
    for (long i = 0; i < count / 10; i++)
        operation();
    double began = now_ns();
    for (long i = 0; i < count; i++)
        operation();
    printf("%.1f\n", (now_ns() - began) / count);
    return EXIT_SUCCESS;
}

#endif
