/*
 * Leaks C++ objects: through operator new (one small block a record), and maps of their own through a chain of inlined
 * functions. Overloads and template instances of the same name, of which some leak and others do not.
 *
 * Built with -O2 -g, and once more without anything that names its functions (leak_cpp.stripped, with its debug
 * information in debug/leak_cpp.debug). The lines that mark where memory is taken are looked for by tests.
 */
#include <sys/mman.h>

#include <new>
#include <string>
#include <vector>

extern "C" {
#include "../common.h"
}

static struct sample sample = {.name = "leak_cpp", .count = 60, .pause_us = 200, .churn = 2};
static const size_t SLAB_BYTES = 3 << 16, RECORD_BYTES = 1000;

namespace app {
namespace {

struct Slab {
    char bytes[SLAB_BYTES];
};

/* Three functions that are one: each is inlined into the next. */
__attribute__((always_inline)) inline void *map_pages(size_t bytes)
{
    void *pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); // line: mmap
    if (pages == MAP_FAILED)
        die(&sample, "mmap");
    return pages;
}

template <typename T> __attribute__((always_inline)) inline T *map_object()
{
    T *object = static_cast<T *>(map_pages(sizeof(T))); // line: map_pages
    touch(reinterpret_cast<char *>(object), sizeof(T));
    return object;
}

} // namespace

template <typename T> struct Pool {
    SITE T *take(size_t index);
    SITE T *take(const std::string &name);
};

template <typename T> T *Pool<T>::take(size_t index)
{
    T *object = map_object<T>(); // line: map_object
    reinterpret_cast<volatile char *>(object)[0] = static_cast<char>(index);
    return object;
}

template <typename T> T *Pool<T>::take(const std::string &name)
{
    return take(name.size()) + 1; // line: take(string)
}

struct Record {
    char bytes[RECORD_BYTES];
};

SITE Record *keep_record()
{
    Record *record = new Record; // line: new Record
    touch(record->bytes, sizeof record->bytes);
    return record;
}

SITE void serve_and_forget(Pool<Slab> &pool, size_t index)
{
    Slab *slab = pool.take(index); // line: serve
    asm volatile("" : : "r"(slab) : "memory");
}

SITE void serve_and_release(Pool<Slab> &pool, const std::string &name)
{
    munmap(pool.take(name) - 1, sizeof(Slab));
}

} // namespace app

int main(int argc, char **argv)
{
    start_sample(argc, argv, &sample, nullptr);
    app::Pool<app::Slab> pool;
    for (long i = 0; i < sample.count; i++) {
        app::serve_and_forget(pool, i);
        for (long c = 0; c < sample.churn; c++)
            app::serve_and_release(pool, "request");
        app::keep_record();
        pause_us(sample.pause_us);
    }
    struct site sites[] = {
        {"app::serve_and_forget(app::Pool<app::(anonymous namespace)::Slab>&, unsigned long)", "host", "mmap_anon",
         "mmap", sample.count, sample.count * (long)SLAB_BYTES},
        {"app::keep_record()", "host", "heap", "malloc", sample.count, sample.count * (long)RECORD_BYTES},
    };
    finish_sample(&sample, sites, 2, sample.count * sample.churn, "");
}
