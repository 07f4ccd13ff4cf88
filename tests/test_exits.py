"""The times at which processes ended, by PID."""

from __future__ import annotations

import random

import pytest

from leakscope.record.decode.exits import Exits


@pytest.mark.parametrize("seed", range(3))
def test_exits_are_those_of_a_dictionary(seed: int) -> None:
    rng, exits, model = random.Random(seed), Exits(), dict[int, int]()
    assert exits.times([1, 2]).tolist() == [0, 0]
    for turn in range(1, 60):
        new = {rng.randrange(300): turn for _ in range(rng.randrange(20))}
        exits.add(new)
        model |= new
        if turn % 7 == 0:
            gone = set(rng.sample(range(300), 40))
            exits.forget(gone)
            model = {pid: ended for pid, ended in model.items() if pid not in gone}
        assert exits.times(range(300)).tolist() == [model.get(pid, 0) for pid in range(300)]
        assert len(exits) == len(model)
