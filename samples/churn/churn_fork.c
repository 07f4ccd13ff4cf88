/* Healthy: forks, executes /bin/true and waits, over and over. Maple nodes of the maps are freed without an
 * event. */
#include "../common.h"
#include <sys/wait.h>

static struct sample sample = {.name = "churn_fork", .count = 500, .pause_us = 3000};

SITE void spawn_and_wait(void)
{
    pid_t child = fork();
    if (child < 0)
        die(&sample, "fork");
    if (!child) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(127);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status)
        die(&sample, "/bin/true");
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    for (long i = 0; i < sample.count; i++) {
        spawn_and_wait();
        pause_us(sample.pause_us);
    }
    finish_sample(&sample, NULL, 0, sample.count, "");
}
