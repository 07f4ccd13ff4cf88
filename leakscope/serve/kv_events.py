"""The KV events of an inference engine as a source: a subscription that stays, and what its events say so far."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from leakscope.detect.kv_cache import GPU, pool_of
from leakscope.errors import BadInputError, LeakscopeError
from leakscope.report.export.metrics import Metric
from leakscope.report.text import printable
from leakscope.serve.source import count, gauge
from leakscope.streams.address import Address
from leakscope.streams.clock import Deadline
from leakscope.streams.kv_subscriber import KvSubscriber

FOREVER_S = 10 * 365 * 86_400.0
MAX_ROWS = 2_000_000
"""Of events that are kept; with more the book begins anew, as after a restart of the engine."""
MAX_POOLS = 64


class _Subscription(KvSubscriber):
    """A subscriber whose book can be read while it goes on."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.lock = threading.Lock()

    def _enter(self, context: Any, parts: list[bytes]) -> None:
        with self.lock:
            super()._enter(context, parts)


class KvEvents:
    """One publisher of KV events (vLLM, SGLang)."""

    kind = "kv_events"

    def __init__(self, address: Address, every_s: float) -> None:
        """Raises BadInputError for an address or an option that is wrong."""
        self.name, self.every_s = printable(address.shown), every_s
        self._address = address
        self._current = _Subscription(address)
        self._deadline: Deadline | None = None
        self._thread: threading.Thread | None = None
        self._error: str = ""
        self._repeated: float | None = None  # blocks
        self._block_tokens = 0
        self._before: dict[str, int] = {}  # counts of earlier books

    def repeated_tokens(self) -> float | None:
        """Tokens of blocks that were stored although they had been there before; None before any event."""
        return None if self._repeated is None else self._repeated * self._block_tokens

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        if self._thread is None or not self._thread.is_alive():
            self._subscribe()
        current = self._current
        with current.lock:
            book = current.book
            table = book.tables().get("cache_events")
            facts = book.facts()
            undecodable = book.undecodable
        if table is not None and table.num_rows > MAX_ROWS:
            self._close_book(facts)
        self._block_tokens = int(facts["block_tokens"]) or self._block_tokens
        name = (self.name,)
        metrics = [
            count("kv.batches", "Batches of KV events.", [(name, self._total("batches", facts))]),
            count("kv.missing.batches", "Batches that never came.", [(name, self._total("missing_batches", facts))]),
            count("kv.restarts", "Restarts of the publisher.", [(name, self._total("restarts", facts))]),
            count("kv.undecodable", "Batches and events of no known form.", [(name, float(undecodable))]),
        ]
        return [*metrics, *(self._pools(table, facts) if table is not None else [])]

    def close(self) -> None:
        """See :class:`Source`."""
        if self._deadline is not None:
            self._deadline.stop()
        if self._thread is not None:
            self._thread.join(1.0)

    def _subscribe(self) -> None:
        """Raises BadInputError where nobody listens; what ended the last subscription, once."""
        if self._error:
            error, self._error, self._thread = self._error, "", None
            raise BadInputError(error)
        if self._thread is not None:  # ended: what its book had is no longer whole
            self._close_book(self._current.book.facts())
            return
        self._current.check()
        self._deadline = deadline = Deadline(FOREVER_S)
        current = self._current

        def run() -> None:
            try:
                current.collect(deadline)
            except LeakscopeError as error:
                self._error = str(error)
            except Exception as error:
                self._error = f"{self.name}: {type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="kv-events", daemon=True)
        self._thread.start()

    def _close_book(self, facts: dict[str, Any]) -> None:
        for what in ("batches", "missing_batches", "restarts"):
            self._before[what] = int(self._total(what, facts))
        if self._deadline is not None:
            self._deadline.stop()
        if self._thread is not None:
            self._thread.join(1.0)
        self._thread, self._repeated = None, None
        self._current = _Subscription(self._address)
        self._subscribe()

    def _total(self, what: str, facts: dict[str, Any]) -> float:
        return float(self._before.get(what, 0) + int(facts[what]))

    def _pools(self, table: pa.Table, facts: dict[str, Any]) -> list[Metric]:
        rows = table.select(["ts_ns", "op", "object", "parent", "medium"]).to_pandas()
        rows["op"], rows["medium"] = rows["op"].astype(str), rows["medium"].astype(str)
        self._repeated = float(stored_again(rows))
        media = [m for m in rows["medium"].unique() if m == GPU or m.startswith(f"{GPU}:")][:MAX_POOLS]
        pools = [
            pool_of(
                rows[(rows["medium"] == m) | ((rows["medium"] == "") & rows["op"].isin(("gap", "clear")))].reset_index(
                    drop=True
                ),
                m,
                self._current.pool_blocks,
                facts["windowed_groups"],
            )
            for m in media
        ]
        keyed = [((self.name, f"{number}"), pool) for number, pool in enumerate(pools)]
        enough = [(key, pool) for key, pool in keyed if pool.turnover >= 1]
        return [
            gauge("kv.blocks.cached", "1", "Blocks that are cached.", [(k, float(p.cached)) for k, p in keyed], "pool"),
            gauge(
                "kv.turnover.ratio", "1", "How often the pool was turned over since its events are whole.",
                [(k, p.turnover) for k, p in keyed], "pool",
            ),
            gauge(
                "kv.blocks.held", "1",
                "Blocks that outlived a whole turnover of their pool unused; absent before one turnover.",
                [(k, float(len(p.held))) for k, p in enough], "pool",
            ),
            count(
                "kv.blocks.stored.again", "Blocks that were stored although they had been there before.",
                [((self.name,), self._repeated)],
            ),
        ]  # fmt: skip


def stored_again(rows: pd.DataFrame) -> int:
    """How many blocks were stored after an eviction: rows of op and object, in the order of the events. Where all is
    cleared, all of it had been there before too."""
    known = rows[rows["op"].isin(("insert", "evict"))]
    codes, _ = pd.factorize(known["object"])
    order = np.argsort(codes, kind="stable")
    of, inserted = codes[order], (known["op"] == "insert").to_numpy()[order]
    return int((inserted[1:] & ~inserted[:-1] & (of[1:] == of[:-1])).sum())
