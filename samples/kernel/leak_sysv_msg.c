/*
 * Leaks System V message queues, each with 4 unread messages of 2,000 bytes: msg_msg-2k (the messages) and
 * kmalloc-cg-256 (the queues). They outlive the process: run with --clean 1 to remove what earlier runs left.
 */
#include "../common.h"
#include <sys/ipc.h>
#include <sys/msg.h>

enum { MESSAGES = 4, MESSAGE_BYTES = 2000, KEYS = 20000 };
#define FIRST_KEY 0x6c730000 /* queues of ours carry the keys FIRST_KEY … FIRST_KEY + KEYS - 1 */

static struct sample sample = {.name = "leak_sysv_msg", .count = 500, .pause_us = 1000, .churn = 1};
static struct message {
    long type;
    char text[MESSAGE_BYTES];
} message = {.type = 1};

NO_FRAME void fill_queue(int queue)
{
    for (int m = 0; m < MESSAGES; m++)
        if (msgsnd(queue, &message, MESSAGE_BYTES, IPC_NOWAIT))
            die(&sample, "msgsnd");
}

/* Returns false when a queue with this key exists already. */
SITE bool post_and_abandon(key_t key)
{
    int queue = msgget(key, IPC_CREAT | IPC_EXCL | 0600);
    if (queue < 0 && errno == EEXIST)
        return false;
    if (queue < 0)
        die(&sample, "msgget");
    fill_queue(queue);
    return true;
}

SITE void post_and_remove(void)
{
    int queue = msgget(IPC_PRIVATE, 0600);
    if (queue < 0)
        die(&sample, "msgget");
    fill_queue(queue);
    msgctl(queue, IPC_RMID, NULL);
}

static long remove_abandoned_queues(void)
{
    long removed = 0;
    for (key_t key = 0; key < KEYS; key++) {
        int queue = msgget(FIRST_KEY + key, 0);
        removed += queue >= 0 && !msgctl(queue, IPC_RMID, NULL);
    }
    return removed;
}

int main(int argc, char **argv)
{
    long clean = 0, queues = 0;
    char more[64];
    const struct extra_option extras[] = {
        {"clean", &clean, NULL, "1: remove the queues that earlier runs left, and do nothing else"},
        {NULL, NULL, NULL, NULL},
    };
    start_sample(argc, argv, &sample, extras);
    if (clean) {
        snprintf(more, sizeof more, ",\"removed\":%ld", remove_abandoned_queues());
        finish_sample(&sample, NULL, 0, 0, more);
        return 0;
    }
    for (key_t key = 0; key < KEYS && queues < sample.count; key++) {
        if (!post_and_abandon(FIRST_KEY + key))
            continue;
        queues++;
        for (long c = 0; c < sample.churn; c++)
            post_and_remove();
        pause_us(sample.pause_us);
    }
    struct site site = {"post_and_abandon", "kernel",          "kmalloc",
                        "msgsnd",           queues * MESSAGES, queues * MESSAGES * MESSAGE_BYTES};
    snprintf(more, sizeof more, ",\"queues\":%ld,\"outlives_process\":true", queues);
    finish_sample(&sample, &site, 1, queues * sample.churn, more);
}
