/* Names of ranges, registered strings and domains: bounded, and without locks. */
#pragma once
#include "abi.h"
#include <stdatomic.h>
#include <string.h>

enum {
	NAME_BYTES = 96,      /* of a name; bpf_programs/records.h: mark_record */
	DOMAIN_BYTES = 48,
	STRINGS = 16384,      /* registered strings that are kept; a power of two, like DOMAINS */
	DOMAINS = 1024,
	MAX_PROBES = 64,      /* places looked at for a text before the table counts as full */
};

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
