/*
 * Leaks exactly 1 KiB of kernel memory an iteration: a System V message of 976 bytes, which with its header of 48
 * (struct msg_msg) is one object of the cache for 1,024 bytes. With --keep 0 each message is received again, so that
 * nothing is left behind: the healthy twin of the same code. All queues are there from the start. They live in an IPC
 * namespace of this process alone, so none outlives it.
 */
#include "../common.h"
#include <sched.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>

enum { MESSAGE_BYTES = 976, MESSAGES_A_QUEUE = 16, MAX_QUEUES = 4096, MAP_BYTES = 1 << 16 };

static struct sample sample = {.name = "leak_message", .count = 300, .pause_us = 2000, .churn = 1};
static struct message {
    long type;
    char text[MESSAGE_BYTES];
} message = {.type = 1};
static int queues[MAX_QUEUES]; /* the first is for messages that are received again */

SITE void post_and_forget(int queue)
{
    if (msgsnd(queue, &message, MESSAGE_BYTES, IPC_NOWAIT))
        die(&sample, "msgsnd");
}

SITE void post_and_receive(int queue)
{
    if (msgsnd(queue, &message, MESSAGE_BYTES, IPC_NOWAIT))
        die(&sample, "msgsnd");
    if (msgrcv(queue, &message, MESSAGE_BYTES, 1, IPC_NOWAIT) < 0)
        die(&sample, "msgrcv");
}

SITE void map_and_unmap(void)
{
    char *memory = mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die(&sample, "mmap");
    touch(memory, MAP_BYTES);
    munmap(memory, MAP_BYTES);
}

/* A queue holds 16 KiB of text (kernel.msgmnb) unless one is privileged to change that. */
static void open_queues(long count)
{
    if (unshare(CLONE_NEWIPC))
        die(&sample, "unshare");
    for (long i = 0; i < count; i++)
        if ((queues[i] = msgget(IPC_PRIVATE, 0600)) < 0)
            die(&sample, "msgget");
}

int main(int argc, char **argv)
{
    long keep = 1;
    const struct extra_option extras[] = {
        {"keep", &keep, NULL, "0: receive each message again, and leak nothing"},
        {NULL, NULL, NULL, NULL},
    };
    start_sample(argc, argv, &sample, extras);
    if (sample.count > MESSAGES_A_QUEUE * (MAX_QUEUES - 1))
        refuse(&sample, "too many messages for --count of", "leak_message");
    open_queues(2 + sample.count / MESSAGES_A_QUEUE);
    for (long i = 0; i < sample.count; i++) {
        if (keep)
            post_and_forget(queues[1 + i / MESSAGES_A_QUEUE]);
        for (long c = 0; c < sample.churn; c++) {
            post_and_receive(queues[0]);
            map_and_unmap();
        }
        pause_us(sample.pause_us);
    }
    long kept = keep ? sample.count : 0;
    struct site site = {"post_and_forget", "kernel", "kmalloc", "msgsnd", kept, kept * MESSAGE_BYTES};
    finish_sample(&sample, &site, 1, sample.count * sample.churn, "");
}
