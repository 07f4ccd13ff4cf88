/*
 * Moves the program break up by 64 KiB at a time and never down again, beside moves that are undone at once.
 * It calls brk, not sbrk: glibc's sbrk keeps the break in %rbp, which breaks the chain of frame pointers.
 */
#include "../common.h"

enum { STEP_BYTES = 64 * 1024 };
static struct sample sample = {.name = "leak_brk", .count = 300, .pause_us = 1000, .churn = 2};

static char *program_break;

NO_FRAME void move_break(long bytes)
{
    if (brk(program_break + bytes))
        die(&sample, "brk");
    program_break += bytes;
}

SITE void extend_arena(void)
{
    move_break(STEP_BYTES);
    touch(program_break - STEP_BYTES, STEP_BYTES);
}

SITE void extend_and_shrink_arena(void)
{
    move_break(STEP_BYTES);
    touch(program_break - STEP_BYTES, STEP_BYTES);
    move_break(-STEP_BYTES);
}

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, NULL);
    program_break = sbrk(0);
    for (long i = 0; i < sample.count; i++) {
        extend_arena();
        for (long c = 0; c < sample.churn; c++)
            extend_and_shrink_arena();
        pause_us(sample.pause_us);
    }
    struct site site = {"extend_arena", "host", "brk", "brk", sample.count, sample.count * STEP_BYTES};
    finish_sample(&sample, &site, 1, sample.count * sample.churn, "");
}
