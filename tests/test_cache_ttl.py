"""Lifetimes of cache objects from event logs; those of a real Redis are in test_redis_audit.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from leakscope.cache.ttl import cleaning, lifetimes
from leakscope.cli.cache import cache as app
from leakscope.cli.evidence import opened_evidence

DAY_NS = 86_400 * 10**9
START_NS = 10**9


def log(path: Path) -> Path:
    """Ten days: sessions without a TTL of which three are used again, prompts with one, others untold."""
    rows: list[dict[str, Any]] = []
    for number in range(10):
        born = {"ts_ns": START_NS + number, "op": "insert", "obj": f"session:{number}", "size": 1000}
        rows.append(born | {"owner": "sessions", "ttl_ns": -1})
    for number in range(4):
        born = {"ts_ns": START_NS + 100 + number, "op": "insert", "obj": f"prompt:{number}", "size": 50}
        rows.append(born | {"owner": "prompts", "ttl_ns": (number + 1) * 3 * DAY_NS})
    rows.append({"ts_ns": START_NS + 200, "op": "insert", "obj": "plain", "size": 7, "owner": "prompts"})
    for number in range(3):
        at = {"ts_ns": START_NS + 4 * DAY_NS + number, "obj": f"session:{number}", "owner": "sessions"}
        rows += [at | {"op": "ref"}, at | {"op": "unref"}]
    rows.append({"ts_ns": START_NS + 5 * DAY_NS, "op": "evict", "obj": "session:9"})
    rows.append({"ts_ns": START_NS + 10 * DAY_NS, "op": "insert", "obj": "last", "size": 1, "owner": "prompts"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_has_no_ttl_and_what_is_past_it(tmp_path: Path) -> None:
    with opened_evidence([log(tmp_path / "events.jsonl")], "1GiB") as (captures, _):
        (found,) = lifetimes(captures)
    assert found.all_keys.keys.value == 15 and found.all_keys.bytes.value == 9 * 1000 + 4 * 50 + 7 + 1
    assert found.all_keys.without_ttl.value == 9 and found.all_keys.without_ttl_bytes.value == 9000
    # three were used four days in, which is six days before the end
    assert (found.all_keys.stale.value, found.all_keys.stale_bytes.value) == (6, 6000)
    assert (found.unknown, found.past, found.past_bytes) == (2, 3, 150)
    assert [(group.pattern, group.stale.value) for group in found.groups] == [("sessions", 6), ("prompts", 0)]
    assert found.groups[0].idle_s > 9.9 * 86_400
    assert cleaning(found)[0] == "# sessions: 6 objects, 6,000 B without a TTL and idle for 7 days or more"


def test_the_command(tmp_path: Path) -> None:
    path = str(log(tmp_path / "events.jsonl"))
    text = CliRunner().invoke(app, ["ttl", path, "--plan"])
    assert text.exit_code == 0
    assert "no TTL: 9 (97.7% of the bytes), of these idle for 7 days: 6, 6,000 B" in text.output
    assert "3 (20.00% of the objects, 150 B)" in text.output and "# nothing of this was done" in text.output
    body = json.loads(CliRunner().invoke(app, ["ttl", path, "--json"]).output)
    assert body["sources"][0]["past_ttl_share"] == 0.2 and "plan" not in body


def test_a_store_is_cleaned_without_keys_and_del() -> None:
    from leakscope.cache.ttl import Lifetimes
    from leakscope.model.stores import Figure, KeyGroup

    group = KeyGroup("a'b:{number}:x*", *([Figure(3)] * 6), idle_s=9e5)
    found = Lifetimes("redis://h", "redis", group, (group,), 0, 0)
    _, command = cleaning(found)
    assert command.startswith("redis-cli --scan --pattern 'a?b:*:x\\*' | while")
    assert "UNLINK" in command and "KEYS" not in command and "DEL" not in command and "-ge 604800" in command
