/* NVTX ranges for the recorder: the library that NVTX_INJECTION64_PATH names.
 *
 * It tells nobody anything by itself. Each range calls one of the leakscope_nvtx_* functions below, which do nothing and
 * carry a uprobe while a recording runs. So there is no file, socket or thread here, and outside of a recording a
 * range costs some ten nanoseconds.
 *
 * The library must never harm its host: no locks (a fork or a signal may come at any time), no allocation, tables of fixed
 * size, handles that are numbers and are checked. What does not fit is told by its name or counted, never dropped
 * in silence.
 */
#include "texts.h"
#include <pthread.h>
#include <time.h>

enum { MAX_DEPTH = 64 }; /* nested ranges of a thread that are followed */

/* ---- What carries the uprobes. Arguments are read from the registers. ----
 *
 * `name` points to `bytes` bytes without an end mark; more than NAME_BYTES means that the name goes on. `number` is the
 * range's, unique in the process; `outer` the innermost range open on the thread before it, `innermost` the one after
 * a pop (0: none). */

#define PROBE __attribute__((noipa, used, visibility("default"))) void
/* A nop first: the kernel skips it, where it would have to single-step most instructions. */
#define CARRIES(...) __asm__ volatile("nop" : : __VA_ARGS__ : "memory")

PROBE leakscope_nvtx_push(const char *name, size_t bytes, const char *domain, uint32_t number, uint32_t outer)
{
	CARRIES("r"(name), "r"(bytes), "r"(domain), "r"(number), "r"(outer));
}

PROBE leakscope_nvtx_pop(uint32_t number, uint32_t innermost)
{
	CARRIES("r"(number), "r"(innermost));
}

PROBE leakscope_nvtx_start(const char *name, size_t bytes, const char *domain, uint32_t number)
{
	CARRIES("r"(name), "r"(bytes), "r"(domain), "r"(number));
}

PROBE leakscope_nvtx_end(uint32_t number)
{
	CARRIES("r"(number));
}

PROBE leakscope_nvtx_mark(const char *name, size_t bytes, const char *domain, uint32_t number, uint32_t outer)
{
	CARRIES("r"(name), "r"(bytes), "r"(domain), "r"(number), "r"(outer));
}

/* A push below MAX_DEPTH others: the thread stays in the range that it was in. */
PROBE leakscope_nvtx_too_deep(void)
{
	CARRIES("i"(0));
}

/* ---- Ranges ---- */

struct open_range {
	nvtxDomainHandle_t domain;
	uint32_t number;
};

static __thread struct {
	uint32_t depth;
	uint32_t beyond; /* ranges open below MAX_DEPTH others */
	struct open_range ranges[MAX_DEPTH];
} open_ranges;

/* Starts at the time in microseconds: another program that takes this process over by exec does not number its ranges
 * as this one did, unless that pushed more than one a microsecond. */
static atomic_uint last_number;

static uint32_t next_number(void)
{
	uint32_t number;

	do
		number = atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1;
	while (!number);
	return number;
}

static uint32_t innermost(void)
{
	return open_ranges.depth ? open_ranges.ranges[open_ranges.depth - 1].number : 0;
}

/* Returns the level of the new range among those of its domain, from 0 on. */
static int push(nvtxDomainHandle_t domain, struct text name)
{
	uint32_t number;
	uint32_t i;
	int level = 0;

	if (open_ranges.depth == MAX_DEPTH) {
		open_ranges.beyond += 1;
		leakscope_nvtx_too_deep();
		return NVTX_NO_PUSH_POP_TRACKING;
	}
	for (i = 0; i < open_ranges.depth; i++)
		level += open_ranges.ranges[i].domain == domain;
	number = next_number();
	leakscope_nvtx_push(name.bytes, name.count, domain_name(domain), number, innermost());
	open_ranges.ranges[open_ranges.depth].domain = domain;
	open_ranges.ranges[open_ranges.depth].number = number;
	open_ranges.depth += 1;
	return level;
}

