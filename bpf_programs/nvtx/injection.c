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
#include "abi.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

enum {
	NAME_BYTES = 96,      /* of a name; bpf_programs/records.h: mark_record */
	DOMAIN_BYTES = 48,
	STRINGS = 16384,      /* registered strings that are kept, powers of two */
	DOMAINS = 1024,
	MAX_PROBES = 64,      /* places looked at for a text before the table counts as full */
	MAX_DEPTH = 64,       /* nested ranges of a thread that are followed */
};

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

/* ---- Texts ---- */

struct text {
	const char *bytes;
	size_t count; /* at most NAME_BYTES + 1 */
};

static struct text text_of_ascii(const char *ascii)
{
	struct text text = { ascii ? ascii : "", 0 };

	text.count = strnlen(text.bytes, NAME_BYTES + 1); /* also brings the pages in, which a probe cannot */
	return text;
}

/* UTF-8 of wide characters, which are UTF-32 on Linux, into `buffer`. */
static struct text text_of_wide(const wchar_t *wide, char buffer[NAME_BYTES + 4])
{
	struct text text = { buffer, 0 };
	size_t i;

	for (i = 0; wide && wide[i] && text.count <= NAME_BYTES; i++) {
		uint32_t c = (uint32_t)wide[i];
		char *to = buffer + text.count;

		if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
			c = 0xfffd;
		if (c < 0x80) {
			to[0] = (char)c;
			text.count += 1;
		} else if (c < 0x800) {
			to[0] = (char)(0xc0 | c >> 6);
			to[1] = (char)(0x80 | (c & 63));
			text.count += 2;
		} else if (c < 0x10000) {
			to[0] = (char)(0xe0 | c >> 12);
			to[1] = (char)(0x80 | (c >> 6 & 63));
			to[2] = (char)(0x80 | (c & 63));
			text.count += 3;
		} else {
			to[0] = (char)(0xf0 | c >> 18);
			to[1] = (char)(0x80 | (c >> 12 & 63));
			to[2] = (char)(0x80 | (c >> 6 & 63));
			to[3] = (char)(0x80 | (c & 63));
			text.count += 4;
		}
	}
	return text;
}

/* ---- Tables of texts: slots are only ever filled, so readers need no lock ---- */

enum { EMPTY, BEING_WRITTEN, READY };

struct slot {
	atomic_uchar state;
	unsigned char count;
	char bytes[NAME_BYTES + 2];
};

struct domain_slot {
	atomic_uchar state;
	unsigned char count;
	char bytes[DOMAIN_BYTES];
};

static struct slot strings[STRINGS]; /* untouched pages take no memory */
static struct domain_slot domains[DOMAINS];
static char default_domain[DOMAIN_BYTES] = "";
static const char many_domains[DOMAIN_BYTES] = "[one of more than 1024 domains]";
static const char many_strings[] = "[one of more than 16384 registered strings]";
#define TABLE_FULL UINTPTR_MAX

/* The number of a text in a table, from 1 on; TABLE_FULL where it has no place any more. `state`, `count` and the bytes
 * of a slot stand at its start in this order. */
static uintptr_t interned(void *table, size_t slots, size_t slot_bytes, const char *bytes, size_t count)
{
	uint64_t hash = 1469598103934665603u; /* FNV-1a */
	size_t i;

	for (i = 0; i < count; i++)
		hash = (hash ^ (unsigned char)bytes[i]) * 1099511628211u;
	hash ^= hash >> 32;
	for (i = 0; i < MAX_PROBES; i++) {
		size_t at = (hash + i) & (slots - 1);
		struct slot *slot = (struct slot *)((char *)table + at * slot_bytes);
		unsigned char state = atomic_load_explicit(&slot->state, memory_order_acquire);

		if (state == EMPTY && atomic_compare_exchange_strong(&slot->state, &state, BEING_WRITTEN)) {
			slot->count = (unsigned char)count;
			memcpy(slot->bytes, bytes, count);
			atomic_store_explicit(&slot->state, READY, memory_order_release);
			return at + 1;
		}
		/* One that is being written is another thread's, perhaps of the same text: a second copy does no harm. */
		if (state == READY && slot->count == count && memcmp(slot->bytes, bytes, count) == 0)
			return at + 1;
	}
	return TABLE_FULL;
}

static const char *domain_name(nvtxDomainHandle_t domain)
{
	uintptr_t number = (uintptr_t)domain;

	if (!number)
		return default_domain;
	return number <= DOMAINS ? domains[number - 1].bytes : many_domains;
}

static struct text text_of_registered(nvtxStringHandle_t string)
{
	uintptr_t number = (uintptr_t)string;

	if (!number)
		return text_of_ascii("");
	if (number > STRINGS)
		return text_of_ascii(many_strings);
	return (struct text){ strings[number - 1].bytes, strings[number - 1].count };
}

static struct text text_of_attributes(const nvtxEventAttributes_t *attributes, char buffer[NAME_BYTES + 4])
{
	if (attributes && attributes->size >= sizeof(*attributes)) {
		if (attributes->message_type == NVTX_MESSAGE_TYPE_ASCII)
			return text_of_ascii(attributes->message.ascii);
		if (attributes->message_type == NVTX_MESSAGE_TYPE_UNICODE)
			return text_of_wide(attributes->message.unicode, buffer);
		if (attributes->message_type == NVTX_MESSAGE_TYPE_REGISTERED)
			return text_of_registered(attributes->message.registered);
	}
	return text_of_ascii("");
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
