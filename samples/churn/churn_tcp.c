/* Healthy: connects to itself over loopback and closes by reset, so that no socket lingers in TIME_WAIT. */
#include "../common.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static struct sample sample = {.name = "churn_tcp", .count = 2000, .pause_us = 1000};

SITE void connect_and_reset(int listener, const struct sockaddr_in *address)
{
    struct linger reset = {.l_onoff = 1, .l_linger = 0};
    int client = socket(AF_INET, SOCK_STREAM, 0);
    if (client < 0 || connect(client, (const struct sockaddr *)address, sizeof *address))
        die(&sample, "connect");
    int server = accept(listener, NULL, NULL);
    if (server < 0 || setsockopt(client, SOL_SOCKET, SO_LINGER, &reset, sizeof reset))
        die(&sample, "accept");
    close(client);
    close(server);
}

int main(int argc, char **argv)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    start_sample(argc, argv, &sample, NULL);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 16) ||
        getsockname(listener, (struct sockaddr *)&address, &length))
        die(&sample, "listen on loopback");
    for (long i = 0; i < sample.count; i++) {
        connect_and_reset(listener, &address);
        pause_us(sample.pause_us);
    }
    finish_sample(&sample, NULL, 0, sample.count, "");
}