/* Ends the innermost range of a domain; those of other domains inside it stay open. Returns its level, -1 if none is open. */
static int pop(nvtxDomainHandle_t domain)
{
	uint32_t number;
	uint32_t at;
	uint32_t i;
	int level = 0;

	if (open_ranges.beyond) {
		open_ranges.beyond -= 1;
		return NVTX_NO_PUSH_POP_TRACKING;
	}
	for (at = open_ranges.depth; at && open_ranges.ranges[at - 1].domain != domain; at--)
		;
	if (!at)
		return -1;
	at -= 1;
	number = open_ranges.ranges[at].number;
	for (i = 0; i < at; i++)
		level += open_ranges.ranges[i].domain == domain;
	open_ranges.depth -= 1;
	memmove(open_ranges.ranges + at, open_ranges.ranges + at + 1, (open_ranges.depth - at) * sizeof(struct open_range));
	leakscope_nvtx_pop(number, innermost());
	return level;
}

static nvtxRangeId_t start(nvtxDomainHandle_t domain, struct text name)
{
	uint32_t number = next_number();

	leakscope_nvtx_start(name.bytes, name.count, domain_name(domain), number);
	return number;
}

static void mark(nvtxDomainHandle_t domain, struct text name)
{
	leakscope_nvtx_mark(name.bytes, name.count, domain_name(domain), next_number(), innermost());
}

/* A child begins outside of its parent's ranges: they are the parent's thread's. */
static void begin_child(void)
{
	open_ranges.depth = 0;
	open_ranges.beyond = 0;
}

/* ---- The functions that NVTX calls ---- */

static int range_push_ascii(const char *message)
{
	return push(0, text_of_ascii(message));
}

static int range_push_wide(const wchar_t *message)
{
	char buffer[NAME_BYTES + 4];

	return push(0, text_of_wide(message, buffer));
}

static int range_push(const nvtxEventAttributes_t *attributes)
{
	char buffer[NAME_BYTES + 4];

	return push(0, text_of_attributes(attributes, buffer));
}

static int range_pop(void)
{
	return pop(0);
}

static nvtxRangeId_t range_start_ascii(const char *message)
{
	return start(0, text_of_ascii(message));
}

static nvtxRangeId_t range_start_wide(const wchar_t *message)
{
	char buffer[NAME_BYTES + 4];

	return start(0, text_of_wide(message, buffer));
}

static nvtxRangeId_t range_start(const nvtxEventAttributes_t *attributes)
{
	char buffer[NAME_BYTES + 4];

	return start(0, text_of_attributes(attributes, buffer));
}

static void range_end(nvtxRangeId_t id)
{
	leakscope_nvtx_end((uint32_t)id);
}

static void mark_ascii(const char *message)
{
	mark(0, text_of_ascii(message));
}

static void mark_wide(const wchar_t *message)
{
	char buffer[NAME_BYTES + 4];

	mark(0, text_of_wide(message, buffer));
}

static void mark_attributes(const nvtxEventAttributes_t *attributes)
{
	char buffer[NAME_BYTES + 4];

	mark(0, text_of_attributes(attributes, buffer));
}

static int domain_range_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes)
{
	char buffer[NAME_BYTES + 4];

	return push(domain, text_of_attributes(attributes, buffer));
}

static int domain_range_pop(nvtxDomainHandle_t domain)
{
	return pop(domain);
}

static nvtxRangeId_t domain_range_start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes)
{
	char buffer[NAME_BYTES + 4];

	return start(domain, text_of_attributes(attributes, buffer));
}

static void domain_range_end(nvtxDomainHandle_t domain, nvtxRangeId_t id)
{
	(void)domain;
	range_end(id);
}

static void domain_mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes)
{
	char buffer[NAME_BYTES + 4];

	mark(domain, text_of_attributes(attributes, buffer));
}

static nvtxStringHandle_t registered(struct text text)
{
	return (nvtxStringHandle_t)interned(strings, STRINGS, sizeof(struct slot), text.bytes, text.count);
}

static nvtxStringHandle_t register_ascii(nvtxDomainHandle_t domain, const char *string)
{
	(void)domain; /* a string is the same text in every domain */
	return string ? registered(text_of_ascii(string)) : 0;
}

static nvtxStringHandle_t register_wide(nvtxDomainHandle_t domain, const wchar_t *string)
{
	char buffer[NAME_BYTES + 4];
	struct text text = text_of_wide(string, buffer);

	(void)domain;
	if (text.count > NAME_BYTES + 1)
		text.count = NAME_BYTES + 1;
	return string ? registered(text) : 0;
}

