/* A pair of sockets made and closed: inodes, dentries, files and sockets, two of each. */
#include "storm.h"

#include <sys/socket.h>
#include <unistd.h>

static void pair_and_close(void)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds))
        fail("socketpair");
    close(fds[0]);
    close(fds[1]);
}

int main(int argc, char **argv)
{
    return run_storm(argc, argv, pair_and_close);
}
