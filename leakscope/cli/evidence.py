"""Opens what verbs take as EVIDENCE: captures, files that import knows, live sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakscope.cli.live import collect_sources, split_evidence
from leakscope.errors import BadInputError

if TYPE_CHECKING:
    import duckdb

    from leakscope.model.manifest import Manifest


@contextmanager
def opened_evidence(
    evidence: Sequence[str | Path], memory: str, duration_s: float | None = None, pool_blocks: int | None = None
) -> Iterator[tuple[list[tuple[duckdb.DuckDBPyConnection, Manifest]], list[dict[str, Any]]]]:
    """(a connection and the manifest of each capture, what to say of the inputs), open until the block ends.

    Files of other tools and live sources go together into a capture for this once, the last one. Raises BadInputError
    for evidence that cannot be read, and for data in it that a query cannot compute with.
    """
    import secrets

    import duckdb

    from leakscope.capture import Capture
    from leakscope.capture.reader import scratch_directory
    from leakscope.ingest import Options, import_files, kind_of

    addresses, given = split_evidence(evidence)
    missing = next((path for path in given if not path.exists()), None)
    if missing is not None:
        raise BadInputError(f"{missing}: no such file or capture")
    files = [path for path in given if kind_of(path) is not None]
    paths = [path for path in given if path not in files]
    captures = [_opened(path) for path in paths]
    inputs: list[dict[str, Any]] = [
        {"path": str(path), "kind": "capture", "problems": capture.problems}
        for path, capture in zip(paths, captures, strict=True)
    ]
    if files or addresses:
        scratch = Path(scratch_directory()) / f"imported-{secrets.token_hex(4)}.lscope"
        imported = collect_sources(addresses, scratch, duration_s)
        imported += import_files(files, scratch, Options(pool_blocks=pool_blocks)) if files else []
        inputs += [file.to_json() for file in imported]
        captures.append(Capture.open(scratch))
    try:
        with ExitStack() as stack:
            yield [(stack.enter_context(c.connect(memory_limit=memory)), c.manifest) for c in captures], inputs
    except duckdb.Error as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{', '.join(map(str, evidence))}: cannot be analysed: {line}") from None


def _opened(path: Path) -> Any:
    from leakscope.capture import Capture

    try:
        return Capture.open(path)
    except BadInputError as error:
        raise BadInputError(f"{error}; nor is it a report that 'leakscope import' knows") from None