/* The name is kept with its end mark; a longer one is cut. */
static nvtxDomainHandle_t created(struct text name)
{
	char bytes[DOMAIN_BYTES] = "";
	size_t count = name.count < DOMAIN_BYTES ? name.count : DOMAIN_BYTES - 1;

	memcpy(bytes, name.bytes, count);
	return (nvtxDomainHandle_t)interned(domains, DOMAINS, sizeof(struct domain_slot), bytes, count + 1);
}

static nvtxDomainHandle_t create_domain_ascii(const char *name)
{
	return name ? created(text_of_ascii(name)) : 0;
}

static nvtxDomainHandle_t create_domain_wide(const wchar_t *name)
{
	char buffer[NAME_BYTES + 4];

	return name ? created(text_of_wide(name, buffer)) : 0;
}

/* Domains and their strings stay: two domains of one name are one, and others may still use it. */
static void destroy_domain(nvtxDomainHandle_t domain)
{
	(void)domain;
}

struct hook {
	unsigned int place;
	NvtxFunctionPointer function;
};

#define HOOK(place, function) { place, (NvtxFunctionPointer)(void (*)(void))(function) }

static const struct hook core[] = {
	HOOK(NVTX_CBID_CORE_MarkEx, mark_attributes),
	HOOK(NVTX_CBID_CORE_MarkA, mark_ascii),
	HOOK(NVTX_CBID_CORE_MarkW, mark_wide),
	HOOK(NVTX_CBID_CORE_RangeStartEx, range_start),
	HOOK(NVTX_CBID_CORE_RangeStartA, range_start_ascii),
	HOOK(NVTX_CBID_CORE_RangeStartW, range_start_wide),
	HOOK(NVTX_CBID_CORE_RangeEnd, range_end),
	HOOK(NVTX_CBID_CORE_RangePushEx, range_push),
	HOOK(NVTX_CBID_CORE_RangePushA, range_push_ascii),
	HOOK(NVTX_CBID_CORE_RangePushW, range_push_wide),
	HOOK(NVTX_CBID_CORE_RangePop, range_pop),
};

static const struct hook core2[] = {
	HOOK(NVTX_CBID_CORE2_DomainMarkEx, domain_mark),
	HOOK(NVTX_CBID_CORE2_DomainRangeStartEx, domain_range_start),
	HOOK(NVTX_CBID_CORE2_DomainRangeEnd, domain_range_end),
	HOOK(NVTX_CBID_CORE2_DomainRangePushEx, domain_range_push),
	HOOK(NVTX_CBID_CORE2_DomainRangePop, domain_range_pop),
	HOOK(NVTX_CBID_CORE2_DomainRegisterStringA, register_ascii),
	HOOK(NVTX_CBID_CORE2_DomainRegisterStringW, register_wide),
	HOOK(NVTX_CBID_CORE2_DomainCreateA, create_domain_ascii),
	HOOK(NVTX_CBID_CORE2_DomainCreateW, create_domain_wide),
	HOOK(NVTX_CBID_CORE2_DomainDestroy, destroy_domain),
};

/* `places` as NVTX gives it is the highest place of its table. */
static int hook_module(const NvtxExportTableCallbacks *callbacks, int module, const struct hook *hooks, size_t count)
{
	NvtxFunctionTable table = 0;
	unsigned int places = 0;
	size_t i;

	if (!callbacks->GetModuleFunctionTable(module, &table, &places) || !table)
		return 0;
	for (i = 0; i < count; i++)
		if (hooks[i].place < places && table[hooks[i].place])
			*table[hooks[i].place] = hooks[i].function;
	return 1;
}

__attribute__((constructor)) static void prepare(void)
{
	struct timespec now = { 0, 0 };

	clock_gettime(CLOCK_MONOTONIC, &now);
	atomic_store(&last_number, (uint32_t)((uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u));
	pthread_atfork(0, 0, begin_child);
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table)
{
	const NvtxExportTableCallbacks *callbacks = get_export_table ? get_export_table(NVTX_ETID_CALLBACKS) : 0;
	int hooked;

	if (!callbacks || callbacks->struct_size < sizeof(*callbacks) || !callbacks->GetModuleFunctionTable)
		return 0;
	hooked = hook_module(callbacks, NVTX_CB_MODULE_CORE, core, sizeof(core) / sizeof(core[0]));
	hooked |= hook_module(callbacks, NVTX_CB_MODULE_CORE2, core2, sizeof(core2) / sizeof(core2[0]));
	return hooked;
}
