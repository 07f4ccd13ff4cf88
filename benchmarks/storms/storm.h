/*
 * A storm repeats one operation a fixed number of times and prints what one took on average, in ns: wall time and
 * processor time (its children's too). Usage: STORM COUNT. The first COUNT / 10 warm caches up, unmeasured.
 */
#ifndef STORMS_STORM_H
#define STORMS_STORM_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
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

static inline double processor_ns(void)
{
    const int whose[] = {RUSAGE_SELF, RUSAGE_CHILDREN};
    double ns = 0;
    for (int i = 0; i < 2; i++) {
        struct rusage used;
        getrusage(whose[i], &used);
        ns += (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e9;
        ns += (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e3;
    }
    return ns;
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
    double wall = now_ns(), processor = processor_ns();
    for (long i = 0; i < count; i++)
        operation();
    printf("%.1f %.1f\n", (now_ns() - wall) / count, (processor_ns() - processor) / count);
    return EXIT_SUCCESS;
}

#endif
