"""Addresses of live sources, as they are given in place of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from leakscope.errors import BadInputError

KINDS = {
    "tcp": "kv_events",
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "memcached": "memcached",
    "http": "engine_metrics",
    "https": "engine_metrics",
}
"""Scheme → kind of the source in the capture's manifest."""
OPTIONS = {"kv_events": {"replay", "topic", "pool"}, "redis": {"db", "events"}}
"""What may stand behind ``?``; of a metrics address everything, it is the server's."""
_SHORTENED = re.compile(rf"^({'|'.join(KINDS)}):/")
SCHEME = re.compile(rf"({'|'.join(KINDS)})://", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """A live source. ``shown`` is what may be printed and stored: without user, password and options."""

    kind: str
    shown: str
    url: SplitResult
    options: dict[str, str]

    @property
    def host(self) -> str:
        """Host name, '' for a socket file."""
        return self.url.hostname or ""

    def port(self, default: int | None = None) -> int:
        """The port. Raises BadInputError where none is given and there is no default."""
        port = self.url.port
        if port is None and default is None:
            raise BadInputError(f"{self.shown}: the port is missing, as in {self.url.scheme}://{self.host}:5557")
        return port if port is not None else default or 0


def address_of(text: str | Path) -> Address | None:
    """The address in ``text``, None where it is no address but a file. Raises BadInputError for one that is wrong.

    A path has lost the second slash of an address; it is put back.
    """
    if isinstance(text, Path):
        text = _SHORTENED.sub(lambda m: f"{m[1]}://{'/' if m[1] == 'unix' else ''}", str(text))
    if not SCHEME.match(text):
        return None
    try:
        url = urlsplit(text)
        url.port  # noqa: B018  it is read here so that a wrong one is said here
    except ValueError as error:
        raise BadInputError(f"{shown_of(text)}: no address: {error}") from None
    kind = KINDS[url.scheme.lower()]
    shown = shown_of(text)
    if not url.hostname and url.scheme != "unix":
        raise BadInputError(f"{shown}: the host is missing")
    options = {} if kind == "engine_metrics" else dict(parse_qsl(url.query, keep_blank_values=True))
    unknown = sorted(options.keys() - OPTIONS.get(kind, set()))
    if unknown and kind != "engine_metrics":
        known = ", ".join(sorted(OPTIONS.get(kind, ()))) or "none"
        raise BadInputError(f"{shown}: no option {unknown[0]!r} behind '?'; there are: {known}")
    return Address(kind, shown, url, options)


def shown_of(text: str) -> str:
    """``text`` without user, password, options and fragment."""
    scheme, _, rest = text.partition("://")
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = rest.partition("/")
    return f"{scheme.lower()}://{authority.rpartition('@')[2]}{slash}{path}"
