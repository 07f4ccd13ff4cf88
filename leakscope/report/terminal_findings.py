"""Findings on a terminal: who, how much, since when, and the chain from the code to the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from leakscope.detect.sentence import culprit_of
from leakscope.model.results import Chain, Report, Site, Touches, Verdict
from leakscope.quantities import counted, exact, interval, rate, size
from leakscope.report.cells import cut, packed, short_frame, wrapped
from leakscope.report.chain_text import chain_pieces
from leakscope.report.forecast import forecast_line
from leakscope.report.text import printable

STYLES = {"leak": "bold red", "inconclusive": "bold yellow", "not_leak": "bold green"}
INDENT = 3
_NARROW = 120
_LISTED_FRAME = 48


def finding_lines(
    number: int,
    finding: Verdict,
    report: Report,
    width: int,
    captures: Mapping[int, str],
    whole: bool = True,
) -> Iterator[Text]:
    """One finding; not ``whole``: its head, its figures and its chain alone. ``captures``: names, where several."""
    assert finding.culprit is not None
    lead = f"{number}. {finding.layer or 'memory'}: "
    head = Text(lead, STYLES[finding.verdict])
    head.append(short_frame(culprit_of(finding), width - len(lead)), "bold")
    yield head
    yield from _indented(_facts(finding, report, captures), width)
    if finding.forecast:
        yield from _indented(forecast_line(finding.forecast), width)
    told = finding is report.verdict and finding.verdict == "not_leak"  # its reasons are the report's first sentence
    if not told and (whole or finding.verdict != "leak"):
        if finding.verdict != "leak" or not finding.sites:
            said = (*finding.reasons, *(f"missing: {m}" for m in finding.missing))
        else:  # the second reason is the rate, said above
            said = (*finding.reasons[:1], *finding.reasons[2:])
        yield from _indented("; ".join(said), width)
    chains = {chain.site: chain for chain in report.chains}
    if chain := chains.get(finding.sites[0] if finding.sites else ""):
        bare = not whole or width < _NARROW
        pieces = chain_pieces(chain, finding.culprit.frame, bare, frames=3 if whole else 2)
        for line in packed(pieces, width - INDENT, " → "):
            yield Text(f"{' ' * INDENT}{line}", "cyan")
    if whole:
        yield from _more(finding, report, chains, width)


def _more(finding: Verdict, report: Report, chains: Mapping[str, Chain], width: int) -> Iterator[Text]:
    """What launches say, further slab caches, and what these allocations cause in the kernel."""
    assert finding.culprit is not None
    touches = next((s.touches for s in report.sites if finding.sites and s.id == finding.sites[0]), None)
    if touches:
        yield from _indented(touched(touches), width)
    if len(finding.culprit.slab_caches) > 1:
        yield from _indented(f"slab caches: {', '.join(finding.culprit.slab_caches)}", width)
    below = [link for site in finding.sites if site in chains for link in chains[site].detail]
    if below:
        parts = [
            link.name if link.what == "syscall" else f"{link.name} {counted(link.count, 'object')}, {size(link.bytes)}"
            for link in below[:4]
        ]
        yield from _indented(f"kept in the kernel by these calls: {'; '.join(parts)}", width)
    elif finding.consequences:
        caused = [site for site in report.sites if site.id in finding.consequences]
        kept = sum(site.live_bytes for site in caused)
        caches = ", ".join(dict.fromkeys(site.slab_cache or site.kind for site in caused))
        yield from _indented(f"with it, in the kernel: {size(kept)} ({caches})", width)


def _facts(finding: Verdict, report: Report, captures: Mapping[int, str]) -> str:
    facts = [f"gained {exact(finding.kept_bytes)}"] if finding.kept_bytes else [""]
    if finding.kept_objects:
        facts = [f"keeps {exact(finding.kept_bytes)} in {counted(finding.kept_objects, 'object')}"]
        if not finding.kept_bytes:  # the evidence tells no sizes
            facts = [f"keeps {counted(finding.kept_objects, 'object')}"]
    sites = [site for site in report.sites if site.id in finding.sites]
    facts[0] += _sampled(sites)
    if growth := finding.growth:
        facts.append(f"{rate(growth.bytes_per_s)} ({interval(growth.ci_low, growth.ci_high)})")
    if finding.leak_start_s is not None:
        facts.append(f"since {finding.leak_start_s:.1f} s")
    said = f"{', '.join(filter(None, facts))}; {finding.kind}, confidence {finding.confidence:.2f}"
    capture = finding.sites[0].partition(":")[0] if finding.sites else ""
    of = captures.get(int(capture)) if capture.isdigit() else None
    return (f"{said}, in {of}" if of else said).removeprefix("; ")


def _sampled(sites: list[Site]) -> str:
    """How the figures of sites were estimated, if they were."""
    by_bytes = sum(site.standard_error_bytes**2 for site in sites if site.bytes_sampled) ** 0.5
    if by_bytes:
        return f" (estimated from a sample by bytes, ± {size(by_bytes)})"
    by_stacks = sum(site.standard_error_bytes**2 for site in sites if site.stack_sampled) ** 0.5
    if any(site.stack_sampled for site in sites):
        return f" (apportioned by sampled stacks, ± {size(by_stacks)})"
    return ""


def touched(touches: Touches) -> str:
    """What launches say about how long memory lay idle."""
    if touches.launches:
        share = touches.touched_bytes / max(1, touches.live_bytes)
        parts = [f"kernels got pointers into {share:.0%} of it, last {touches.last_kernel or 'one of unknown name'}"]
    else:
        parts = ["no recorded launch got a pointer into it"]
    parts += [f"{size(idle)} untouched for {seconds:,} s or more" for seconds, idle in touches.idle[-1:] if idle]
    return "; ".join(parts) + (" (approximate: not all arguments were seen)" if touches.approximate else "")


def _indented(text: str, width: int, style: str = "") -> Iterator[Text]:
    for line in wrapped(text, max(20, width - INDENT)):
        yield Text(f"{' ' * INDENT}{line}", style)


def more_findings(hidden: Sequence[Verdict], width: int) -> Iterator[Text]:
    """Findings beyond those that are shown: their number, and who they are."""
    if not hidden:
        return
    lead = f"… and {counted(len(hidden), 'more finding')}: "
    names = list(dict.fromkeys(short_frame(culprit_of(finding), _LISTED_FRAME) for finding in hidden))
    yield Text(cut(lead + ", ".join(printable(name) for name in names), width), "dim")
