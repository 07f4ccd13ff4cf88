/* open and close of an existing file: three allocations and three frees in the kernel an operation. */
#include "storm.h"

#include <fcntl.h>
#include <unistd.h>

static void open_and_close(void)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fail("open /dev/null");
    close(fd);
}

int main(int argc, char **argv)
{
    return run_storm(argc, argv, open_and_close);
}
