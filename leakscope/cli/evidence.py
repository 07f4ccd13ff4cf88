"""Opens what verbs take as EVIDENCE: captures, files that import knows, live sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakscope.cli.live import collect_sources, split_evidence
from leakscope.errors import BadInputError

if TYPE_CHECKING:
    import duckdb

    from leakscope.capture import Capture
    from leakscope.ingest import Imported
    from leakscope.model.manifest import Manifest


@dataclass
class Gathered:
    """``captures`` are those of ``paths``, in order; what was ``imported`` from files of other tools and live sources
    is together in a last one, kept until this process ends."""

    captures: list[Capture]
    paths: list[Path]
    imported: list[Imported]

    @property
    def names(self) -> list[str]:
        """One a capture, for people: its path, or the names of what was imported."""
        others = [" + ".join(file.source.name for file in self.imported)] if self.imported else []
        return [*map(str, self.paths), *others]


def gather(
    evidence: Sequence[str | Path],
    duration_s: float | None = None,
    pool_blocks: int | None = None,
    pid: int | None = None,
) -> Gathered:
    """Open captures, import files, collect live sources for ``duration_s``. ``pid``: of files that name no process.

    Raises BadInputError for evidence that cannot be read.
    """
    import secrets

    from leakscope.capture import Capture
    from leakscope.capture.reader import scratch_directory
    from leakscope.ingest import Options, import_files, kind_of

    addresses, given = split_evidence(evidence)
    missing = next((path for path in given if not path.exists()), None)
    if missing is not None:
        raise BadInputError(f"{missing}: no such file or capture")
    files = [path for path in given if kind_of(path) is not None]
    paths = [path for path in given if path not in files]
    gathered = Gathered([_opened(path) for path in paths], paths, [])
    if files or addresses:
        scratch = Path(scratch_directory()) / f"imported-{secrets.token_hex(4)}.lscope"
        gathered.imported = collect_sources(addresses, scratch, duration_s)
        if files:
            gathered.imported += import_files(files, scratch, Options(pid=pid, pool_blocks=pool_blocks))
        gathered.captures.append(Capture.open(scratch))
    return gathered


@contextmanager
def opened_evidence(
    evidence: Sequence[str | Path], memory: str, duration_s: float | None = None, pool_blocks: int | None = None
) -> Iterator[tuple[list[tuple[duckdb.DuckDBPyConnection, Manifest]], list[dict[str, Any]]]]:
    """(a connection and the manifest of each capture, what to say of the inputs), open until the block ends.

    Files of other tools and live sources go together into a capture for this once, the last one. Raises BadInputError
    for evidence that cannot be read, and for data in it that a query cannot compute with.
    """
    import duckdb

    gathered = gather(evidence, duration_s, pool_blocks)
    captures = gathered.captures
    inputs: list[dict[str, Any]] = [
        {"path": str(path), "kind": "capture", "problems": capture.problems}
        for path, capture in zip(gathered.paths, captures, strict=False)
    ]
    inputs += [file.to_json() for file in gathered.imported]
    try:
        with ExitStack() as stack:
            yield [(stack.enter_context(c.connect(memory_limit=memory)), c.manifest) for c in captures], inputs
    except duckdb.Error as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{', '.join(map(str, evidence))}: cannot be analysed: {line}") from None


def _opened(path: Path) -> Capture:
    from leakscope.capture import Capture

    try:
        return Capture.open(path)
    except BadInputError as error:
        raise BadInputError(f"{error}; nor is it a report that 'leakscope import' knows") from None
