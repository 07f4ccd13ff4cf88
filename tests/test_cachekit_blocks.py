"""The block table over a network that loses, doubles and reorders messages, with restarts of the owner (hypothesis)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from leakscope.cachekit import Block, BlockReplica, BlockTable, EventLog, Message, Outcome
from leakscope.cachekit.blocks import ABSENT, LAST_VERSION, Kind

BLOCKS = st.lists(st.integers(0, 4), min_size=1, max_size=3)
WHICH = st.integers(0, 1_000_000)


class Network(RuleBasedStateMachine):
    """An owner that restarts, a replica with a small buffer, and messages under way between them.

    ``truth`` is what the owner's table was before each of its messages, by (incarnation, sequence).
    """

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[bytes] = []
        self.replica = BlockReplica(kept_back=3)
        self.incarnation = 0
        self.truth: dict[tuple[int, int], dict[int, int]] = {}
        self.ever: set[tuple[int, int, int]] = set()  # (incarnation, block, version) that meant some content
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.now: dict[int, int] = {}
        self.table = BlockTable(
            lambda message: self.under_way.append(message.pack()), incarnation=self.incarnation, replayed=4
        )
        self.note()

    def note(self) -> None:
        self.truth[self.table.incarnation, self.table.sequence] = dict(self.now)

    @rule(blocks=BLOCKS)
    def change(self, blocks: list[int]) -> None:
        message = self.table.changed(*blocks)
        for block in message.blocks:
            assert (self.incarnation, *block) not in self.ever  # a version never comes back
            self.ever.add((self.incarnation, *block))
            self.now[block.block_id] = block.version
        assert {block.block_id for block in message.blocks} == set(blocks)
        self.note()

    @rule(blocks=BLOCKS)
    def remove(self, blocks: list[int]) -> None:
        self.table.removed(*blocks)
        for block in blocks:
            self.now.pop(block, None)
        self.note()

    @rule()
    def restart(self) -> None:
        self.start()

    @rule()
    def heartbeat(self) -> None:
        self.table.heartbeat()

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH)
    def deliver(self, which: int) -> None:
        self.replica.apply(Message.unpack(self.under_way.pop(which % len(self.under_way))))

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH)
    def deliver_and_keep(self, which: int) -> None:
        self.replica.apply(Message.unpack(self.under_way[which % len(self.under_way)]))

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH)
    def lose(self, which: int) -> None:
        self.under_way.pop(which % len(self.under_way))

    @rule(lost=st.booleans())
    def ask_for_what_is_missing(self, lost: bool) -> None:
        wanted = self.replica.wanted()
        if wanted is not None:
            answer = self.table.replay(*wanted)
            for message in answer[1:] if lost else answer:
                self.replica.apply(Message.unpack(message.pack()))

    @invariant()
    def knows_a_true_state_or_nothing(self) -> None:
        if not self.replica.synced:
            assert all(self.replica.version(block) is None for block in range(5))
            assert not any(self.replica.is_current(block, version) for block in range(5) for version in range(9))
            return
        state = self.truth[self.replica._incarnation, self.replica._next]
        for block in range(5):
            assert self.replica.version(block) == state.get(block, ABSENT)
            assert not self.replica.is_current(block, ABSENT)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        assert len(self.replica._early) <= 3

    def teardown(self) -> None:
        """After one heartbeat that arrives and one answer, the replica is where the owner is."""
        self.replica.apply(self.table.heartbeat())
        wanted = self.replica.wanted()
        if wanted is not None:
            for message in self.table.replay(*wanted):
                self.replica.apply(message)
        assert self.replica.synced and self.replica.wanted() is None
        assert (self.replica._incarnation, self.replica._next) == (self.incarnation, self.table.sequence)
        assert (
            {b: v for b in range(5) if (v := self.replica.version(b))} == self.now == dict(self.table.snapshot().blocks)
        )
        assert all(self.table.version(block) == self.now.get(block, ABSENT) for block in range(5))


def test_a_replica_knows_a_true_state_or_nothing() -> None:
    run_state_machine_as_test(
        Network,
        settings=settings(
            settings.default, max_examples=max(60, settings.default.max_examples // 4), stateful_step_count=50,
            deadline=None, suppress_health_check=[HealthCheck.too_slow],
        ),
    )  # fmt: skip


def linked(**more: Any) -> tuple[BlockTable, BlockReplica, list[Message]]:
    sent: list[Message] = []
    return BlockTable(sent.append, incarnation=1, **more), BlockReplica(), sent


def test_loss_reorder_doubling_and_restart_by_name() -> None:
    table, replica, sent = linked()
    assert (replica.synced, replica.version(7), replica.wanted()) == (False, None, (-1, 0))
    for block in (7, 8, 7):
        table.changed(block)
    assert sent == [
        Message(Kind.UPDATE, 1, 0, (Block(7, 1),)),
        Message(Kind.UPDATE, 1, 1, (Block(8, 1),)),
        Message(Kind.UPDATE, 1, 2, (Block(7, 2),)),
    ]

    assert replica.apply(sent[0]) is Outcome.RESTARTED
    assert replica.is_current(7, 1)
    assert replica.apply(sent[2]) is Outcome.EARLY
    assert (replica.version(7), replica.wanted()) == (None, (1, 1))  # not 1, which is no longer true
    assert replica.apply(sent[0]) is Outcome.DUPLICATE
    assert replica.apply(sent[1]) is Outcome.APPLIED
    assert (replica.version(7), replica.version(8), replica.version(9)) == (2, 1, ABSENT)

    table.removed(8)  # lost, and nothing follows
    assert replica.version(8) == 1  # it cannot know
    assert replica.apply(table.heartbeat()) is Outcome.GAP
    assert replica.version(8) is None
    for message in table.replay(1, 3):
        assert replica.apply(message) is Outcome.APPLIED
    assert replica.version(8) == ABSENT

    again: list[Message] = []
    restarted = BlockTable(again.append, incarnation=2)
    restarted.changed(7)
    assert replica.apply(again[0]) is Outcome.RESTARTED
    assert (replica.version(7), replica.version(8)) == (1, ABSENT)
    assert replica.apply(sent[2]) is Outcome.OUTDATED
    assert replica.version(7) == 1
    assert replica.outcomes[Outcome.OUTDATED] == 1 and sum(replica.outcomes.values()) == 8


def test_the_protocol_is_written_down(tmp_path: Path) -> None:
    with EventLog(tmp_path / "blocks.jsonl", clock_ns=lambda: 100) as log:
        sent: list[Message] = []
        table = BlockTable(sent.append, incarnation=1, log=log)
        replica = BlockReplica(log=log, node="r1")
        for message in (table.changed(7, 8), table.removed(8)):
            replica.apply(message)
        replica.apply(table.heartbeat())
        assert (replica.version(7), replica.version(8)) == (1, ABSENT)
        table.changed(7)
        replica.apply(table.heartbeat())
        assert replica.version(7) is None
        replica.apply(table.snapshot())

    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    names = ("op", "node", "incarnation", "seq", "block", "version")
    assert [row["ts_ns"] for row in rows][:4] == [100, 100, 101, 102]  # rows of one message have one time
    assert [tuple(row.get(name) for name in names) for row in rows] == [
        ("send", "owner", 1, 0, "7", 1), ("send", "owner", 1, 0, "8", 1), ("send", "owner", 1, 1, "8", 0),
        ("receive", "r1", 1, 0, "7", 1), ("receive", "r1", 1, 0, "8", 1),
        ("apply", "r1", 1, 0, "7", 1), ("apply", "r1", 1, 0, "8", 1),
        ("receive", "r1", 1, 1, "8", 0), ("apply", "r1", 1, 1, "8", 0),
        ("read", "r1", 1, 2, "7", 1), ("read", "r1", 1, 2, "8", 0),
        ("send", "owner", 1, 2, "7", 2), ("read", "r1", 1, 2, "7", None), ("snapshot", "r1", 1, 3, "7", 2),
    ]  # fmt: skip


def test_what_is_not_kept_any_more_comes_as_a_snapshot() -> None:
    table, replica, _ = linked(replayed=2)
    for block in range(5):
        table.changed(block)
    table.removed(0)
    assert [message.kind for message in table.replay(1, 4)] == [Kind.UPDATE, Kind.UPDATE]
    (snapshot,) = table.replay(1, 3)
    assert snapshot == Message(Kind.SNAPSHOT, 1, 6, tuple(Block(block, 1) for block in range(1, 5)))
    assert table.replay(9, 0) == [snapshot]
    replica.apply(snapshot)
    assert (replica.synced, replica.version(0), replica.version(4)) == (True, ABSENT, 1)
    assert replica.apply(table.changed(0)) is Outcome.APPLIED
    assert table.version(0) == 2  # not 1 again
    assert replica.apply(snapshot) is Outcome.DUPLICATE  # late, and older than what is known
    assert (replica.synced, replica.version(0)) == (True, 2)


def test_versions_that_run_out_begin_a_new_incarnation() -> None:
    table, replica, sent = linked()
    table.changed(1, 2)
    replica.apply(sent[-1])
    table._versions[1] = LAST_VERSION
    message = table.changed(1)
    assert message == Message(Kind.SNAPSHOT, 2, 0, (Block(1, 1), Block(2, 1)))
    assert replica.apply(message) is Outcome.RESTARTED
    assert (replica.version(1), table.incarnation, table.sequence) == (1, 2, 0)


def test_a_message_is_eight_bytes_a_block() -> None:
    message = Message(Kind.UPDATE, 1, 2, tuple(Block(block, 1) for block in range(100)))
    assert len(message.pack()) == 25 + 100 * 8


@given(
    st.sampled_from(Kind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))),
    st.binary(max_size=60),
)
def test_messages_come_back_and_others_are_refused(
    kind: Kind, incarnation: int, sequence: int, blocks: list[tuple[int, int]], other: bytes
) -> None:
    message = Message(kind, incarnation, sequence, tuple(Block(*block) for block in blocks))
    packed = message.pack()
    assert Message.unpack(packed) == message
    for wrong in (packed[:-1], packed + b"\0", b"lsb1" + other, other):
        try:
            assert isinstance(Message.unpack(wrong), Message)  # noise may happen to be one
        except ValueError:
            continue
    for wrong in (packed[:-1], packed + b"\0", b"x" + packed[1:], packed[:4] + b"\x09" + packed[5:]):
        with pytest.raises(ValueError, match=r"block message|valid Kind"):
            Message.unpack(wrong)


@pytest.mark.parametrize("block", [-1, 2**32])
def test_ids_that_are_no_u32_change_nothing(block: int) -> None:
    table, _, sent = linked()
    with pytest.raises(ValueError, match="block id"):
        table.changed(1, block)
    assert (sent, table.version(1), table.sequence) == ([], 0, 0)


def test_threads_send_in_sequence() -> None:
    table, replica, sent = linked()
    threads = [threading.Thread(target=lambda: [table.changed(1) for _ in range(500)] and None) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [message.sequence for message in sent] == list(range(3_000))
    for message in sent:
        replica.apply(message)
    assert replica.version(1) == 3_000
