"""Cache keys: what is normalised and what is not, which part makes too many keys, chances of collisions, hashes."""

from __future__ import annotations

import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.cache.hashes import fnv1a_64, made_keys, measure, murmur3_32, sha256_64
from leakscope.cache.keys import cache_key, collisions, explosion, normalised, read_requests
from leakscope.cli.main import main
from leakscope.errors import BadInputError

TEXTS = st.text(st.sampled_from(" \t\r\nabé\u0301e"), max_size=12)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("caf\u00e9", "cafe\u0301", True),
        ("a\r\nb", "a\nb", True),
        ("a  \nb\n\n", "a\nb", True),
        ("if x:\n    y", "if x:\n  y", False),  # white space inside is meaning
        (" a", "a", False),
        ("a b", "a  b", False),
        ("A", "a", False),
    ],
)
def test_only_what_cannot_change_a_meaning_is_normalised(one: str, other: str, same: bool) -> None:
    assert (cache_key({"prompt": one}) == cache_key({"prompt": other})) == same
    assert (cache_key({"messages": [{"text": one}]}) == cache_key({"messages": [{"text": other}]})) == same


@given(TEXTS)
def test_normalising_twice_is_normalising_once(text: str) -> None:
    for collapse in (False, True):
        once = normalised(text, collapse=collapse)
        assert normalised(once, collapse=collapse) == once
    assert len(normalised(text, collapse=True).split()) == len(normalised(text).split())


def test_keys_are_sha256_of_canonical_json() -> None:
    assert cache_key({"b": 1, "a": "x"}) == cache_key({"a": "x", "b": 1})
    assert cache_key({"a": "x"}) == hashlib.sha256(b'{"a":"x"}').hexdigest()
    different = [{"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": True}, {"a": None}, {}, {"a": [1]}, {"a": {"b": 1}}, {"b": 1}]
    assert len({cache_key(request) for request in different}) == len(different)


def requests_of(count: int) -> list[dict[str, object]]:
    """12 prompts, 3 models, and a time that is new each time."""
    return [
        {
            "model": f"m{number % 3}",
            "prompt": f"prompt {number % 4}" + ("  " if number % 2 else ""),
            "temperature": 0.5,
            "timestamp": number,
        }
        for number in range(count)
    ]


def test_the_part_that_makes_the_keys_is_named() -> None:
    found = explosion(requests_of(120))

    assert (found.requests, found.keys, found.prompts, found.reuse) == (120, 120, 4, 0)
    assert found.prompt_parts == ("prompt",)
    table = [(c.name, c.values, c.keys_without, c.factor) for c in found.components]
    assert table == [
        ("timestamp", 120, 12, 10.0), ("model", 3, 120, 1.0), ("prompt", 4, 120, 1.0), ("temperature", 1, 120, 1.0),
    ]  # fmt: skip
    assert (found.changed_by_normalising, found.keys_unnormalised, found.collapsed) == (60, 120, 120)
    healthy = explosion([{k: v for k, v in request.items() if k != "timestamp"} for request in requests_of(120)])
    assert (healthy.keys, healthy.reuse) == (12, 0.9)
    assert [(c.name, c.factor) for c in healthy.components] == [("prompt", 4.0), ("model", 3.0), ("temperature", 1.0)]


def test_what_collapsing_white_space_would_merge() -> None:
    found = explosion([{"prompt": "a b"}, {"prompt": "a  b"}, {"prompt": "a\nb"}, {"prompt": "ab"}])
    assert (found.keys, found.collapsed) == (4, 2)


def test_parts_that_are_missing_are_parts_too() -> None:
    found = explosion([{"a": 1}, {"a": 1, "b": None}, {"a": 1, "b": 2}])
    assert (found.keys, [(c.name, c.values, c.keys_without) for c in found.components]) == (
        3,
        [("b", 2, 1), ("a", 1, 3)],
    )


@given(st.integers(1, 60), st.integers(1, 10**6))
def test_chances_are_those_of_the_formulas(keys: int, slots: int) -> None:
    *_, table = collisions(keys, buckets=slots)
    exact = 1 - (1 - Fraction(1, slots)) ** (keys - 1)
    assert table.shares_slot == pytest.approx(float(exact), rel=1e-9, abs=1e-300)
    assert table.expected_pairs == pytest.approx(keys * (keys - 1) / 2 / slots)
    assert table.any_collision == pytest.approx(1 - math.exp(-table.expected_pairs), rel=1e-6, abs=1e-12)


