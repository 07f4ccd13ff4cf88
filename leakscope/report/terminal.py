"""The report on a terminal: the verdict in one sentence first, then what supports it, then what to do next.

Everything that comes from a capture is untrusted text and is printed with its control characters escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakscope.detect.sentence import culprit_of, sentence
from leakscope.model.results import Chain, ChainLink, Report, Row, Site, Touches, Verdict
from leakscope.quantities import counted, exact, rate, size
from leakscope.report.calibration import print_calibration
from leakscope.report.forecast import forecast_line
from leakscope.report.imports import import_lines
from leakscope.report.joins import evidence_of_link, join_lines
from leakscope.report.stores import groups_table, store_lines
from leakscope.report.text import printable

_LONG_PATH = re.compile(r"\((?=[^()]{40})[^()]*/([^()/]+:\d+)\)$")
_STYLES = {"leak": "bold red", "inconclusive": "bold yellow", "not_leak": "bold green"}
_WORDS = {"leak": "LEAK", "inconclusive": "INCONCLUSIVE", "not_leak": "NO LEAK"}
_MAX_FINDINGS = 5
_MAX_HIDDEN = 5
_OF_OTHERS = ("identity", "order", "window", "range")  # rules of links that another source adds


def print_report(console: Console, report: Report, top: int = 10) -> None:
    """Print ``report``, with at most ``top`` sites besides those of the findings."""
    _verdict(console, report)
    _layers(console, report)
    findings = [v for v in (report.verdict, *report.findings) if v.culprit]
    chains = {chain.site: chain for chain in report.chains}
    for number, finding in enumerate(findings[:_MAX_FINDINGS], 1):
        _finding(console, number, finding, chains, report)
    if len(findings) > _MAX_FINDINGS:
        console.print(f"… and {len(findings) - _MAX_FINDINGS} more findings: --json has all", style="dim")
    named = {site for finding in findings for site in (*finding.sites, *finding.consequences)}
    _sites(
        console,
        [s for s in report.sites if s.id not in named and s.frees_visible and s.added and s.live_bytes],
        top,
    )
    _hidden(console, [s for s in report.sites if not s.frees_visible])
    _stores(console, report)
    _joins(console, report)
    print_calibration(console, report.calibration)
    _rows(console, "losses", report.losses)
    _reconciliation(console, report.reconciliation)
    _next(console, report)


def _verdict(console: Console, report: Report) -> None:
    verdict = report.verdict
    line = Text(_WORDS[verdict.verdict], _STYLES[verdict.verdict])
    line.append(f"  {printable(sentence(verdict))}", "bold")
    others = sum(f.verdict == "leak" for f in report.findings)
    if verdict.verdict == "leak" and others:
        line.append(f"; {counted(others, 'more leak')} below")
    console.print(line)
    for input_ in report.inputs:
        for problem in input_.get("problems", ()):
            console.print(Text(f"  {printable(str(problem))}", "yellow"))
    files = [input_ for input_ in report.inputs if "limits" in input_]
    for said in import_lines(files):
        _indented(console, said, "dim" if said.startswith("  ") else "")


def _layers(console: Console, report: Report) -> None:
    if not report.layers:
        return
    of = _capture_names(report)
    table = _table(
        "layer", *(["capture"] if of else []), ">kept at end", ">objects", ">growth", "95 % interval", ">allocated"
    )
    for layer in report.layers:
        growth = layer.growth
        interval = f"{size(growth.ci_low)} … {rate(growth.ci_high)}" if growth else ""
        table.add_row(
            layer.layer,
            *([printable(of.get(layer.source, ""))] if of else []),
            size(layer.live_bytes) + (f" ± {size(layer.standard_error_bytes)}" if layer.standard_error_bytes else ""),
            f"{layer.live_objects:,}",
            rate(growth.bytes_per_s) if growth else "",
            interval,
            size(layer.allocated_bytes),
        )
    console.print()
    console.print(table)


def _capture_names(report: Report) -> dict[int, str]:
    """Number of a capture (LayerTotal.source) → what it is called; empty where there is but one."""
    captures = [Path(str(i.get("path", ""))).name for i in report.inputs if "limits" not in i]
    names = dict(enumerate([*captures, *(["imported files"] if len(captures) < len(report.inputs) else [])]))
    return names if len(names) > 1 else {}


def _finding(console: Console, number: int, finding: Verdict, chains: dict[str, Chain], report: Report) -> None:
    assert finding.culprit is not None
    head = Text(f"{number}. {finding.layer or 'memory'}: ", _STYLES[finding.verdict])
    head.append(printable(culprit_of(finding)), "bold")
    head.append(f"  {finding.kind}, confidence {finding.confidence:.2f}", "dim")
    capture = finding.sites[0].partition(":")[0] if finding.sites else ""
    if capture.isdigit() and (of := _capture_names(report).get(int(capture))):
        head.append(f", in {printable(of)}", "dim")
    console.print()
    console.print(head)
    facts = [f"gained {exact(finding.kept_bytes)}"]
    if finding.kept_objects:
        facts = [f"keeps {exact(finding.kept_bytes)} in {counted(finding.kept_objects, 'object')}"]
        if not finding.kept_bytes:  # the evidence tells no sizes
            facts = [f"keeps {counted(finding.kept_objects, 'object')}"]
    sampled = [site for site in report.sites if site.id in finding.sites and site.bytes_sampled]
    if error := sum(site.standard_error_bytes**2 for site in sampled) ** 0.5:
        facts[0] += f" (estimated from a sample by bytes, ± {size(error)})"
    if growth := finding.growth:
        interval = f"{size(growth.ci_low)} … {size(growth.ci_high)}"
        facts.append(f"{rate(growth.bytes_per_s)} ({interval})")
    if finding.leak_start_s is not None:
        facts.append(f"since {finding.leak_start_s:.1f} s")
    _indented(console, ", ".join(facts))
    if finding.forecast:
        _indented(console, forecast_line(finding.forecast))
    if finding.verdict != "leak" or not finding.sites:
        _indented(console, "; ".join((*finding.reasons, *(f"missing: {m}" for m in finding.missing))))
    else:  # the second reason is the rate, said above
        _indented(console, "; ".join((*finding.reasons[:1], *finding.reasons[2:])))
    if chain := chains.get(finding.sites[0] if finding.sites else ""):
        _indented(console, chain_line(chain, finding.culprit.frame), "cyan")
    touches = next((s.touches for s in report.sites if finding.sites and s.id == finding.sites[0]), None)
    if touches:
        _indented(console, _touched(touches))
    if len(finding.culprit.slab_caches) > 1:
        _indented(console, f"slab caches: {', '.join(finding.culprit.slab_caches)}")
    below = [link for site in finding.sites if site in chains for link in chains[site].detail]
    if below:
        parts = [
            link.name if link.what == "syscall" else f"{link.name} {counted(link.count, 'object')}, {size(link.bytes)}"
            for link in below[:4]
        ]
        _indented(console, f"kept in the kernel by these calls: {'; '.join(parts)}")
    elif finding.consequences:
        sites = [s for s in report.sites if s.id in finding.consequences]
        kept = sum(site.live_bytes for site in sites)
        caches = ", ".join(dict.fromkeys(site.slab_cache or site.kind for site in sites))
        _indented(console, f"with it, in the kernel: {size(kept)} ({caches})")


def chain_line(chain: Chain, culprit: str = "") -> str:
    """A chain in one line, its frames shortened to those around the culprit. Not escaped: see text.printable."""
    return " → ".join(_name(link) for link in _shortened(chain.links, culprit))


def _touched(touches: Touches) -> str:
    """What launches say about how long memory lay idle."""
    if touches.launches:
        share = touches.touched_bytes / max(1, touches.live_bytes)
        parts = [f"kernels got pointers into {share:.0%} of it, last {touches.last_kernel or 'one of unknown name'}"]
    else:
        parts = ["no recorded launch got a pointer into it"]
    parts += [f"{size(idle)} untouched for {seconds:,} s or more" for seconds, idle in touches.idle[-1:] if idle]
    return "; ".join(parts) + (" (approximate: not all arguments were seen)" if touches.approximate else "")


def _shortened(links: Sequence[ChainLink], culprit: str = "", frames: int = 3) -> list[ChainLink]:
    """The chain with few frames: the culprit and those around it, else the innermost; unnamed ones are left out."""
    first = next((i for i, link in enumerate(links) if link.what != "range"), len(links))
    lead = next((i for i, link in enumerate(links) if i >= first and link.what != "frame"), len(links))
    named = [link for link in links[first:lead] if "+0x" not in link.name]
    at = next((i for i in reversed(range(len(named))) if named[i].name == culprit), len(named) - 1)
    end = min(len(named), max(at + 2, frames))
    return [*links[:first], *named[max(0, end - frames) : end], *links[lead:]]


def _short_file(name: str) -> str:
    """``f (…/callproc.c:9)`` for a frame whose file has a long path; JSON has it whole."""
    return _LONG_PATH.sub(r"(…/\1)", name)


def _name(link: ChainLink) -> str:
    if link.rule in _OF_OTHERS or link.what == "profile":
        return f"{link.name} {evidence_of_link(link)}"
    if link.what in ("slab_cache", "kind", "map", "device"):
        return f"{link.name} {size(link.bytes)}"
    if link.what == "range":
        return f"range {link.name}"
    if link.what == "launches":
        return f"{'' if link.confidence == 1 else '~'}{link.name} ×{link.count:,}"
    return f"{link.name}()" if link.what == "call" else _short_file(link.name)


def _sites(console: Console, sites: Sequence[Site], top: int) -> None:
    """One row for the sites of a culprit in a slab cache or kind, those that keep most first."""
    groups: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites:
        what = site.slab_cache or site.kind
        groups.setdefault((site.culprit_frame or what, site.layer, what), []).append(site)
    if not groups or top <= 0:
        return
    table = _table("other sites", "layer", "kind", ">kept", ">share", ">growth")
    ranked = sorted(groups.items(), key=lambda item: (-sum(s.live_bytes for s in item[1]), item[0]))
    for (name, layer, what), members in ranked[:top]:
        kept = sum(site.live_bytes for site in members)
        share = kept / max(1, sum(site.allocated_bytes for site in members))
        mark = "~" if any(site.stack_sampled or site.bytes_sampled for site in members) else ""
        error = sum(site.standard_error_bytes**2 for site in members if site.bytes_sampled) ** 0.5
        table.add_row(
            printable(name),
            layer,
            printable(what),
            mark + size(kept) + (f" ± {size(error)}" if error else ""),
            f"{share:.0%}",
            rate(sum(site.growth.bytes_per_s for site in members if site.growth)),
        )
    console.print()
    console.print(table)
    notes = []
    if any(site.stack_sampled for _, members in ranked[:top] for site in members):
        notes.append("~ apportioned by sampled stacks")
    if any(site.bytes_sampled for _, members in ranked[:top] for site in members):
        notes.append("± standard error of what was sampled by bytes")
    if len(ranked) > top:
        notes.append(f"{len(ranked) - top:,} more with --top, all with --json")
    if notes:
        console.print("; ".join(notes), style="dim")


def _hidden(console: Console, sites: Sequence[Site]) -> None:
    if not sites:
        return
    console.print()
    console.print("frees not visible (freed without a trace, so never a finding):", style="dim")
    for site in sites[:_MAX_HIDDEN]:
        where = site.culprit_frame or site.kind
        _indented(
            console,
            f"{site.slab_cache or site.kind}: {counted(site.allocated_objects, 'allocation')} by {where}",
            "dim",
        )
    if len(sites) > _MAX_HIDDEN:
        _indented(console, f"… and {counted(len(sites) - _MAX_HIDDEN, 'more site')}", "dim")


def _stores(console: Console, report: Report) -> None:
    for audit in report.stores:
        first, *rest = store_lines(audit)
        console.print()
        console.print(Text(first))
        console.print(groups_table(audit))
        for line in rest:
            _indented(console, line)


def _joins(console: Console, report: Report) -> None:
    lines = list(join_lines(report))
    if lines:
        console.print()
        console.print("joins:")
    for line in lines:
        _indented(console, line.strip(), "dim" if line.startswith("  ") else "")


def _rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    console.print()
    if not rows:
        console.print(f"{title}: none", style="dim")
        return
    console.print(f"{title}:")
    for row in rows:
        value = "?" if row.value is None else f"{row.value:,}"
        _indented(console, f"{row.source}: {row.what} {value}")


def _reconciliation(console: Console, rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = _table("reconciliation", ">counter", ">events", ">unexplained")
    missing = [row.what for row in rows if row.value is None]
    for index, row in enumerate(rows):
        if row.value is not None and index + 2 < len(rows) and rows[index + 2].what == "unexplained":
            kept, unexplained = rows[index + 1], rows[index + 2]
            values = (row.value, kept.value or 0, unexplained.value or 0)
            table.add_row(printable(f"{row.source}: {row.what}"), *(size(value) for value in values))
    console.print()
    if table.row_count:
        console.print(table)
    for what in missing:
        console.print(Text(printable(what), "yellow"))


def _next(console: Console, report: Report) -> None:
    paths = [str(input_.get("path", "")) for input_ in report.inputs]
    path = " ".join(paths) or "CAPTURE"
    capture = next((str(i.get("path", "")) for i in report.inputs if "limits" not in i), "")
    hints = [f"leakscope attribute {path} --json     every site, chain and number"]
    if report.verdict.verdict == "inconclusive":
        hints.insert(0, "record longer, or with a larger buffer where events were lost")
    if capture or not paths:
        hints.append(f'leakscope query {capture or path} "SELECT * FROM mem_events LIMIT 10"')
    else:
        hints.append(f"leakscope import {path} -o CAPTURE     to keep what was read, and query it")
    console.print()
    for hint in hints:
        console.print(Text(f"next: {printable(hint)}", "dim"), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="ellipsis" if right else "fold",
            ratio=1 if index == 0 and len(columns) > 4 else None,
        )
    return table


def _indented(console: Console, text: str, style: str = "") -> None:
    for line in wrap(printable(text), max(20, console.width - 3), break_on_hyphens=False):
        console.print(Text(f"   {line}", style))


def plain_lines(report: Report, width: int, top: int = 10) -> Iterable[str]:
    """The report as lines of plain text ``width`` columns wide."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        print_report(console, report, top)
    return [line.rstrip() for line in captured.get().splitlines()]
