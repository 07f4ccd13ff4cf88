/* An application with NVTX inside, as NVTX's tool interface shows it to an injection library: tables of function pointers
 * that the library fills. What it does is known to the call; test_nvtx.py compares.
 *
 *   nvtx_host scenario    ranges of all kinds, in two domains, two threads and a child; allocations (mmap) in them
 *   nvtx_host abuse       what no application should do; survives
 *   nvtx_host loop N      N pushes and pops; prints nanoseconds a pair
 *   nvtx_host wait        waits for a line on stdin after its first range, then runs the scenario
 */
#include "../bpf_programs/nvtx/abi.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CORE_PLACES = 16, CORE2_PLACES = 16 }; /* NVTX_CBID_CORE_SIZE, NVTX_CBID_CORE2_SIZE */

static NvtxFunctionPointer core[CORE_PLACES], core2[CORE2_PLACES];
static NvtxFunctionPointer *core_table[CORE_PLACES + 1], *core2_table[CORE2_PLACES + 1];

static int module_table(int module, NvtxFunctionTable *table, unsigned int *places)
{
	if (module != NVTX_CB_MODULE_CORE && module != NVTX_CB_MODULE_CORE2)
		return 0;
	*table = module == NVTX_CB_MODULE_CORE ? core_table : core2_table;
	*places = module == NVTX_CB_MODULE_CORE ? CORE_PLACES : CORE2_PLACES;
	return 1;
}

static const void *export_table(uint32_t id)
{
	static const NvtxExportTableCallbacks callbacks = { sizeof(callbacks), module_table };

	return id == NVTX_ETID_CALLBACKS ? &callbacks : 0;
}

#define CALL(table, place, result, ...) ((result(*)(__VA_ARGS__))(void (*)(void))table[place])
#define CORE(name, result, ...) CALL(core, NVTX_CBID_CORE_##name, result, __VA_ARGS__)
#define DOMAIN(name, result, ...) CALL(core2, NVTX_CBID_CORE2_Domain##name, result, __VA_ARGS__)

static int push(const char *name) { return CORE(RangePushA, int, const char *)(name); }
static int pop(void) { return CORE(RangePop, int, void)(); }
static nvtxDomainHandle_t domain(const char *name) { return DOMAIN(CreateA, nvtxDomainHandle_t, const char *)(name); }

static nvtxEventAttributes_t attributes(int type, const void *message)
{
	nvtxEventAttributes_t made = { .version = 3, .size = sizeof(made), .message_type = type };

	made.message.ascii = message;
	return made;
}

static int push_in(nvtxDomainHandle_t in, int type, const void *message)
{
	nvtxEventAttributes_t made = attributes(type, message);

	return DOMAIN(RangePushEx, int, nvtxDomainHandle_t, const nvtxEventAttributes_t *)(in, &made);
}

static int pop_in(nvtxDomainHandle_t in) { return DOMAIN(RangePop, int, nvtxDomainHandle_t)(in); }

/* A mapping of so many pages is how an allocation says in which range it was made. */
static void *allocate(size_t pages)
{
	void *made = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (made == MAP_FAILED)
		abort();
	return made;
}

static void expect(const char *what, long got, long wanted)
{
	if (got != wanted) {
		fprintf(stderr, "%s: %ld, not %ld\n", what, got, wanted);
		exit(1);
	}
}

static nvtxRangeId_t across_threads;

static void *worker(void *argument)
{
	(void)argument;
	allocate(1004); /* in no range: those of another thread are not this one's */
	expect("worker push", push("worker"), 0);
	allocate(1005);
	CORE(RangeEnd, void, nvtxRangeId_t)(across_threads);
	expect("worker pop", pop(), 0);
	allocate(1006);
	push("left open by a thread");
	allocate(1007);
	return 0;
}

static void scenario(void)
{
	nvtxDomainHandle_t serving = domain("serving"), same = domain("serving");
	nvtxDomainHandle_t wide = DOMAIN(CreateW, nvtxDomainHandle_t, const wchar_t *)(L"кэш");
	nvtxStringHandle_t string = DOMAIN(RegisterStringA, nvtxStringHandle_t, nvtxDomainHandle_t, const char *)(serving, "registered");
	nvtxStringHandle_t string_w = DOMAIN(RegisterStringW, nvtxStringHandle_t, nvtxDomainHandle_t, const wchar_t *)(wide, L"größe 🜚");
	char longest[97], cut[200];
	void *given_back;
	pthread_t thread;
	pid_t child;
	int i;

	expect("one domain by name", serving == same, 1);
	expect("pop of nothing", pop(), -1);
	expect("level 0", push("outer"), 0);
	allocate(1000);
	expect("level 1", CORE(RangePushW, int, const wchar_t *)(L"ещё 🜚"), 1);
	allocate(1001);
	expect("own level of a domain", push_in(serving, NVTX_MESSAGE_TYPE_REGISTERED, string), 0);
	given_back = allocate(1002);
	expect("level 1 of the domain", push_in(same, NVTX_MESSAGE_TYPE_ASCII, "inner"), 1);
	expect("pop of an outer domain first", pop(), 1); /* the default domain's: the inner ones stay open */
	allocate(1003);
	across_threads = CORE(RangeStartA, nvtxRangeId_t, const char *)("across threads");
	expect("a range id", across_threads != 0, 1);
	pthread_create(&thread, 0, worker, 0);
	pthread_join(thread, 0);
	munmap(given_back, 1002 * 4096);
	CORE(MarkA, void, const char *)("a mark");
	child = fork();
	if (!child) {
		allocate(1008); /* outside of the parent's ranges */
		expect("a child begins outside", pop(), -1);
		push_in(wide, NVTX_MESSAGE_TYPE_REGISTERED, string_w);
		allocate(1009);
		pop_in(wide);
		usleep(50000);
		_exit(0);
	}
	waitpid(child, &i, 0);
	expect("child", i, 0);
	expect("level of an inner pop", pop_in(serving), 1);
	expect("level of an outer pop", pop_in(serving), 0);
	allocate(1010);
	memset(longest, 'n', 96), longest[96] = 0;
	push(longest), pop();
	memset(cut, 'c', 95), memcpy(cut + 95, "ü and more", 11);
	push(cut), pop();
	push(0), pop();
	expect("pop of the first", pop(), 0);
	for (i = 0; i < 70; i++)
		push("deep");
	allocate(1011);
	for (i = 0; i < 70; i++)
		pop();
	allocate(1012);
	push("never closed");
	allocate(1013);
}

