/*
 * What every C sample shares: options, pacing, the report and the hold at the end.
 *
 * A sample ends by printing ONE line of JSON on stdout that says exactly what it leaked:
 *   {"sample":…, "pid":…, "leaked":{LAYER:{"objects":…,"bytes":…}}, "sites":[…], "churned":…, …}
 * "bytes" are the bytes that the program asked for. The kernel's own objects have no size that a program
 * could know: there "objects" is the exact figure and "bytes" is the payload, if any.
 */
#ifndef SAMPLES_COMMON_H
#define SAMPLES_COMMON_H

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* A function that must be a frame of its own in every stack, under its own name. */
#define SITE __attribute__((noipa))
/* A helper that must not be a frame: its callers are the sites. (`artificial`: not an inlined frame either.) */
#define NO_FRAME static inline __attribute__((always_inline, artificial))

/* Exit code of a sample that lacks a privilege; the same number means the same in leakscope. */
#define EXIT_NOT_CAPABLE 4

struct sample {
    const char *name;
    long count;        /* objects to leak a site, or rounds of churn */
    long pause_us;     /* pause after each of them, microseconds */
    long churn;        /* healthy alloc-and-free rounds beside each leaked object */
    long hold_seconds; /* stay alive this long after the report */
    bool wait;         /* start when a line (or the end) of stdin arrives */
};

/* An option of one sample alone: either a number or a text. A table of them ends with a NULL name. */
struct extra_option {
    const char *name;
    long *number;
    const char **text;
    const char *help;
};

/* One place that leaks. layer and kind are leakscope's words; api is the call that allocated. */
struct site {
    const char *function, *layer, *kind, *api;
    long objects, bytes;
};

static inline void die(const struct sample *sample, const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", sample->name, what, strerror(errno));
    exit(errno == EPERM ? EXIT_NOT_CAPABLE : EXIT_FAILURE);
}

static inline void usage(const struct sample *sample, const struct extra_option *extras)
{
    printf("usage: %s [--count N] [--pause-us U] [--churn N] [--hold SECONDS] [--wait]\n"
           "  --count N        objects to leak (or rounds of churn); default %ld\n"
           "  --pause-us U     pause after each, microseconds; default %ld\n"
           "  --churn N        healthy alloc-and-free rounds beside each leaked object; default %ld\n"
           "  --hold SECONDS   stay alive after the report; default %ld\n"
           "  --wait           start when a line arrives on stdin, or its end\n",
           sample->name, sample->count, sample->pause_us, sample->churn, sample->hold_seconds);
    for (; extras && extras->name; extras++)
        printf("  --%-14s %s\n", extras->name, extras->help);
}

static inline void refuse(const struct sample *sample, const char *what, const char *argument)
{
    fprintf(stderr, "%s: %s '%s'; see --help\n", sample->name, what, argument);
    exit(2);
}

/* Parse `--name VALUE` pairs into *sample and the extras; exits with 2 on anything else. */
static inline void parse_options(int argc, char **argv, struct sample *sample,
                                 const struct extra_option *extras)
{
    const struct extra_option common[] = {
        {"count", &sample->count, NULL, NULL},
        {"pause-us", &sample->pause_us, NULL, NULL},
        {"churn", &sample->churn, NULL, NULL},
        {"hold", &sample->hold_seconds, NULL, NULL},
        {NULL, NULL, NULL, NULL},
    };
    for (int i = 1; i < argc; i++) {
        const struct extra_option *option = NULL;
        if (!strcmp(argv[i], "--help")) {
            usage(sample, extras);
            exit(EXIT_SUCCESS);
        }
        if (!strcmp(argv[i], "--wait")) {
            sample->wait = true;
            continue;
        }
        if (strncmp(argv[i], "--", 2))
            refuse(sample, "unexpected argument", argv[i]);
        for (const struct extra_option *o = common; o->name && !option; o++)
            option = strcmp(o->name, argv[i] + 2) ? NULL : o;
        for (const struct extra_option *o = extras; o && o->name && !option; o++)
            option = strcmp(o->name, argv[i] + 2) ? NULL : o;
        if (!option)
            refuse(sample, "unknown option", argv[i]);
        if (++i == argc)
            refuse(sample, "a value is missing after", argv[i - 1]);
        if (option->text) {
            *option->text = argv[i];
            continue;
        }
        char *end;
        *option->number = strtol(argv[i], &end, 10);
        if (end == argv[i] || *end || *option->number < 0)
            refuse(sample, "not a whole number >= 0:", argv[i]);
    }
}

/* Parse the options and, with --wait, block until stdin says go. The stdout buffer is static so that printing
 * the report allocates nothing beside what the sample reports. */
static inline void start_sample(int argc, char **argv, struct sample *sample,
                                const struct extra_option *extras)
{
    static char buffer[1 << 16];
    char go;
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    parse_options(argc, argv, sample, extras);
    while (sample->wait && read(STDIN_FILENO, &go, 1) > 0 && go != '\n')
        ;
}

NO_FRAME void pause_us(long microseconds)
{
    struct timespec pause = {microseconds / 1000000, microseconds % 1000000 * 1000};
    if (microseconds)
        nanosleep(&pause, NULL);
}

/* Raise the soft limit of open descriptors to the hard one. */
static inline void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (!getrlimit(RLIMIT_NOFILE, &limit)) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* Write to every page so that the memory becomes resident. */
NO_FRAME void touch(char *memory, size_t bytes)
{
    for (size_t offset = 0; offset < bytes; offset += 4096)
        ((volatile char *)memory)[offset] = 1;
}

/* Print the report and hold. `more` is further JSON members, each led by a comma, or "". Sites of kind "ipc"
 * are mappings of memory that another allocation owns: listed, not added to their layer. */
static inline void finish_sample(const struct sample *sample, const struct site *sites, size_t n,
                                 long churned, const char *more)
{
    static const char *const layers[] = {"kernel", "host", "gpu"};
    const char *comma = "";
    printf("{\"sample\":\"%s\",\"pid\":%d,\"leaked\":{", sample->name, (int)getpid());
    for (size_t l = 0; l < 3; l++) {
        long objects = 0, bytes = 0;
        for (size_t i = 0; i < n; i++)
            if (!strcmp(sites[i].layer, layers[l]) && strcmp(sites[i].kind, "ipc")) {
                objects += sites[i].objects;
                bytes += sites[i].bytes;
            }
        if (!objects)
            continue;
        printf("%s\"%s\":{\"objects\":%ld,\"bytes\":%ld}", comma, layers[l], objects, bytes);
        comma = ",";
    }
    printf("},\"sites\":[");
    comma = "";
    for (size_t i = 0; i < n; i++) {
        if (!sites[i].objects)
            continue;
        printf("%s{\"function\":\"%s\",\"layer\":\"%s\",\"kind\":\"%s\",\"api\":\"%s\",\"objects\":%ld,"
               "\"bytes\":%ld}",
               comma, sites[i].function, sites[i].layer, sites[i].kind, sites[i].api, sites[i].objects,
               sites[i].bytes);
        comma = ",";
    }
    printf("],\"churned\":%ld%s}\n", churned, more);
    fflush(stdout);
    pause_us(sample->hold_seconds * 1000000);
}

#endif
