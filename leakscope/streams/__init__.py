"""Live sources: KV-event publishers, metrics endpoints, Redis and memcached, each collected into a capture."""

from leakscope.streams.address import Address, address_of
from leakscope.streams.collection import Collecting, collect

__all__ = ["Address", "Collecting", "address_of", "collect"]
