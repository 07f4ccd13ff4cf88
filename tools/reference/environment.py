"""Page of the environment variables that leakscope reads. Their names are searched in the code: none is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.reference import ROOT, table

PACKAGES = ("leakscope", "nsight_parsers", "bpf_programs")
READS = re.compile(r"(os\.)?environ(ment)?\.get|os\.getenv")
MEANINGS = {
    "COLUMNS": "Width of a report that goes into a pipe or a file.",
    "GITHUB_STEP_SUMMARY": "File that `check --github` adds its summary to; GitHub sets it.",
    "GITHUB_WORKSPACE": "Folder that paths in annotations are relative to; GitHub sets it. Default: the current one.",
    "LD_LIBRARY_PATH": "Folders in which `record` looks for the CUDA libraries of a command, as the loader does.",
    "LEAKSCOPE_DEBUG": "Not empty: an error that leakscope did not foresee ends with its traceback, not with one line.",
    "LEAKSCOPE_UPROBES": "`perf`: attach function probes one by one through perf events, as on kernels before 6.6, "
    "though this kernel has uprobe_multi links.",
    "KUBERNETES_SERVICE_HOST": "Set in pods by Kubernetes: `doctor` then shows the commands for a pod first.",
    "NVTX_INJECTION64_PATH": "Library that NVTX loads into a program; `record` sets it for its command "
    "([NVTX ranges](../nvtx.md)).",
    "PATH": "Folders in which `record -- CMD` and `soak -- CMD` look for the command.",
    "TERM": "`dumb`, `unknown` or nothing: live views are lines.",
    "TMPDIR": "Folder for sums over events that do not fit into `--memory`.",
    "container": "Set by container managers: `doctor` then takes the host for a container.",
}
"""What each does."""


def environment_page() -> str:
    """Markdown of the environment variables. Raises ValueError for one that nobody has described."""
    found = variables()
    if unknown := sorted(found - MEANINGS.keys()):
        raise ValueError(f"tools/reference/environment.py: say in MEANINGS what {', '.join(unknown)} does")
    rows = [(f"`{name}`", MEANINGS[name]) for name in sorted(found)]
    return "\n\n".join(
        [
            "# Environment variables",
            "None is needed. None of the environment of a recorded program enters a capture.",
            table(("variable", "does"), rows),
            "Variables of the tests and benchmarks stand in the modules that read them.",
        ]
    )


def variables() -> set[str]:
    """Names of the variables that the packages read from ``os.environ``, or give to a program that they start."""
    return {name for package in PACKAGES for path in (ROOT / package).rglob("*.py") for name in _of(path.read_text())}


def _of(source: str) -> Iterator[str]:
    if "environ" not in source and "getenv" not in source:
        return
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and re.fullmatch(
            r"(os\.)?environ(ment)?\.get|os\.getenv", ast.unparse(node.func)
        ):
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice if ast.unparse(node.value) == "os.environ" else None
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            key = node.left
        if isinstance(key, ast.Constant):
            yield str(key.value)
        elif isinstance(key, ast.Name):
            yield str(constants[key.id])
