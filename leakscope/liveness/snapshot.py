"""The part of the graph that an allocator's snapshot tells: segments, their blocks, and the stacks that hold them.

Who references a tensor is not in a snapshot; which stack allocated its block is, so that stands for the holder. A block
in use keeps its whole segment, and with it the free pieces that no other size fits: they are what fragmentation costs,
and part of what the stack retains. Segments without a block in use are kept by the allocator alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from leakscope.correlate.stacks import Stacks
from leakscope.correlate.wrappers import culprit
from leakscope.liveness.classes import IDLE_CACHED, UNKNOWN_REF, ZOMBIE
from leakscope.liveness.graph import GraphBuilder
from leakscope.model.liveness import Pool
from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb

CLASS_OF = {"inactive": IDLE_CACHED, "active_allocated": UNKNOWN_REF}
"""Other states wait: freed by the program, but work on a stream may still use them."""
UNKNOWN_STACK = "allocations without a recorded stack"


@dataclass(frozen=True)
class Snapshot:
    """What was added of one source: its block nodes, their names, classes, bytes and births (0 = not known), figures by
    device and pool."""

    at_ns: int
    names: list[str]
    born_ns: np.ndarray
    nodes: np.ndarray
    classes: np.ndarray
    sizes: np.ndarray
    pools: tuple[Pool, ...]


def snapshot_sources(con: duckdb.DuckDBPyConnection) -> set[int]:
    """Sources with segments."""
    return {int(row[0]) for row in con.execute("SELECT DISTINCT source_id FROM segments").fetchall()}


def add_snapshot(builder: GraphBuilder, con: duckdb.DuckDBPyConnection, source: Source, number: int) -> Snapshot:
    """Add the segments and blocks of one source, which has some."""
    blocks = con.execute(
        """
        SELECT ts_ns, pid, device, segment_addr, segment_bytes, segment_type::VARCHAR AS segment_type,
               pool::VARCHAR AS pool, addr, size_bytes, state::VARCHAR AS state, user_stack, python_stack
        FROM segments WHERE source_id = ? ORDER BY device, segment_addr, addr
        """,
        [source.id],
    ).df()
    segments = blocks.drop_duplicates(["device", "segment_addr"]).reset_index(drop=True)
    of_block = blocks.groupby(["device", "segment_addr"], sort=True).ngroup().to_numpy(np.int64)
    segment_nodes = builder.add_nodes(
        "segment",
        [
            f"segment {r['segment_addr']:#x}, {r['segment_type']}, device {r['device']}"
            for r in segments.to_dict("records")
        ],
        source=number,
        objects=1,
    )
    cls = blocks["state"].map(CLASS_OF).fillna(ZOMBIE).to_numpy(np.int8)
    sizes = blocks["size_bytes"].to_numpy(np.int64)
    names = [f"block {addr:#x}, {state}" for addr, state in zip(blocks["addr"].tolist(), blocks["state"], strict=True)]
    born_ns = _births(con, source, blocks)
    nodes = builder.add_nodes(
        "block",
        names,
        source=number,
        cls=cls,
        objects=1,
        bytes=sizes,
        since_ns=born_ns,
        stack=blocks["python_stack"].where(blocks["python_stack"] > 0, blocks["user_stack"]).to_numpy(np.int64),
    )
    free = blocks["state"].to_numpy() == "inactive"
    in_segment = segment_nodes[of_block]
    builder.add_edges("occupies", nodes[~free], in_segment[~free])
    builder.add_edges("contains", in_segment[free], nodes[free])
    partly_used = np.bincount(of_block[~free], minlength=len(segments)) > 0
    _add_holders(builder, con, number, blocks, nodes, cls)
    whole = np.flatnonzero(~partly_used)
    if len(whole):
        pool = builder.add_nodes(
            "cache", [f"caching allocator of {source.name}: segments without a block in use"], source=number
        )
        builder.add_edges("caches", np.repeat(pool, len(whole)), segment_nodes[whole])
    pools = _pools(source.name, blocks, segments, free, partly_used[of_block])
    return Snapshot(int(blocks["ts_ns"].max()), names, born_ns, nodes, cls, sizes, pools)


def _births(con: duckdb.DuckDBPyConnection, source: Source, blocks: pd.DataFrame) -> np.ndarray:
    """When each block in use was allocated, as far as the snapshot's own trace goes back; 0 = before it."""
    born = con.execute(
        """
        SELECT addr, max(ts_ns) FILTER (op = 'alloc') AS born FROM mem_events
        WHERE source_id = ? AND kind = 'pool_block' GROUP BY addr
        HAVING born >= coalesce(max(ts_ns) FILTER (op = 'free'), 0)
        """,
        [source.id],
    ).df()
    alive = born.set_index("addr")["born"]
    found = blocks["addr"].map(alive).fillna(0).to_numpy(np.int64)
    return np.where(blocks["state"].to_numpy() == "inactive", 0, found)


