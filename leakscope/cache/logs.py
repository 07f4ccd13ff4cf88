"""Logs of cache consistency as JSON lines: which of the forms a file has, and its columns.

| form | fields | what it tells |
|---|---|---|
| versions | ``op_id, rank, cache_version`` | the version of the cache that each rank took part in a collective with |
| streams | ``ts_ns, op, block, stream`` | reads of blocks on GPU streams, and who gave the blocks away |
| protocol | ``ts_ns, node, op, incarnation, seq, block, version`` | messages of a block-version protocol |
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from leakscope.errors import BadInputError
from nsight_parsers import ReportError
from nsight_parsers.delimited import read_json_lines

FORMS: dict[str, tuple[str, ...]] = {
    "versions": ("op_id", "rank", "cache_version"),
    "protocol": ("ts_ns", "node", "op", "incarnation", "seq", "block", "version"),
    "streams": ("ts_ns", "op", "block", "stream"),
}
NUMBERS = ("ts_ns", "incarnation", "seq", "version")
_ALL = sorted({name for names in FORMS.values() for name in names})


def read_log(path: Path) -> tuple[str, pd.DataFrame, int]:
    """(form, its columns, lines left out). Numbers are Int64 with NA where missing, all else text.

    Raises BadInputError for a file of no form.
    """
    try:
        table, torn = read_json_lines(path, _ALL)
    except ReportError as error:
        raise BadInputError(str(error)) from error
    given = {name for name in _ALL if table[name].null_count < table.num_rows}
    form = next((form for form, names in FORMS.items() if given.issuperset(names)), None)
    if form is None:
        forms = "; ".join(f"{form}: {', '.join(names)}" for form, names in FORMS.items())
        raise BadInputError(f"{path}: its lines are no consistency log; needs the fields of one of: {forms}")
    names = FORMS[form]
    frame = table.select(list(names)).to_pandas()
    for name in set(names) & set(NUMBERS):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        frame[name] = numbers.where(np.isfinite(numbers.astype(float))).astype("Int64")
    needed = [name for name in names if name not in ("block", "version", "incarnation", "seq")]
    whole = frame.dropna(subset=needed).reset_index(drop=True)
    return form, whole, torn + len(frame) - len(whole)
