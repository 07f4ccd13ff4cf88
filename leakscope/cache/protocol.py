"""A block-version protocol checked on its event log: what replicas did with loss, reordering and restarts.

Ops: ``send`` (the owner: seq without holes within an incarnation), ``receive`` (a message reached a replica), ``apply``
(it took it in), ``read`` (it answered with ``version``; none, or ``unknown``, where it said that it does not know) and
``snapshot`` (it took the whole state before ``seq``). Loss, reordering and repetition by the network are counted and
are no fault; a replica that takes a message out of its turn, or answers with something old, is one.
"""

from __future__ import annotations

import pandas as pd

from leakscope.cache.inconsistency import Checked, Inconsistency

OPS = ("send", "receive", "apply", "read", "snapshot")


def check_protocol(path: str, log: pd.DataFrame, left_out: int = 0) -> Checked:
    """Breaches of the (incarnation, sequence) rules.

    ``log``: ts_ns, incarnation, seq, version Int64, node, op, block text.
    """
    rows = log[log["op"].isin(OPS)].sort_values("ts_ns", kind="stable", ignore_index=True)
    sent, received = rows[rows["op"] == "send"], rows[rows["op"] == "receive"]
    applied = rows[rows["op"].isin(["apply", "snapshot"])].dropna(subset=["incarnation", "seq"])
    found = [*_sends(sent), *_applied(applied), *_reads(rows)]
    messages = received.drop_duplicates(["node", "incarnation", "seq"])
    highest = messages.groupby(["node", "incarnation"])["seq"].cummax()
    numbers = sent.drop_duplicates(["incarnation", "seq"])
    lost = numbers[["incarnation", "seq"]].merge(messages[["node"]].drop_duplicates(), how="cross")
    lost = lost.merge(messages[["node", "incarnation", "seq"]], how="left", indicator=True)
    facts = {
        "sent": len(numbers),
        "received": len(messages),
        "lost": int((lost["_merge"] == "left_only").sum()),
        "repeated": len(received) - len(messages),
        "reordered": int((messages["seq"] < highest).sum()),
        "incarnations": int(rows["incarnation"].nunique()),
        "left out": left_out + len(log) - len(rows),
    }
    return Checked("block versions", (path,), facts, tuple(found))


def _sends(sent: pd.DataFrame) -> list[Inconsistency]:
    found = []
    messages = sent.drop_duplicates(["node", "incarnation", "seq"])
    step = messages.groupby(["node", "incarnation"])["seq"].diff()
    found += _first("hole in the owner's sequence", messages[(step != 1).fillna(False) & step.notna()],
                    "the owner sent a number that does not follow the one before")  # fmt: skip
    versions = sent.dropna(subset=["version", "block"])
    step = versions.groupby(["node", "incarnation", "block"])["version"].diff()
    back = versions[(step <= 0).fillna(False) & (versions["version"] > 0).fillna(False)]
    found += _first("version went back", back, "the owner sent a version that is not above the one before")
    return found


def _applied(applied: pd.DataFrame) -> list[Inconsistency]:
    """Breaches in what replicas took in; rows of one message (several blocks) are one."""
    messages = applied.drop_duplicates(["node", "op", "incarnation", "seq", "ts_ns"])
    by_node = messages.groupby("node")
    before = by_node[["incarnation", "seq", "op"]].shift(1)
    same = (messages["incarnation"] == before["incarnation"]).fillna(False)
    step = messages["seq"] - before["seq"]
    # after a snapshot before number n, n is the next
    expected = before["op"].map({"snapshot": 0}).fillna(1).where(before["op"].notna())
    normal = (messages["op"] == "apply") & same
    older = (messages["incarnation"] < by_node["incarnation"].cummax()).fillna(False)
    begins = (messages["op"] == "apply") & ~same & before["op"].notna() & ~older & (messages["seq"] > 0).fillna(False)
    return [
        *_first("loss not noticed", messages[normal & (step > expected).fillna(False)],
                "a replica applied a message although one before it was missing"),
        *_first("applied twice or late", messages[normal & (step < expected).fillna(False)],
                "a replica applied a message that it had, or that was older than one it had"),
        *_first("older incarnation applied", messages[(messages["op"] == "apply") & older],
                "a replica applied a message from before the owner's restart"),
        *_first("restart not noticed", messages[begins],
                "a replica went on into a new incarnation in its middle, without a snapshot"),
    ]  # fmt: skip


def _reads(rows: pd.DataFrame) -> list[Inconsistency]:
    """Answers that are not what the replica last applied of the block."""
    marked = rows[rows["op"].isin(["apply", "snapshot", "read"])].copy()
    # a snapshot and a new incarnation replace all that was applied before: what they do not name is not known
    begins = (marked["op"] == "snapshot") & ~marked.duplicated(["node", "op", "ts_ns", "incarnation", "seq"])
    marked["state"] = begins.groupby(marked["node"]).cumsum()
    marked = marked.dropna(subset=["block"])
    marked["applied"] = marked["version"].where(marked["op"] != "read")
    marked["life"] = marked.groupby("node")["incarnation"].ffill()
    marked["latest"] = marked.groupby(["node", "life", "state", "block"])["applied"].ffill()
    reads = marked[(marked["op"] == "read") & marked["version"].notna() & marked["latest"].notna()]
    stale = reads[(reads["version"] != reads["latest"]).fillna(False)]
    return _first("stale answer", stale, "a replica answered with a version that is not the one it had applied")


def _first(kind: str, rows: pd.DataFrame, what: str) -> list[Inconsistency]:
    if rows.empty:
        return []
    row = rows.iloc[0]
    names = {"incarnation": "incarnation", "seq": "message", "block": "block", "version": "version"}
    parts = [f"{word} {row[name]}" for name, word in names.items() if pd.notna(row[name])]
    where = f"node {row['node']} at {row['ts_ns']} ns"
    return [Inconsistency(kind, where, what, {f"node {row['node']}": f"{row['op']} of {', '.join(parts)}"}, len(rows))]
