"""KV-cache events of vLLM and SGLang: what is in their msgpack payloads.

Both engines publish batches of ``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared`` with a sequence number each
(vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py). The form has changed over releases: a batch is
an array ``[ts, events, rank]`` or a map, an event an array with its name first (its tail kept growing) or a map with
``type``; hashes are 64-bit numbers, signed or not, or bytes. All of these decode here; fields that nobody knows and
tails that are missing are no error. **Token ids, extra keys, salts and session ids are the user's prompt: they are
dropped at once and stand in no row.**
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nsight_parsers import ReportError

EXTRA = "pip install 'leakscope[cache]'"
FULL_ATTENTION = (None, "full_attention", "mla_attention")
"""Kinds of KV-cache groups whose requests hold all blocks up to their last (vllm/v1/kv_cache_interface.py); others hold
a window of them, or a state."""
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
ARRAY_FIELDS = {
    STORED: (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    REMOVED: ("block_hashes", "medium", "group_idx"),
    CLEARED: (),
}
"""Positions behind the name in the array form, as of its last release (vLLM 0.22); older ones end sooner."""
DEFAULT_MEDIUM = "GPU"
MAX_PAYLOAD_BYTES = 64 << 20
MAX_BLOCKS_OF_EVENT = 1 << 20
MAX_TEXT = 64
MASK = (1 << 64) - 1

Hash = int | str
"""The name of a block: an unsigned 64-bit number, or the hexadecimal digits of bytes."""


class Stored(NamedTuple):
    """Blocks that entered the prefix table, each the parent of the next. ``parent`` is that of the first."""

    hashes: list[Hash]
    parent: Hash | None
    medium: str
    group: int
    block_tokens: int
    prefix_held: bool = True  # who holds a block of this group holds its whole prefix: not so with sliding windows


class Removed(NamedTuple):
    """Blocks that left the prefix table."""

    hashes: list[Hash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """The whole prefix table was dropped, which engines do only while no block is held."""


class Batch(NamedTuple):
    """One batch. ``ts_ns`` is UTC; ``rank`` the data-parallel rank, 0 where none is given."""

    ts_ns: int
    rank: int
    events: list[Stored | Removed | Cleared]
    unknown: int  # events that are none of the three, or have no usable hashes


class PayloadError(ValueError):
    """A payload that is no batch of KV events."""


def decode_batch(payload: bytes) -> Batch:
    """The batch in a msgpack ``payload``. Raises PayloadError for anything else, ReportError without msgpack."""
    batch = _unpacked(payload)
    if isinstance(batch, dict):
        ts, events = batch.get("ts"), batch.get("events")
        rank = batch.get("data_parallel_rank", batch.get("attn_dp_rank"))
    elif isinstance(batch, list) and len(batch) >= 2:
        ts, events, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
    else:
        raise PayloadError("no batch of KV events: neither an array of a time and events, nor a map of them")
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not 0 < ts < 1 << 33 or not isinstance(events, list):
        raise PayloadError("no batch of KV events: no time in seconds, or no list of events")
    decoded = [_event(event) for event in events]
    known = [event for event in decoded if event is not None]
    return Batch(
        round(ts * 1e9), rank if isinstance(rank, int) and 0 < rank < 1 << 15 else 0, known, len(decoded) - len(known)
    )


def _unpacked(payload: bytes) -> Any:
    try:
        import msgpack
    except ImportError:
        raise ReportError(f"KV events need msgpack: {EXTRA}") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"a payload of more than {MAX_PAYLOAD_BYTES >> 20} MiB")
    try:
        return msgpack.unpackb(payload, strict_map_key=False, unicode_errors="replace", timestamp=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise PayloadError(f"no msgpack: {type(error).__name__}") from None


def _event(event: Any) -> Stored | Removed | Cleared | None:
    if isinstance(event, dict):
        name, fields = event.get("type"), event
    elif isinstance(event, list) and event and isinstance(event[0], str):
        name = event[0]
        fields = dict(zip(ARRAY_FIELDS.get(name, ()), event[1:], strict=False))
    else:
        return None
    if name == CLEARED:
        return Cleared()
    if name not in (STORED, REMOVED):
        return None
    given = fields.get("block_hashes")
    if not isinstance(given, list) or not given or len(given) > MAX_BLOCKS_OF_EVENT:
        return None
    named = [value & MASK if type(value) is int else _hash(value) for value in given]
    hashes = [name for name in named if name is not None]
    if len(hashes) < len(given):
        return None
    medium, group = _text(fields.get("medium")) or DEFAULT_MEDIUM, fields.get("group_idx")
    group = group if isinstance(group, int) and 0 <= group < 1 << 15 else 0
    if name == REMOVED:
        return Removed(hashes, medium, group)
    tokens, spec = fields.get("block_size"), fields.get("kv_cache_spec_kind")
    return Stored(
        hashes,
        _hash(fields.get("parent_block_hash")),
        medium,
        group,
        tokens if isinstance(tokens, int) else 0,
        spec in FULL_ATTENTION,
    )


def _hash(value: Any) -> Hash | None:
    """The name that a hash, signed or not or bytes, gives a block; None for no hash."""
    if type(value) is int:
        return value & MASK
    return value.hex() if isinstance(value, bytes) and 0 < len(value) <= MAX_TEXT else None


def _text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""
