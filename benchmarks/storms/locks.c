/*
 * Churn as fast as it goes, for a number of seconds, with survivors: threads take and give back record locks (three
 * kernel objects a call, freed at once or by the next), one of them also opens an eventfd every 100 ms and keeps it.
 * Usage: locks SECONDS THREADS. Waits for a line on stdin, prints {"kept": …, "calls": …} and stays until stdin ends.
 */
#include "storm.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define SITE __attribute__((noipa))

static atomic_bool over;
static atomic_long calls;

SITE void lock_and_unlock(int fd)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    if (fcntl(fd, F_SETLK, &lock))
        fail("lock");
    lock.l_type = F_UNLCK;
    if (fcntl(fd, F_SETLK, &lock))
        fail("unlock");
}

SITE void keep_eventfd(void)
{
    if (eventfd(0, 0) < 0)
        fail("eventfd");
}

static void *churn(void *unused)
{
    char path[] = "/tmp/locks-XXXXXX";
    int fd = mkstemp(path);
    long own = 0;
    if (fd < 0 || unlink(path))
        fail(path);
    for (; !over; own += 2)
        lock_and_unlock(fd);
    calls += own;
    return unused;
}

int main(int argc, char **argv)
{
    const struct timespec tenth = {0, 100000000};
    pthread_t threads[64];
    struct rlimit limit;
    char line = 0;
    long seconds = argc == 3 ? atol(argv[1]) : 0, count = argc == 3 ? atol(argv[2]) : 0, kept = 0;
    if (seconds < 1 || count < 1 || count > 64) {
        fprintf(stderr, "usage: %s SECONDS THREADS\n", argv[0]);
        return 2;
    }
    if (!getrlimit(RLIMIT_NOFILE, &limit)) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    while (read(STDIN_FILENO, &line, 1) > 0 && line != '\n')
        ;
    for (long i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, churn, NULL))
            fail("thread");
    for (; kept < seconds * 10; kept++) {
        keep_eventfd();
        nanosleep(&tenth, NULL);
    }
    over = true;
    for (long i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    printf("{\"kept\": %ld, \"calls\": %ld}\n", kept, (long)calls);
    fflush(stdout);
    while (read(STDIN_FILENO, &line, 1) > 0)
        ;
    return 0;
}
