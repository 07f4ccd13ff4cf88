"""The sampler thread outlives a reading that fails, and says how many did and why."""

from __future__ import annotations

import threading

from leakscope.model.recording import Loss
from leakscope.record.sampler_thread import SamplerThread


def test_a_reading_that_fails_is_counted_and_the_next_one_is_taken() -> None:
    # given readings of which the first two fail
    taken: list[bool] = []
    done = threading.Event()

    def read(everything: bool) -> None:
        taken.append(everything)
        done.set()
        if len(taken) <= 2:
            raise ValueError("no such counter")

    sampler = SamplerThread(read)
    for _ in range(3):
        done.clear()
        sampler.request()
        assert done.wait(30)
    sampler.stop()
    sampler.read_now(everything=True)
    # then all were tried, and the two are told with their reason
    assert taken == [False, False, False, True]
    assert sampler.losses() == [Loss("samplers", "sampler_error", 2, "ValueError: no such counter")]


def test_a_sampler_that_stopped_reads_no_more_on_request() -> None:
    taken: list[bool] = []
    sampler = SamplerThread(taken.append)
    sampler.stop()
    sampler.stop()
    sampler.request()
    assert taken == [] and sampler.losses() == []
