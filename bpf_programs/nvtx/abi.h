/* The part of NVTX v3's tool interface that the injection library uses, declared anew from the published ABI.
 *
 * Names follow NVTX (nvToolsExt.h, nvtxTypes.h of NVIDIA/NVTX, release 3) so that both can be read side by side. NVTX keeps
 * this ABI for all of version 3: applications carry their own copy of NVTX, whatever its age. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <wchar.h>

typedef uint64_t nvtxRangeId_t;
typedef struct nvtxDomainRegistration *nvtxDomainHandle_t; /* opaque to the application */
typedef struct nvtxStringRegistration *nvtxStringHandle_t;

enum { NVTX_MESSAGE_TYPE_ASCII = 1, NVTX_MESSAGE_TYPE_UNICODE = 2, NVTX_MESSAGE_TYPE_REGISTERED = 3 };
enum { NVTX_NO_PUSH_POP_TRACKING = -2 }; /* what a push or pop returns when nobody counts levels */

typedef struct {
	uint16_t version;
	uint16_t size;
	uint32_t category;
	int32_t color_type;
	uint32_t color;
	int32_t payload_type;
	int32_t reserved;
	uint64_t payload;
	int32_t message_type;
	union {
		const char *ascii;
		const wchar_t *unicode;
		nvtxStringHandle_t registered;
	} message;
} nvtxEventAttributes_t;

_Static_assert(sizeof(nvtxEventAttributes_t) == 48, "NVTX_EVENT_ATTRIB_STRUCT_SIZE");

/* Modules of callbacks, and the places of the functions in their tables. */
enum { NVTX_CB_MODULE_CORE = 1, NVTX_CB_MODULE_CORE2 = 5 };
enum {
	NVTX_CBID_CORE_MarkEx = 1,
	NVTX_CBID_CORE_MarkA = 2,
	NVTX_CBID_CORE_MarkW = 3,
	NVTX_CBID_CORE_RangeStartEx = 4,
	NVTX_CBID_CORE_RangeStartA = 5,
	NVTX_CBID_CORE_RangeStartW = 6,
	NVTX_CBID_CORE_RangeEnd = 7,
	NVTX_CBID_CORE_RangePushEx = 8,
	NVTX_CBID_CORE_RangePushA = 9,
	NVTX_CBID_CORE_RangePushW = 10,
	NVTX_CBID_CORE_RangePop = 11,
};
enum {
	NVTX_CBID_CORE2_DomainMarkEx = 1,
	NVTX_CBID_CORE2_DomainRangeStartEx = 2,
	NVTX_CBID_CORE2_DomainRangeEnd = 3,
	NVTX_CBID_CORE2_DomainRangePushEx = 4,
	NVTX_CBID_CORE2_DomainRangePop = 5,
	NVTX_CBID_CORE2_DomainRegisterStringA = 10,
	NVTX_CBID_CORE2_DomainRegisterStringW = 11,
	NVTX_CBID_CORE2_DomainCreateA = 12,
	NVTX_CBID_CORE2_DomainCreateW = 13,
	NVTX_CBID_CORE2_DomainDestroy = 14,
};

typedef void (*NvtxFunctionPointer)(void);
/* An array of pointers to the pointers that NVTX calls through; a place of NULL is a function that it does not have. */
typedef NvtxFunctionPointer **NvtxFunctionTable;

enum { NVTX_ETID_CALLBACKS = 1 };

typedef struct {
	size_t struct_size;
	int (*GetModuleFunctionTable)(int module, NvtxFunctionTable *table, unsigned int *places);
} NvtxExportTableCallbacks;

typedef const void *(*NvtxGetExportTableFunc_t)(uint32_t table_id);

/* What NVTX looks up in the library that NVTX_INJECTION64_PATH names, and calls once for each copy of itself in the
 * process. 0 refuses: NVTX then does nothing, at no cost. */
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table);
