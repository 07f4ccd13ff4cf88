/* The recorder's probes. Compiled by bcc (after bpf_programs.source_for_bcc joins the files) and by clang. */
#include "compat.h"
#include "config.h"
#include "kmem.bpf.h"
#include "process.bpf.h"
#if CONFIG_WITH_MAPS
#include "mappings.bpf.h"
#endif
#if CONFIG_WITH_FUNCTIONS
#include "functions.bpf.h"
#include "kernels.bpf.h"
#endif
