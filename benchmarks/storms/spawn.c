/* /bin/true spawned and waited for: the mixed load of a process's life (maps, pages, files). */
#include "storm.h"

#include <spawn.h>
#include <sys/wait.h>

static void spawn_and_wait(void)
{
    char *const arguments[] = {"true", NULL};
    char *const environment[] = {NULL};
    pid_t child;
    int status;
    if (posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environment))
        fail("posix_spawn /bin/true");
    if (waitpid(child, &status, 0) != child || status)
        fail("/bin/true");
}

int main(int argc, char **argv)
{
    return run_storm(argc, argv, spawn_and_wait);
}
