"""Serves requests from a cache of the kit and leaks handles: a stream whose client goes away keeps its prefix.

Writes events to ``--events``; ``leakscope attribute FILE`` names ``StreamServer.attach_prefix``, owner ``stream``.
Prefix blocks are pinned while a request decodes. Every 11th request is a stream whose client hangs up: the handle on
its prefix stays in the table of streams. Every 13th prompt handler forgets a handle, which the kit notices and heals.
"""

from __future__ import annotations

from pathlib import Path

from python_common import Site, finish, options, rounds

from leakscope.cachekit import LRUK, Cache, EventLog, Fingerprint, StrongHandle, Sweeper

PREFIX_BYTES = 48_000
CACHE_BYTES = 400 * PREFIX_BYTES
HANGS_UP = 11
FORGETS = 13

Prefixes = Cache[int, bytes]


class StreamServer:
    """Decodes prompts; the planted leak is in :meth:`stream`."""

    def __init__(self, cache: Prefixes) -> None:
        self.cache = cache
        self.streams: dict[int, StrongHandle[int, bytes]] = {}

    def prefill(self, request: int) -> None:
        """The prefix comes into the cache, computed by an earlier request or now."""
        if request not in self.cache:
            self.cache.put(request, bytes(PREFIX_BYTES), owner="prefill")

    def decode(self, request: int) -> None:
        """A healthy request: the handle is released whatever happens."""
        with self.cache.strong(request, owner="decode") as handle:
            assert len(handle.value) == PREFIX_BYTES

    def attach_prefix(self, request: int) -> StrongHandle[int, bytes]:
        """Pins the prefix for as long as the stream lasts."""
        return self.cache.strong(request, owner="stream")

    def stream(self, request: int, *, hangs_up: bool) -> None:
        """The client may hang up; then nobody takes the handle out again."""
        self.streams[request] = self.attach_prefix(request)
        if hangs_up:
            return
        self.streams.pop(request).release()

    def peek_and_forget(self, request: int) -> None:
        """Drops a handle without release."""
        self.cache.strong(request, owner="peek")


def main() -> None:
    """One request after the other, each with a prefix of its own."""
    parser = options((__doc__ or "").splitlines()[0], count=400, pause_us=2_000, churn=1)
    parser.add_argument("--events", type=Path, default=Path("cachekit-events.jsonl"), help="where the events go")
    arguments = parser.parse_args()
    arguments.events.unlink(missing_ok=True)
    leaked = forgotten = 0
    with EventLog(arguments.events) as log:
        cache: Prefixes = Cache(
            CACHE_BYTES, ttl=0.2, getsizeof=len, policy=LRUK, name="prefixes", events=log,
            fingerprint=Fingerprint("model-1", "data-1"),
        )  # fmt: skip
        server = StreamServer(cache)
        with Sweeper(cache, period_s=0.05):
            for request in rounds(arguments):
                server.prefill(request)
                for _ in range(arguments.churn):
                    server.decode(request)
                hangs_up = request % HANGS_UP == 0
                server.stream(request, hangs_up=hangs_up)
                leaked += hangs_up
                if request % FORGETS == 0:
                    server.peek_and_forget(request)
                    forgotten += 1
        stats = cache.stats()
    site = Site("StreamServer.attach_prefix", "host", "cache", "cachekit", leaked, leaked * PREFIX_BYTES)
    finish(
        "cachekit_service.py", [site], arguments.count * arguments.churn, arguments.hold,
        owner="stream", dropped=forgotten, held_entries=stats.held_entries, events=str(arguments.events),
    )  # fmt: skip


if __name__ == "__main__":
    main()
