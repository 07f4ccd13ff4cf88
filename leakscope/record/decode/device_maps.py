"""Where physical device memory is mapped: cuMemMap and cuMemUnmap of a batch → `device_maps`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from leakscope.model.tables import DEVICE_MAPS
from leakscope.record.probes import functions
from leakscope.record.probes.functions import FUNCTIONS

_ROLES = np.array([probe.role for probe in FUNCTIONS], np.int16)


def device_maps(called: np.ndarray, source_id: int) -> pa.Table:
    """Rows of the successful calls among CALL_RECORDs of functions. A map has its handle in ``arg1``."""
    roles = _ROLES[called["function"]]
    done = called[np.isin(roles, (functions.HANDLE_MAP, functions.HANDLE_UNMAP)) & (called["result"] == 0)]
    mapped = _ROLES[done["function"]] == functions.HANDLE_MAP
    columns = {
        "source_id": np.full(len(done), source_id),
        "ts_ns": done["exit_ns"],
        "pid": done["pid"],
        "op": pa.DictionaryArray.from_arrays(pa.array((~mapped).astype(np.int16)), pa.array(["map", "unmap"])),
        "addr": done["addr"],
        "size_bytes": done["size_bytes"],
        "handle": np.where(mapped, done["arg1"], 0),
    }
    arrays = [
        columns[f.name] if f.name == "op" else pa.array(columns[f.name].astype(f.type.to_pandas_dtype()))
        for f in DEVICE_MAPS
    ]
    return pa.Table.from_arrays(arrays, schema=DEVICE_MAPS)
