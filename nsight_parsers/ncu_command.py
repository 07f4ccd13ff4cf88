"""What the command line stored in an Nsight Compute report says about which kernel launches were profiled.

Only these filters and the base name of the program are kept: a command line can hold tokens and paths. Option names
and meanings are those of ``ncu --help``: ``--launch-skip`` and ``--launch-count`` count launches that match the other
filters, ``--launch-skip-before-match`` counts all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_FLAGS = """
help version call-stack nvtx list-sets list-sections list-rules list-metrics list-chips query-metrics
section-folder-restore disable-profiler-start-stop quiet verbose disable-extra-suffixes force-overwrite open-in-ui csv
print-metric-attribution print-fp print-rule-details details-all fp
"""
_VALUED = """
mode port max-connections config-file config-file-path check-exit-code injection-path-32 injection-path-64
preload-library call-stack-type target-processes target-processes-filter hostname kill replay-mode app-replay-buffer
app-replay-match app-replay-mode graph-profiling range-replay-options set section-folder section-folder-recursive
apply-rules rule import-source source-folders query-metrics-mode query-metrics-collection chips profile-from-start
cache-control clock-control pipeline-boost-state devices filter-mode kernel-id kernel-name kernel-name-base
kernel-regex kernel-regex-base rename-kernels rename-kernels-export rename-kernels-path launch-count launch-skip
launch-skip-before-match section metrics nvtx-include nvtx-exclude range-filter nvtx-push-pop-scope native-include
native-exclude python-include python-exclude pm-sampling-interval pm-sampling-buffer-size pm-sampling-max-passes
warp-sampling-interval warp-sampling-max-passes warp-sampling-buffer-size sampling-interval sampling-max-passes
sampling-buffer-size log-file export import page print-source resolve-source-file print-details print-metric-name
print-units print-kernel-base print-metric-instances print-nvtx-rename print-summary units summary
"""
_SELECTING = """
launch-skip launch-count launch-skip-before-match kernel-name kernel-id kernel-regex nvtx-include nvtx-exclude
filter-mode range-filter profile-from-start replay-mode devices native-include native-exclude python-include
python-exclude
"""
FLAGS = frozenset(_FLAGS.split())
"""Options that take no value."""
VALUED = frozenset(_VALUED.split())
"""Options that take the next word. One in neither set may take a value or not: then nothing behind it is sure."""
SELECTING = frozenset(_SELECTING.split())
"""Options that decide which launches are profiled."""
SHORT = {
    "h": "help", "v": "version", "p": "port", "k": "kernel-name", "c": "launch-count", "s": "launch-skip",
    "o": "export", "f": "force-overwrite", "i": "import",
}  # fmt: skip

_PROFILER = re.compile(r"(?:.*[/\\])?(?:ncu|nv-nsight-cu-cli)(?:\.exe|\.bat|\.com)?", re.IGNORECASE)
_WORD = re.compile(r'"[^"]*"|\S+')
MAX_CHARACTERS = 256 << 10
_OFF = ("0", "off", "no", "false")


@dataclass(frozen=True)
class LaunchFilters:
    """The options that select launches, at their defaults where not given; ``unclear`` says why they may be wrong."""

    launch_skip: int = 0
    launch_count: int | None = None
    launch_skip_before_match: int = 0
    kernel_name: str = ""
    """As given: an exact name, or ``regex:`` and an expression."""
    kernel_name_base: str = "function"
    kernel_id: str = ""
    nvtx_include: tuple[str, ...] = ()
    nvtx_exclude: tuple[str, ...] = ()
    stack_filter: bool = False
    range_filter: bool = False
    devices: str = ""
    filter_mode: str = "global"
    profile_from_start: bool = True
    replay_mode: str = "kernel"
    graph_profiling: str = "node"
    target_processes: str = ""
    mode: str = "launch-and-attach"
    config_file: str = "searched"
    """``searched`` (the default: ``config.ncu-cfg`` may add options), ``off``, or ``named``."""
    program: str = ""
    unclear: str = ""


@dataclass
class _Words:
    """The options before the program, and what follows."""

    options: dict[str, list[str]] = field(default_factory=dict)
    program: str = ""
    arguments: list[str] = field(default_factory=list)
    unclear: str = ""


def parse_command_line(text: str) -> LaunchFilters:
    """The launch filters of a stored command line.

    The report stores the words joined by spaces, quotes lost: an option value with a space in it looks like the
    program. Anything of that kind, and any option that is not known, is told in ``unclear``.
    """
    words = _split(text)
    options = words.options
    unclear = words.unclear
    skip, skip_unclear = _count(options, "launch-skip", 0)
    before, before_unclear = _count(options, "launch-skip-before-match", 0)
    count, count_unclear = _count(options, "launch-count", None)
    regex = _last(options, "kernel-regex")
    config = "searched" if _last(options, "config-file", "1").lower() not in _OFF else "off"
    return LaunchFilters(
        launch_skip=skip or 0,
        launch_count=count,
        launch_skip_before_match=before or 0,
        kernel_name=f"regex:{regex}" if regex else _last(options, "kernel-name"),
        kernel_name_base=_last(options, "kernel-name-base", _last(options, "kernel-regex-base", "function")),
        kernel_id=_last(options, "kernel-id"),
        nvtx_include=tuple(options.get("nvtx-include", ())),
        nvtx_exclude=tuple(options.get("nvtx-exclude", ())),
        stack_filter=any(f"{kind}-{do}" in options for kind in ("native", "python") for do in ("include", "exclude")),
        range_filter="range-filter" in options,
        devices=_last(options, "devices"),
        filter_mode=_last(options, "filter-mode", "global"),
        profile_from_start=_last(options, "profile-from-start", "1").lower() not in _OFF,
        replay_mode=_last(options, "replay-mode", "kernel"),
        graph_profiling=_last(options, "graph-profiling", "node"),
        target_processes=_last(options, "target-processes"),
        mode=_last(options, "mode", "launch-and-attach"),
        config_file="named" if "config-file-path" in options else config,
        program=base_name(words.program),
        unclear=unclear or skip_unclear or before_unclear or count_unclear,
    )


def base_name(path: str) -> str:
    """The last part of a Linux or Windows path."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _split(text: str) -> _Words:
    words = _Words()
    if len(text) > MAX_CHARACTERS:
        words.unclear = "the stored command line is too long to be one"
        return words
    if not all(part.isprintable() for part in text.split()):
        words.unclear = "the stored command line has control characters"
        return words
    parts = [part.strip('"') for part in _WORD.findall(text)]
    start = next((i for i, part in enumerate(parts) if _PROFILER.fullmatch(part)), None)
    if start is None:
        words.unclear = "the stored command line does not name ncu"
        return words
    position = start + 1
    while position < len(parts):
        part = parts[position]
        if not part.startswith("-") or part == "-":
            break
        position += 1
        if part == "--":
            break
        name, value = _option(part)
        if name is None or (name in FLAGS and value is not None):
            words.unclear = "an option in the stored command line is not known to this reader"
            break
        if value is None and name not in FLAGS:
            if position >= len(parts):
                words.unclear = f"the stored command line ends after --{name}"
                break
            value = parts[position]
            position += 1
        words.options.setdefault(name, []).append(value or "")
    if position < len(parts):
        words.program, words.arguments = parts[position], parts[position + 1 :]
    words.unclear = words.unclear or _doubt(words)
    return words


def _option(part: str) -> tuple[str | None, str | None]:
    """The full name and the attached value of ``--name=value``, ``-n`` or ``-nvalue``; unique prefixes count."""
    if not part.startswith("--"):
        return SHORT.get(part[1]), part[2:].removeprefix("=") or None
    name, equals, value = part[2:].partition("=")
    known = FLAGS | VALUED
    if name not in known:
        guesses = [option for option in known if option.startswith(name)]
        if len(guesses) != 1:
            return None, None
        name = guesses[0]
    return name, value if equals else None


def _doubt(words: _Words) -> str:
    if words.program.startswith("@"):
        return "ncu read options from a response file, which the report does not hold"
    for part in words.arguments:
        if part.startswith("--") and part[2:].partition("=")[0] in SELECTING:
            return f"--{part[2:].partition('=')[0]} stands behind what looks like the program"
    return ""


def _last(options: dict[str, list[str]], name: str, default: str = "") -> str:
    return options[name][-1] if options.get(name) else default


def _count(options: dict[str, list[str]], name: str, default: int | None) -> tuple[int | None, str]:
    if name not in options:
        return default, ""
    text = _last(options, name)
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return default, f"--{name} is no number"
    return int(text), ""
