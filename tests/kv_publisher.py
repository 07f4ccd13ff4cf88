"""A publisher of KV events as engines have one: PUB for the live batches, ROUTER for replay, in either framing."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack
import zmq

PATIENCE_MS = 10_000
END = b"\xff" * 8


def stored(hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    """A BlockStored event in the map form, with token ids that must not be kept."""
    tokens = [777_000 + n for n in range(16 * len(hashes))]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None} | more


def removed(*hashes: Any, medium: str = "GPU") -> dict[str, Any]:
    """A BlockRemoved event in the map form."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def batch(ts: float, events: list[Any], rank: int | None = 0) -> bytes:
    """A batch as vLLM 0.33 packs it."""
    return msgpack.packb([ts, events] + ([] if rank is None else [rank]))


def frames_of(path: Path) -> list[bytes]:
    """The payloads of a recording, in the order of their numbers from 0."""
    with gzip.open(path, "rt") as file:
        return [base64.b64decode(json.loads(line)["payload_b64"]) for line in file]


def later(payloads: list[bytes], seconds: float) -> list[bytes]:
    """The same batches, so much later."""
    unpacked = [msgpack.unpackb(payload, strict_map_key=False) for payload in payloads]
    return [msgpack.packb([ts + seconds, *rest]) for ts, *rest in unpacked]


def recording(payloads: Iterable[tuple[int, bytes]]) -> str:
    """Lines of a recording."""
    return "".join(
        json.dumps({"topic": "kv@t", "seq": number, "payload_b64": base64.b64encode(payload).decode()}) + "\n"
        for number, payload in payloads
    )


class Publisher:
    """One engine. Batches that are ``dropped`` stay in the replay buffer but are not sent, as PUB does at its limit.

    Sends nothing before somebody has subscribed, so that a test loses nothing by accident.
    """

    def __init__(self, payloads: list[bytes], *, topics_in_replay: bool = True, replay: bool = True) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that tells of subscriptions
        self._pub.setsockopt(zmq.LINGER, 0)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.LINGER, 0)
        self.replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1") if replay else 0
        self._topics_in_replay = topics_in_replay
        self._lives = [payloads]
        self.dropped: set[int] = set()
        self.buffered = 10_000
        self.requests = 0
        self._stop = threading.Event()
        self.sent = threading.Event()  # all that there is to send
        self._thread = threading.Thread(target=self._run, daemon=True)

    def then(self, payloads: list[bytes]) -> Publisher:
        """After the batches so far, a restart that sends these, numbered from 0."""
        self._lives.append(payloads)
        return self

    @property
    def address(self) -> str:
        """The evidence to give to a verb."""
        replay = f"&replay={self.replay_port}" if self.replay_port else ""
        return f"tcp://127.0.0.1:{self.port}?pool=599{replay}"

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set() and not (self._pub.poll(20) and self._pub.recv()[:1] == b"\x01"):
            pass
        for payloads in self._lives:
            buffer: list[tuple[bytes, bytes]] = []
            for sequence, payload in enumerate(payloads):
                name = sequence.to_bytes(8, "big")
                buffer = [*buffer, (name, payload)][-self.buffered :]
                if sequence in self.dropped:
                    continue
                self._pub.send_multipart([b"kv@t", name, payload])
                if sequence - 1 in self.dropped and self.replay_port:
                    self._serve(buffer, PATIENCE_MS)  # the subscriber sees the gap and asks
        self.sent.set()
        while not self._stop.is_set():
            self._serve(buffer, 20)

    def _serve(self, buffer: list[tuple[bytes, bytes]], wait_ms: int) -> None:
        if not self._replay.poll(wait_ms):
            return
        client, _, first = self._replay.recv_multipart()
        self.requests += 1
        topic = [b"kv@t"] if self._topics_in_replay else []
        for name, payload in buffer:
            if name >= first:
                self._replay.send_multipart([client, b"", *topic, name, payload])
        self._replay.send_multipart([client, b"", *topic, END, b""])