static void abuse(void)
{
	nvtxEventAttributes_t small = attributes(NVTX_MESSAGE_TYPE_ASCII, "small"), strange = attributes(77, "strange");
	wchar_t invalid[] = { 'a', (wchar_t)0xd800, (wchar_t)0x7fffffff, (wchar_t)-1, 0 }, wide[300];
	char name[64];
	long i;

	small.size = 4;
	expect("no attributes", CORE(RangePushEx, int, const nvtxEventAttributes_t *)(0), 0);
	expect("small attributes", CORE(RangePushEx, int, const nvtxEventAttributes_t *)(&small), 1);
	expect("strange attributes", CORE(RangePushEx, int, const nvtxEventAttributes_t *)(&strange), 2);
	expect("no wide name", CORE(RangePushW, int, const wchar_t *)(0), 3);
	expect("an invalid wide name", CORE(RangePushW, int, const wchar_t *)(invalid), 4);
	for (i = 0; i < 299; i++)
		wide[i] = 0x10ffff;
	wide[299] = 0;
	expect("a long wide name", CORE(RangePushW, int, const wchar_t *)(wide), 5);
	DOMAIN(RegisterStringW, nvtxStringHandle_t, nvtxDomainHandle_t, const wchar_t *)(0, wide);
	DOMAIN(CreateW, nvtxDomainHandle_t, const wchar_t *)(wide);
	expect("a wild string", push_in(0, NVTX_MESSAGE_TYPE_REGISTERED, (void *)0x1234567812345678), 6);
	expect("a wild domain", push_in((nvtxDomainHandle_t)-2, NVTX_MESSAGE_TYPE_ASCII, "x"), 0);
	expect("its pop", pop_in((nvtxDomainHandle_t)-2), 0);
	expect("a pop of another", pop_in((nvtxDomainHandle_t)-3), -1);
	expect("no string", DOMAIN(RegisterStringA, nvtxStringHandle_t, nvtxDomainHandle_t, const char *)(0, 0) == 0, 1);
	expect("no domain", domain(0) == 0, 1);
	CORE(RangeEnd, void, nvtxRangeId_t)(0);
	CORE(RangeEnd, void, nvtxRangeId_t)(~0ULL);
	DOMAIN(Destroy, void, nvtxDomainHandle_t)((nvtxDomainHandle_t)-2);
	DOMAIN(MarkEx, void, nvtxDomainHandle_t, const nvtxEventAttributes_t *)((nvtxDomainHandle_t)99999, 0);
	for (i = 0; i < 40000; i++) { /* more than the tables hold */
		snprintf(name, sizeof(name), "string %ld", i);
		DOMAIN(RegisterStringA, nvtxStringHandle_t, nvtxDomainHandle_t, const char *)(0, name);
		push_in(domain(name), NVTX_MESSAGE_TYPE_REGISTERED,
			DOMAIN(RegisterStringA, nvtxStringHandle_t, nvtxDomainHandle_t, const char *)(0, name));
		pop_in(domain(name));
	}
	for (i = 0; i < 7; i++)
		expect("pops", pop(), 6 - i);
	expect("one pop too many", pop(), -1);
	puts("survived");
}

static void loop(long rounds)
{
	struct timespec begin, end;
	long i;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (i = 0; i < rounds; i++) {
		push("a range of usual length");
		pop();
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%.0f\n", ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / rounds);
}

int main(int count, char **arguments)
{
	const char *mode = count > 1 ? arguments[1] : "scenario";
	const char *path = getenv("NVTX_INJECTION64_PATH");
	int (*initialize)(NvtxGetExportTableFunc_t) = 0;
	int i;

	for (i = 0; i < CORE_PLACES; i++) {
		core_table[i] = i ? &core[i] : 0;
		core2_table[i] = i ? &core2[i] : 0;
	}
#ifdef LINKED_IN
	initialize = InitializeInjectionNvtx2;
	(void)path;
#else
	void *library = path ? dlopen(path, RTLD_LAZY) : 0;

	initialize = library ? (int (*)(NvtxGetExportTableFunc_t))dlsym(library, "InitializeInjectionNvtx2") : 0;
#endif
	if (!initialize || !initialize(export_table)) {
		fputs("no injection\n", stderr);
		return 3;
	}
	expect("a refused table", initialize(0), 0);
	if (strcmp(mode, "wait") == 0) {
		push("before the recording");
		puts("ready");
		fflush(stdout);
		if (getchar() == EOF)
			return 1;
		pop();
	}
	if (strcmp(mode, "abuse") == 0)
		abuse();
	else if (strcmp(mode, "loop") == 0)
		loop(count > 2 ? atol(arguments[2]) : 1000000);
	else
		scenario();
	fflush(stdout);
	return 0;
}
