"""``leakscope export``: results in the formats of other tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli import warn
from leakscope.cli.live import DurationOption
from leakscope.cli.options import DEFAULT_MEMORY, LayerOption, MemoryOption, PidOption, WarmupOption
from leakscope.errors import BadInputError
from leakscope.model.words import KINDS
from leakscope.quantities import size
from leakscope.report.text import printable

if TYPE_CHECKING:
    from leakscope.cli.evidence import Gathered
    from leakscope.model.results import Report
    from leakscope.report.export.tables import Batches


class Format(StrEnum):
    """Formats that an export is written in."""

    FOLDED = "folded"
    SPEEDSCOPE = "speedscope"
    PPROF = "pprof"
    PERFETTO = "perfetto"
    CSV = "csv"
    PARQUET = "parquet"
    GRAPHML = "graphml"
    DOT = "dot"
    PROMETHEUS = "prometheus"
    OTEL = "otel"


class Of(StrEnum):
    """What a flame graph shows."""

    LIVE = "live"
    GROWTH = "growth"
    ALLOCATED = "allocated"


class Table(StrEnum):
    """Tables for CSV and Parquet."""

    SITES = "sites"
    SAMPLES = "samples"
    EVENTS = "events"


FLAME = (Format.FOLDED, Format.SPEEDSCOPE, Format.PPROF)
TABLES = (Format.CSV, Format.PARQUET)
SITES = 10_000
METRIC_SITES = 10
STDOUT = Path("-")


def export(
    evidence: Annotated[
        list[str],
        typer.Argument(
            metavar="EVIDENCE…",
            help="Captures, packed ones too, reports that import knows, and live sources.",
            show_default=False,
        ),
    ],
    to: Annotated[Format, typer.Option("--to", help="Format to write.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write, replaced when the new one is whole; - is standard output.",
            show_default=False,
        ),
    ],
    of: Annotated[
        Of | None,
        typer.Option(
            "--of",
            help="folded, speedscope, pprof: kept when the evidence ends, growth after the warm-up in "
            "bytes an hour, or all that was allocated.  [default: live]",
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        Table | None, typer.Option("--table", help="csv, parquet: which rows.  [default: sites]", show_default=False)
    ] = None,
    layer: LayerOption = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="folded, speedscope, pprof: only this kind of memory, e.g. pool_block."),
    ] = None,
    pid: PidOption = None,
    warmup: WarmupOption = None,
    sites: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Sites told one by one, most kept bytes first.  [default: {SITES:,}; in metrics {METRIC_SITES}]",
            show_default=False,
        ),
    ] = None,
    duration: DurationOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> None:
    """Write what the evidence shows for other tools: flame graphs (folded, speedscope, pprof), a trace (perfetto),
    tables (csv, parquet), the graph of the chains (graphml, dot), metrics (prometheus, otel).

    A file whose name ends in .gz is compressed (no tables); pprof's always is.
    """
    from leakscope.cli.evidence import gather
    from leakscope.cli.outputs import require_place

    _refuse_options(to, of, table, layer, kind)
    if (to is Format.PERFETTO or table not in (None, Table.SITES)) and (sites is not None or warmup is not None):
        what = "--to perfetto" if to is Format.PERFETTO else f"--table {table}"
        raise BadInputError(f"{what}: shows no sites; leave out --sites and --warmup")
    if output != STDOUT:
        require_place(output)  # said before the work
    gathered = gather(evidence, duration, pid=pid)
    names = gathered.names
    warn(f"{name}: {problem}" for name, c in zip(names, gathered.captures, strict=True) for problem in c.problems)
    if to is Format.PERFETTO:
        _write(output, to, _perfetto(gathered, names, layer, pid, memory))
        return
    if to in TABLES and table not in (None, Table.SITES):
        _write_tables(output, to, _rows(gathered, names, table, layer, pid, memory))
        return

    from leakscope.cli.attribute import report_of
    from leakscope.detect.attribution import Options

    count = sites or (METRIC_SITES if to in (Format.PROMETHEUS, Format.OTEL) else SITES)
    options = Options(layer=layer, pid=pid, warm_up_s=warmup, sites=count)
    report = report_of(evidence, options, memory, runs=True, gathered=gathered)
    if to in TABLES:
        from leakscope.report.export.tables import sites_table

        _write_tables(output, to, [sites_table(report, names)])
    else:
        _write(output, to, _rendered(report, names, to, (of or Of.LIVE).value, kind or [], count))


def _refuse_options(to: Format, of: Of | None, table: Table | None, layer: str | None, kind: list[str] | None) -> None:
    unknown = next((one for one in kind or [] if one not in KINDS), None)
    if unknown is not None:
        raise BadInputError(f"--kind {unknown}: no such kind; the kinds are {', '.join(KINDS)}")
    for name, value, formats in (("--of", of, FLAME), ("--kind", kind, FLAME), ("--table", table, TABLES)):
        if value and to not in formats:
            raise BadInputError(f"{name}: does not apply to --to {to}; it is for {', '.join(formats)}")


def _rendered(report: Report, names: list[str], to: Format, of: str, kinds: list[str], sites: int) -> Iterable[bytes]:
    if to in FLAME:
        from leakscope.report.export.stacks import MEASURES, stack_values

        values, notes = stack_values(report, names, kinds)
        warn(notes)
        if not any(value.value(of) for value in values):
            warn([f"nothing to draw: no site has {MEASURES[of][0]}"])
        if to is Format.FOLDED:
            from leakscope.report.export.folded import folded

            return folded(values, of)
        if to is Format.SPEEDSCOPE:
            from leakscope.report.export.speedscope import speedscope

            return [speedscope(values, of, ", ".join(names))]
        from leakscope.report.export.pprof import pprof

        longest = max((run.end_ns - run.start_ns for run in report.runs), default=0)
        return [pprof(values, of, duration_ns=max(0, longest), comments=notes)]
    if to in (Format.GRAPHML, Format.DOT):
        from leakscope.report.chain_graph import chain_graph, to_dot, to_graphml

        graph = chain_graph(report.chains)
        return [(to_graphml(graph) if to is Format.GRAPHML else to_dot(graph)).encode(errors="replace")]
    from leakscope.report.export.metrics import metrics

    found = metrics(report, names, sites)
    if to is Format.PROMETHEUS:
        from leakscope.report.export.prometheus import prometheus

        return [prometheus(found)]
    from leakscope.report.export.otel import otel

    return [otel(found, time.time_ns())]


def _perfetto(gathered: Gathered, names: list[str], layer: str | None, pid: int | None, memory: str) -> Iterator[bytes]:
    import duckdb

    from leakscope.correlate.joins.common_clock import common_clock
    from leakscope.correlate.tracks import tracks_of
    from leakscope.report.export.perfetto import Placed, perfetto

    clocks = iter(common_clock([source for capture in gathered.captures for source in capture.manifest.sources]))
    placed, notes = [], []
    several = sum(len(capture.manifest.sources) for capture in gathered.captures) > 1
    for capture, name in zip(gathered.captures, names, strict=True):
        try:
            with capture.connect(memory_limit=memory) as con:
                tracks = tracks_of(con, capture.manifest.sources, layer, pid)
        except duckdb.Error as error:
            raise _unusable(name, error) from None
        notes += [f"{name}: {count:,} {what} left out, the last ones" for what, count in tracks.left_out.items()]
        offsets = {}
        for source, clock in zip(capture.manifest.sources, clocks, strict=False):
            notes += [clock.note] if clock.note else []
            if clock.offset_ns is not None:
                offsets[source.id] = clock.offset_ns
            elif source.clock != "none":
                notes[-1] += "; it is not drawn"
        placed.append(Placed(tracks, offsets, f" ({name})" if several else ""))
    warn(notes)
    return perfetto(placed, notes)


def _rows(
    gathered: Gathered, names: list[str], table: Table, layer: str | None, pid: int | None, memory: str
) -> Iterator[Batches]:
    from leakscope.correlate.rows import rows_of
    from leakscope.report.export.tables import Batches

    for capture, name in zip(gathered.captures, names, strict=True):
        with capture.connect(memory_limit=memory) as con:
            schema, batches = rows_of(con, table.value, name, layer, pid)
            yield Batches(schema, _usable(batches, name))


def _usable(batches: Iterator[Any], name: str) -> Iterator[Any]:
    import duckdb

    try:
        yield from batches
    except duckdb.Error as error:
        raise _unusable(name, error) from None


def _unusable(name: str, error: Exception) -> BadInputError:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BadInputError(f"{name}: cannot be exported: {line}")


def _write(output: Path, to: Format, pieces: Iterable[bytes]) -> None:
    if output == STDOUT:
        sys.stdout.buffer.writelines(pieces)
        return
    from leakscope.cli.outputs import written_aside

    with written_aside(output) as aside:
        if output.suffix == ".gz" and to is not Format.PPROF:
            import gzip

            with aside.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
                file.writelines(pieces)
        else:
            with aside.open("wb") as file:
                file.writelines(pieces)
    _say(output)


def _write_tables(output: Path, to: Format, tables: Iterable[Batches]) -> None:
    from leakscope.cli.outputs import written_aside
    from leakscope.report.export.tables import write_csv, write_parquet

    write = write_csv if to is Format.CSV else write_parquet
    if output == STDOUT:
        write(tables, sys.stdout.buffer)
        return
    with written_aside(output) as aside:
        write(tables, aside)
    _say(output)


def _say(output: Path) -> None:
    print(printable(f"{output}  ({size(output.stat().st_size)})"))
