"""Which frames are plumbing: libraries and functions that allocate on behalf of the application.

The culprit of an allocation is the innermost frame that is not plumbing. Modules are matched by the
beginning of their file name, functions by a full-match pattern. Later evidence (where kept and freed paths
diverge) refines this table; it does not replace it. A user extends it (:mod:`leakscope.correlate.wrapper_rules`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from leakscope.correlate.mixed_stacks import merge
from leakscope.correlate.stacks import Frame
from leakscope.correlate.wrapper_rules import active_rules

MODULES = (
    "libc.so", "libc-2", "libc.musl", "ld-linux", "ld-musl", "ld-2", "libpthread", "libdl", "librt", "libm.so",
    "libstdc++", "libc++", "libgcc_s", "libjemalloc", "libtcmalloc", "libmimalloc",
    "libcuda.so", "libcudart", "libnvidia", "libnvrtc", "libcupti",
    "libffi", "libpython", "python3", "_ctypes", "[vdso]", "[vsyscall]",
)  # fmt: skip

FUNCTIONS = re.compile(
    "|".join(
        (
            # C and C++ allocation, also where linked statically
            r"(__libc_)?(malloc|calloc|realloc|free|memalign|valloc|posix_memalign|aligned_alloc|reallocarray)",
            r"operator (new|delete).*|_Zn[wa].*|str(n)?dup|(__)?v?asprintf",
            # the standard libraries of C++ and Rust, which are templates and so part of the application's own file
            r"(<|<\*|<&(mut )?|impl )*(std|__gnu_cxx|__cxxabiv1|alloc|core|hashbrown|__rustc)::.*",
            r"_*(rust_alloc|rustc|rdl_alloc|rg_alloc|rust_realloc|rdl_realloc|rust_begin_short_backtrace)\w*",
            r"__?mmap(64)?|mmap64|mmap|mremap|(__)?s?brk",
            # CUDA API entry points and the inside of a statically linked runtime
            r"cuda[A-Z]\w*|cu[A-Z]\w*|__cuda\w*|libcudart_static_\w*",
            # start of a program and of threads
            r"_start|__libc_start\w*|(__)?clone3?|start_thread|_dl_\w+",
            # the CPython evaluator, where its frames are native, and its containers
            r"_PyEval_\w+|_?PyObject_(Vectorc|C)all\w*|_PyFunction_Vectorcall|cfunction_\w+|Py_\w+|pymain_\w+",
            r"_?Py(Object|Mem|List|Dict|Set|Tuple|Unicode|Bytes|ByteArray|Long|Float)_\w+",
            r"(list|dict|set|tuple|str|bytes|bytearray|deque|frozenset)[._]\w+|insertdict|new_keys_object",
            # functions without a name of their own
            r"<(lambda|listcomp|genexpr|dictcomp|setcomp)[^>]*>",
            # tensor factories
            r"torch(\.|::)\w+",
        )
    )
)

CONTAINERS = re.compile(
    r"(list|dict|set|deque|OrderedDict|defaultdict|bytearray|collections)[._]\w+|insertdict|list_resize|dictresize"
    r"|_?Py(List|Dict|Set)_\w+|runtime\.(growslice|mapassign\w*)"
    r"|(.*::)?(vector|deque|list|map|set|unordered_map|unordered_set|basic_string|HashMap|Vec|VecDeque|BTreeMap)(<.*>)?"
    r"::(push\w*|emplace\w*|insert\w*|append|resize|reserve\w*|_M_\w+|grow\w*|operator\[\])"
    r"|(.*\.)?(append|extend|push_back|setdefault|__setitem__)"
)
"""Functions that make a container larger."""

PYTHON_FILES = re.compile(r".*/lib/python3[^/]*/.*|.*/(site|dist)-packages/.*|<frozen .*>")
INSTALLED = re.compile(r"/(usr|lib|lib64|opt)/.*|.*/lib/python3[^/]*/.*|.*/(site|dist)-packages/.*")
"""Modules that a Python program brings along but did not write; those of a program without Python may be its own."""

SYSCALL = re.compile(r"__(?:x64|arm64|ia32|se|do)_(?:compat_)?sys_(\w+)|ksys_(\w+)")
KERNEL_ENTRY = re.compile(
    r"entry_SYSCALL_\w+|do_syscall_64|x64_sys_call|el0t?_\w+|ret_from_fork\w*|kthread|worker_thread|process_one_work"
    r"|(__(?:x64|arm64|ia32|se|do)_(?:compat_)?sys_|ksys_)\w+|asm_\w+"
)
PAGE_FAULT = re.compile(r"(asm_)?exc_page_fault|do_user_addr_fault|do_page_fault|handle_mm_fault")
SLAB_ENTRY = re.compile(
    r"_*(kmem_cache_alloc\w*|k[mvz]*alloc(_node)?(_track_caller|_large|_cache)*(_noprof)?|slab_alloc\w*)"
)
"""Functions through which the kernel enters its slab allocator (``_noprof`` since Linux 6.10)."""
ALLOCATOR = re.compile(
    r"(__libc_)?(malloc|calloc|realloc|memalign|posix_memalign|aligned_alloc)|operator new.*|_Zn[wa].*"
    r"|(__rustc::)?__rust_alloc\w*"
)
THREAD_START = re.compile(r"(__)?pthread_create.*|allocate_stack")

# Caches that the kernel gives back by itself under pressure (SLAB_RECLAIM_ACCOUNT of file systems and the
# VFS).
RECLAIMABLE_CACHES = re.compile(r"dentry|(?!sock_).*_inode_cache|inode_cache|radix_tree_node|buffer_head")

# Descriptions of vmalloc areas: freed in batches of up to 32 MiB of areas for each doubling of CPUs (mm/vmalloc.c,
# lazy_max_pages), so that those of freed task stacks and modules stay for a while. The memory itself is pages.
DEFERRED_CACHES = re.compile(r"vmap_area")

# What remains of a TCP connection that this side closed first: TIME_WAIT keeps a stand-in for its socket, and its port,
# for a minute (RFC 9293, 3.6.1; TCP_TIMEWAIT_LEN of include/net/tcp.h). The caches of ports are merged with others.
DEFERRED_CALLERS = re.compile(r"(inet_twsk_alloc|inet_bind2?_bucket_create)(\..*)?")


def is_plumbing(frame: Frame) -> bool:
    """Whether ``frame`` allocates on behalf of others (or has no name at all). A user's own rules go first."""
    python = frame.kind == "python"
    name = PurePosixPath(frame.module).name
    own = active_rules().decides(frame.function, name, frame.file, python)
    if own is not None:
        return own
    if python:
        return bool(PYTHON_FILES.fullmatch(frame.file))
    if name.startswith(MODULES):
        return True
    return not frame.function or bool(FUNCTIONS.fullmatch(frame.function))