def _add_holders(
    builder: GraphBuilder,
    con: duckdb.DuckDBPyConnection,
    number: int,
    blocks: pd.DataFrame,
    nodes: np.ndarray,
    cls: np.ndarray,
) -> None:
    """A holder for each stack that allocated blocks in use, one for the streams that blocks wait for."""
    used = blocks.assign(node=nodes)[cls == UNKNOWN_REF]
    stacks = Stacks(con, [*used["user_stack"].unique(), *used["python_stack"].unique()])
    for _, rows in used.groupby(["user_stack", "python_stack"], sort=True):
        user, python = int(rows["user_stack"].iloc[0]), int(rows["python_stack"].iloc[0])
        found = culprit([] if python else stacks[user], stacks[python], [])  # native frames of PyTorch name nobody
        name = f"tensors of {found.text}" if found else UNKNOWN_STACK
        holder = builder.add_nodes("holder", [name], source=number, stack=int(python or user))
        _hold(builder, holder, rows["node"].to_numpy(), int(python or user))
    waiting = nodes[cls == ZOMBIE]
    if len(waiting):
        streams = builder.add_nodes("holder", ["work on other streams that is not done"], source=number)
        _hold(builder, streams, waiting, 0)


def _hold(builder: GraphBuilder, holder: np.ndarray, nodes: np.ndarray, stack: int) -> None:
    builder.add_edges("holds", np.repeat(holder, len(nodes)), nodes, stack=stack)


def _pools(
    source: str, blocks: pd.DataFrame, segments: pd.DataFrame, free: np.ndarray, in_partly_used: np.ndarray
) -> tuple[Pool, ...]:
    """Figures of each device and pool."""
    size = blocks["size_bytes"]
    rows = blocks.assign(
        active=size.where(blocks["state"] == "active_allocated", 0),
        free=size.where(free, 0),
        split=size.where(free & in_partly_used, 0),
    )
    rows["pending"] = size - rows["active"] - rows["free"]
    key = ["device", "pool"]
    sums = rows.groupby(key, sort=True).agg(
        blocks=("addr", "size"), active=("active", "sum"), pending=("pending", "sum"), free=("free", "sum"),
        split=("split", "sum"), largest=("free", "max"),
    )  # fmt: skip
    reserved = segments.groupby(key, sort=True)["segment_bytes"].agg(["sum", "size"])
    pools = []
    for (device, pool), row in zip(sums.index.tolist(), sums.to_dict("records"), strict=True):
        pools.append(
            Pool(
                source,
                int(device),
                str(pool),
                segments=int(reserved.loc[(device, pool), "size"]),
                blocks=int(row["blocks"]),
                reserved_bytes=int(reserved.loc[(device, pool), "sum"]),
                active_bytes=int(row["active"]),
                pending_bytes=int(row["pending"]),
                free_bytes=int(row["free"]),
                free_split_bytes=int(row["split"]),
                largest_free_bytes=int(row["largest"]),
            )
        )
    return tuple(pools)
