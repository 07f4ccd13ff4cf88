"""Consistency of caches over ranks, streams and replicas: each file goes to the check that its content is for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leakscope.cache.dirty_reads import dirty_reads
from leakscope.cache.drift import metadata_drift
from leakscope.cache.flight_recorder import compare, is_dump, read_dump
from leakscope.cache.inconsistency import Checked
from leakscope.cache.logs import read_log
from leakscope.cache.protocol import check_protocol
from leakscope.errors import BadInputError

CHECKS = {"versions": metadata_drift, "streams": dirty_reads, "protocol": check_protocol}
START_BYTES = 64 << 10


def check_consistency(paths: Sequence[Path]) -> list[Checked]:
    """Flight Recorder dumps are compared with one another, each log is checked by itself. Raises BadInputError."""
    dumps: list[Path] = []
    logs: list[Path] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                (dumps if is_dump(file.read(START_BYTES)) else logs).append(path)
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    done = [compare([read_dump(path, order) for order, path in enumerate(dumps)])] if dumps else []
    for path in logs:
        form, log, left_out = read_log(path)
        done.append(CHECKS[form](str(path), log, left_out))
    return done
