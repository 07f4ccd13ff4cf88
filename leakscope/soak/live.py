"""A soak that records: one capture through restarts of the target and of the recorder."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from leakscope.capture import Capture
from leakscope.detect.recorded_lives import zeros_ns
from leakscope.errors import BadInputError
from leakscope.model.live import LiveReading
from leakscope.model.manifest import Source
from leakscope.model.recording import Summary
from leakscope.model.soak import SoakState, SoakSummary
from leakscope.record.live import LiveReadings
from leakscope.record.options import RecordOptions
from leakscope.record.readings import Sampled
from leakscope.record.recorder import Recorder
from leakscope.soak.culprit import CulpritSearch
from leakscope.soak.final import gaps, readings_and_lives, recordings_of
from leakscope.soak.replay import summary_of
from leakscope.soak.watch import Watch, lives_of

REFRESH_S = 1.0
MOST_SITES = 12
"""Sites of a layer that are looked at for the leading frames: one frame may have several."""
RESTARTS = ("no", "on-failure", "always")
QUICK_S = 10.0
MOST_QUICK = 3
"""A command that ended within so many seconds, so many times in a row, is not started again."""
LONGEST_PAUSE_S = 30.0
LESS_URGENT = 10
"""What is judged and shown waits for what is recorded (nice)."""


class LiveSoak:
    """Construct, :meth:`run` once. Raises what a recording raises."""

    def __init__(
        self,
        options: RecordOptions,
        watch: Watch,
        restart: str,
        on_state: Callable[[SoakState], None],
        on_ready: Callable[[str], None],
        watched: bool = False,
    ) -> None:
        """:param restart: when a command that ended is started again, one of RESTARTS.
        :param watched: states hold the figures of the recording under way.
        """
        self._options, self._watch, self._restart = options, watch, restart
        self._on_state, self._on_ready = on_state, on_ready
        self._first: Source | None = None
        self._began_ns = time.time_ns()
        self._stopped = False
        self._quit = False
        self._watched = watched
        self._recorder: Recorder | None = None
        self._readings: LiveReadings | None = None
        self._reading = threading.Lock()
        self.summaries: list[Summary] = []
        self._search = CulpritSearch(options.output)
        self._asked = False

    @property
    def elapsed_s(self) -> float:
        """Since the first recording of the capture began."""
        first = self._first
        if first is not None and first.anchors:
            anchor = first.anchors[0]
            began = first.start_ns + anchor.realtime_ns - anchor.monotonic_ns
        else:
            began = self._began_ns
        return (time.time_ns() - began) / 1e9

    def stop(self) -> None:
        """End the soak as if its duration were over. From any thread."""
        self._quit = self._stopped = True
        if (recorder := self._recorder) is not None:
            recorder.stop()

    def begin(self, readings: LiveReadings) -> None:
        """A recording began (record.live.Observer)."""
        self._readings = readings

    def end(self) -> None:
        """It ends."""
        with self._reading:
            self._readings = None

    def run(self) -> SoakSummary:
        """Record until the duration is over since the capture began, the command ends for good, or a signal."""
        try:
            return self._run()
        finally:
            self._search.stop()

    def _run(self) -> SoakSummary:
        ended_by = "duration"
        resumed = self._resume()
        quick = 0
        with self._signals():
            while (left := self._watch.plan.duration_s - self.elapsed_s) > 0 or not (self.summaries or resumed):
                life = replace(self._options, duration_s=max(left, 0.1), pids=list(self._options.pids))
                began = time.monotonic()
                try:
                    summary = self._record(life)
                except KeyboardInterrupt:  # while probes were being attached: nothing was recorded this time
                    if not (self.summaries or resumed):
                        raise
                    self._stopped = True
                    break
                self.summaries.append(summary)
                ended_by = summary.ended_by
                if ended_by in ("signal", "duration", "quit"):
                    break
                self._watch.end_lives(self.elapsed_s)
                if ended_by == "replaced":
                    if not self._await_cgroup():
                        break
                    continue
                quick = quick + 1 if time.monotonic() - began < QUICK_S else 0
                if not self._starts_again(summary, quick):
                    break
                self._pause(min(2.0**quick, LONGEST_PAUSE_S))
                if self._stopped:
                    break
        if self._stopped:
            ended_by = "quit" if self._quit else "signal"
        capture = Capture.open(self._options.output)
        for gap in gaps(capture):
            self._watch.tell(gap.elapsed_s, gap.what, gap.text)
        self._watch.advance(self.elapsed_s)
        return summary_of(self._watch, self.elapsed_s, ended_by, len(recordings_of(capture)))

    def _resume(self) -> bool:
        """Take what an earlier recorder left; whether there was one. Raises BadInputError for a capture of another
        kind."""
        path = self._options.output
        if not os.path.lexists(path):
            return False
        capture = Capture.open(path)
        sources = recordings_of(capture)
        if not sources or not sources[0].options.get("steady"):
            raise BadInputError(f"{path}: exists and is not the capture of a soak; choose another name")
        self._first = sources[0]
        self._watch.load(*readings_and_lives(capture))
        return True

    def _record(self, options: RecordOptions) -> Summary:
        watcher = _Watcher(self._refresh)

        def ready(price: str) -> None:
            self._on_ready(price)
            watcher.start()  # not before a command is forked: threads and forks do not go together

        observer = self if self._watched else None
        recorder = self._recorder = Recorder(options, on_ready=ready, on_samples=self._take, observer=observer)
        if self._quit:
            recorder.stop()
        try:
            return recorder.run()
        finally:
            self._recorder = None
            watcher.stop()
            if watcher.error is not None:
                what = f"{type(watcher.error).__name__}: {watcher.error}"
                self._watch.tell(self.elapsed_s, "note", f"no interim verdicts any more: {what}")

    def _take(self, sampled: Sampled) -> None:
        if self._first is None:
            self._first = sampled.source
        zero_ns = zeros_ns([self._first, sampled.source])[sampled.source.id]
        self._watch.add(sampled.rows, zero_ns, lives_of(sampled.processes, zero_ns))

    def _refresh(self) -> None:
        elapsed_s = self.elapsed_s
        looks = self._watch.advance(elapsed_s)
        if looks and looks[-1].alarm and not self._asked:
            self._asked = True  # once an alarm; the next one asks anew
            self._search.start()
        elif looks and not looks[-1].alarm:
            self._asked = False
        if found := self._search.poll():
            self._watch.tell(elapsed_s, "culprit", found)
        live = self._read_live(elapsed_s)
        lost = sum(loss.count for one in self.summaries for loss in one.losses if loss.what == "ring_drop")
        self._on_state(replace(self._watch.state(elapsed_s, lost), live=live))

    def _read_live(self, elapsed_s: float) -> LiveReading | None:
        with self._reading:
            try:
                return self._readings.read(MOST_SITES) if self._readings is not None else None
            except Exception as error:  # looks go on
                self._readings = None
                self._watch.tell(elapsed_s, "note", f"no growing sites any more: {type(error).__name__}: {error}")
                return None

    def _starts_again(self, summary: Summary, quick: int) -> bool:
        """Whether a command that ended is started again; says so."""
        status = summary.exit_status
        how = f"with exit status {status}" if status is None or status >= 0 else f"by signal {-status}"
        again = self._restart == "always" or (self._restart == "on-failure" and status != 0)
        said = f"the command ended {how}"
        if again and quick >= MOST_QUICK:
            again = False
            said += f", {quick} times within {QUICK_S:.0f} s each: not started again"
        self._watch.tell(self.elapsed_s, "note", f"{said}, and is started again" if again else said)
        return again

    def _await_cgroup(self) -> bool:
        """Wait until the group is there again; False where the time is up or a signal came."""
        assert self._options.cgroup is not None
        while not (self._options.cgroup / "cgroup.procs").exists():
            if self._stopped or self.elapsed_s >= self._watch.plan.duration_s:
                return False
            self._pause(1.0)
        return True

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < end:
            self._refresh()
            time.sleep(min(REFRESH_S, max(0.0, end - time.monotonic())))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Between recordings, a signal ends the soak; within them the recorder has handlers of its own."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stopped = True

        previous = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Watcher:
    """Calls `refresh` each second in a thread of its own, which gives way to the recorder's."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leakscope-watch", daemon=True)
        self.error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LESS_URGENT)
        while not self._ended.wait(REFRESH_S):
            try:
                self._refresh()
            except Exception as error:  # the recording goes on; the final report judges anew
                self.error = error