def test_chances_that_are_quoted() -> None:
    by_name = {row.name: row for row in collisions(10**8)}
    assert by_name["64 bits"].any_collision == pytest.approx(2.7e-4, rel=0.01)
    assert {r.name: r for r in collisions(10**9)}["64 bits"].any_collision == pytest.approx(0.027, rel=0.02)
    assert {r.name: r for r in collisions(5_056_937_541)}["64 bits"].any_collision == pytest.approx(0.5, rel=0.01)
    assert {r.name: r for r in collisions(10**12)}["128 bits"].any_collision == pytest.approx(1.5e-15, rel=0.03)
    assert {r.name: r for r in collisions(10**5)}["64 bits"].any_collision == pytest.approx(2.7e-10, rel=0.01)
    assert collisions(100_000, buckets=1 << 20)[-1].shares_slot == pytest.approx(0.0909603, rel=1e-6)


def test_hash_functions_give_the_published_values() -> None:
    assert [murmur3_32(b""), murmur3_32(b"", 1), murmur3_32(b"hello")] == [0, 0x514E28B7, 0x248BFA47]
    assert [fnv1a_64(b""), fnv1a_64(b"a")] == [0xCBF29CE484222325, 0xAF63DC4C8601EC8C]
    assert fnv1a_64(b"foobar") == 0x85944171F73967E8
    assert sha256_64(b"abc") == 0xBA7816BF8F01CFEA


def test_good_hashes_share_buckets_alike() -> None:
    rows = measure(made_keys(20_000), 1 << 16)
    assert [row.name for row in rows] == ["murmur3", "FNV-1a", "SHA-256 cut to 64 bits", "BLAKE2b of 128 bits"]
    for row in rows:
        assert row.sharing == pytest.approx(row.expected, rel=0.05) and row.per_second > 0
        assert row.equal_hashes == 0
    assert rows[0].expected == pytest.approx(1 - (1 - 2**-16) ** 19_999)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["cache", "keys", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_names_the_part_and_no_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests_of(120)) + "noise\n[1]\n")

    code, out, err = run(capsys, str(path), "--buckets", "1000")

    said = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, err) == (0, "") and "prompt 1" not in out
    assert any(line.endswith("120 requests make 120 keys (0.0% could be hits)") for line in said)
    assert "2 lines are no requests and are left out" in said
    assert "30.00 keys for each of 4 different prompts" in said
    assert any(line.startswith("timestamp: 120 values make 10.0 keys out of each") for line in said)
    assert not any(line.startswith("model:") for line in said)
    assert "timestamp 120 12 10.00" in said
    assert "1,000 buckets 0.11 1 7.1" in said

    code, out, _ = run(capsys, str(path), "--json")
    found = json.loads(out)
    assert (code, found["requests"]["keys"], found["requests"]["components"][0]["name"]) == (0, 120, "timestamp")
    assert found["collisions"][1]["keys"] == 120 and found["hashes"] == []


def test_the_command_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--count", "1000000000", "--measure", "--json")
    found = json.loads(out)
    assert (code, found["requests"], len(found["hashes"])) == (0, None, 4)
    assert found["collisions"][1]["any_collision"] == pytest.approx(0.0267, rel=0.01)
    assert {row["buckets"] for row in found["hashes"]} == {1 << 20}


def test_hostile_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"\x1b[31mred\x07": number, "\ud800": 1}) + "\n" for number in range(3)))
    code, out, _ = run(capsys, str(path))
    assert code == 0 and "\x1b" not in out and "\\x1b[31mred\\x07" in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no line is a request"),
        (b"{}\n", "no line is a request"),
        (b"\xff\xfe{\n", "no line is a request"),
        (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}\n", "no line is a request"),
        (b'{"a":' + b"[" * 200_000 + b"\n", "no line is a request"),
        (b"{" + b",".join(b'"k%d":1' % number for number in range(65)) + b"}\n", "65 different names"),
    ],
)
def test_what_are_no_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=says):
        read_requests(path)
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "") and err.count("\n") == 1