def application_frames(user: Sequence[Frame], python: Sequence[Frame]) -> list[Frame]:
    """The application's frames of a native and a Python stack, outermost first.

    Where Python runs, native frames count too, but for those of installed modules.
    """
    if not python:
        return [frame for frame in user if not is_plumbing(frame)]
    return [
        frame
        for frame in merge(user, python)
        if not is_plumbing(frame) and (frame.kind == "python" or not INSTALLED.fullmatch(frame.module))
    ]


def culprit(
    user: Sequence[Frame],
    python: Sequence[Frame],
    kernel: Sequence[Frame],
    shared: int = 0,
    kernel_only: bool = False,
) -> Frame | None:
    """The innermost frame of :func:`application_frames`; else the innermost native one that is not plumbing, the
    innermost named user frame, the syscall, the innermost one.

    ``shared`` innermost application frames are passed over: others who free end in them as well. Stacks are outermost
    first. ``kernel_only``: the evidence has no user stacks at all, the kernel's own callers are the application.
    None when all three are empty.
    """
    for frames in (application_frames(user, python), [frame for frame in user if not is_plumbing(frame)]):
        if frames:
            return frames[-1 - shared] if shared < len(frames) else frames[-1]
    for stack in (python, user):
        for frame in reversed(stack):
            if frame.function and not frame.inlined:
                return frame
    if kernel_only and (frames := kernel_callers(kernel)):
        return frames[-1 - shared] if shared < len(frames) else frames[-1]
    for frame in kernel:
        if syscall_name(frame):
            return frame
    return kernel[-1] if kernel else (user[-1] if user else None)


def kernel_callers(kernel: Sequence[Frame]) -> list[Frame]:
    """The frames of a kernel stack below its way in and above the allocator, outermost first."""
    return [
        frame for frame in kernel
        if frame.function and not SLAB_ENTRY.fullmatch(frame.function) and not KERNEL_ENTRY.fullmatch(frame.function)
    ]  # fmt: skip


def syscall_name(frame: Frame) -> str:
    """``socketpair`` for ``__x64_sys_socketpair``, ``page fault`` for a fault's frames, '' for all others."""
    if match := SYSCALL.fullmatch(frame.function):
        return match[1] or match[2]
    return "page fault" if PAGE_FAULT.fullmatch(frame.function) else ""


def allocating(kernel: Sequence[Frame]) -> Frame | None:
    """The kernel function that called the allocator: the innermost frame that is not the allocator's own."""
    for frame in reversed(kernel):
        if not SLAB_ENTRY.fullmatch(frame.function):
            return frame
    return kernel[-1] if kernel else None


def is_deferred(kernel: Sequence[Frame]) -> bool:
    """Whether what this kernel stack allocates is freed by the kernel on a timer of its own."""
    caller = allocating(kernel)
    return caller is not None and bool(DEFERRED_CALLERS.fullmatch(caller.function))


def inside_slab_allocator(kernel: Sequence[Frame]) -> bool:
    """Whether the slab allocator allocates for itself: its entry lies above other functions of the stack.

    What a new slab needs beside its pages (such as its vector of object owners) follows from the growth of
    another cache.
    """
    caller = allocating(kernel)
    above = kernel[: kernel.index(caller)] if caller in kernel else []
    return any(SLAB_ENTRY.fullmatch(frame.function) for frame in above)


def entry_of(kernel: Sequence[Frame]) -> str:
    """How the kernel was entered: the outermost syscall (or page fault) of a kernel stack, '' if none is
    seen."""
    return next((name for frame in kernel if (name := syscall_name(frame))), "")
