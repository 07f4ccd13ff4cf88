"""A reader of pickles that hold plain data only, in one pass and without building what is not kept.

Deny-all by construction: it knows the opcodes that make dictionaries, lists, tuples, numbers and text, and no others.
A pickle that names a class, a function, a persistent object or an extension is refused where it does so; nothing is
ever imported or called. Opcodes are those of protocols 2 to 5 as documented in CPython's ``Lib/pickletools.py``.

``pickle.Unpickler`` with a ``find_class`` that refuses would be as safe, but builds the whole object: about 10 GB for
a snapshot of 1 GB. Here the consumer sees list items as they are appended (the pickler of CPython appends 1,000 at a
time) and may take them out.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_TEXT_BYTES = 1 << 20
"""Longest text that is accepted: names and paths are far shorter."""
MAX_DEPTH = 32
"""Containers inside containers. A snapshot has seven levels."""
CHUNK_BYTES = 4 << 20
MAX_PENDING = 1_000_000
"""Objects not yet put into a container. CPython's pickler never leaves more than some thousands."""
BYTES_PER_CONTAINER = 16
"""Least bytes of file for each dictionary or list, on the whole: one takes 64 bytes of memory, real ones 50 of file."""
_MARGIN = 512
"""More than any opcode with its argument takes, text apart."""

TAKEN = object()
"""Stands in the memo for an object that the consumer has taken: whoever refers to it again gets this."""


class PickleRefusedError(ValueError):
    """The pickle is cut short, damaged, or holds more than plain data. The message says where."""


class PlainPickle:
    """Reads one pickle from ``file``; ``load`` returns its object.

    ``append(target, items)`` is called whenever ``items`` are to be appended to the list ``target``. It returns
    whether it has taken them; otherwise they are appended. What it took is forgotten with :meth:`forget`.
    ``progress(bytes_read)`` is called once a chunk.
    """

    def __init__(
        self,
        file: BinaryIO,
        append: Callable[[list[Any], list[Any]], bool],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._file = file
        self._append = append
        self._progress = progress
        self._memo: list[Any] = []
        self._memo_index: dict[int, int] = {}  # id() of containers in the memo, which keeps them alive
        self.position = 0  # of the byte after the last chunk

    def forget(self, taken: Any) -> None:
        """Drop a dictionary or list that the consumer has copied out of."""
        index = self._memo_index.pop(id(taken), None)
        if index is not None:
            self._memo[index] = TAKEN
        taken.clear()

    def is_shared(self, container: Any) -> bool:
        """Whether later parts of the pickle may refer to ``container`` (its id() is then its own until forgotten)."""
        return id(container) in self._memo_index

    def load(self) -> Any:
        """The object. Raises PickleRefusedError."""
        collecting = gc.isenabled()
        gc.disable()  # millions of containers that stay: looking through them again and again only takes time
        try:
            return self._load()
        except (IndexError, struct.error):
            raise PickleRefusedError(f"is damaged or cut short at byte {self.position:,}") from None
        except UnicodeDecodeError:
            raise PickleRefusedError(f"holds text that is not UTF-8 before byte {self.position:,}") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, PickleRefusedError):
                raise
            raise PickleRefusedError(f"is damaged before byte {self.position:,}") from None
        finally:
            if collecting:
                gc.enable()

    def _more(self, data: bytes, pos: int, wanted: int) -> bytes:
        """The bytes from ``pos`` on, at least ``wanted`` where the file has them."""
        more = self._file.read(max(CHUNK_BYTES, wanted))
        self.position += len(more)
        self._progress(self.position)
        return data[pos:] + more

    def _load(self) -> Any:
        data = self._more(b"", 0, 0)
        if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
            raise PickleRefusedError("is not a pickle of protocol 2 to 5")
        pos, limit = 2, len(data) - _MARGIN
        stack: list[Any] = []
        marks: list[int] = []
        memo, memo_index = self._memo, self._memo_index
        push, pop = stack.append, stack.pop
        int4, int4_unsigned, int8_unsigned, float8 = (struct.Struct(f).unpack_from for f in ("<i", "<I", "<Q", ">d"))
        containers = 0
        while True:
            if pos > limit:
                if len(stack) > MAX_PENDING or containers > 100_000 + self.position // BYTES_PER_CONTAINER:
                    raise PickleRefusedError("holds far more objects than a snapshot of its size")
                data, pos = self._more(data, pos, 0), 0
                limit = len(data) - _MARGIN if len(data) > 2 * _MARGIN else len(data)
            op = data[pos]
            pos += 1
            # In the order of their frequency in snapshots.
            if op == 0x6A:  # LONG_BINGET
                push(memo[int4_unsigned(data, pos)[0]])
                pos += 4
            elif op == 0x68:  # BINGET
                push(memo[data[pos]])
                pos += 1
            elif op == 0x94:  # MEMOIZE
                top = stack[-1]
                if type(top) is dict or type(top) is list:
                    memo_index[id(top)] = len(memo)
                memo.append(top)
            elif op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op == 0x4A:  # BININT
                push(int4(data, pos)[0])
                pos += 4
            elif op == 0x8A:  # LONG1
                length = data[pos]
                if length > 16:
                    raise PickleRefusedError(f"holds an integer of {length} bytes")
                push(int.from_bytes(data[pos + 1 : pos + 1 + length], "little", signed=True))
                pos += 1 + length
            elif op == 0x28:  # MARK
                if len(marks) >= MAX_DEPTH:
                    raise PickleRefusedError(f"nests containers more than {MAX_DEPTH} deep")
                marks.append(len(stack))
            elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
                start = marks.pop() if op == 0x75 else len(stack) - 2
                items = stack[start:]
                del stack[start:]
                target = stack[-1]
                if type(target) is not dict or len(items) % 2:
                    raise PickleRefusedError("is damaged: items set in what is no dictionary")
                for key in items[::2]:
                    # Tuples of tuples and huge integers as keys would make hashing the attack.
                    if type(key) is not str and (type(key) is not int or key.bit_length() > 63):
                        raise PickleRefusedError("has a dictionary key that is neither text nor an integer")
                target.update(zip(items[::2], items[1::2], strict=True))
            elif op == 0x7D:  # EMPTY_DICT
                push({})
                containers += 1
            elif op == 0x5D:  # EMPTY_LIST
                push([])
                containers += 1
            elif op == 0x65 or op == 0x61:  # APPENDS, APPEND
                start = marks.pop() if op == 0x65 else len(stack) - 1
                items = stack[start:]
                del stack[start:]
                target = stack[-1]
                if type(target) is not list:
                    raise PickleRefusedError("is damaged: items appended to what is no list")
                if items and not self._append(target, items):
                    target.extend(items)
            elif op == 0x8C or op == 0x58 or op == 0x8D:  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                if op == 0x8C:
                    length, pos = data[pos], pos + 1
                elif op == 0x58:
                    length, pos = int4_unsigned(data, pos)[0], pos + 4
                else:
                    length, pos = int8_unsigned(data, pos)[0], pos + 8
                if length > MAX_TEXT_BYTES:
                    raise PickleRefusedError(f"holds a text of {length:,} bytes")
                if pos + length > len(data):
                    data, pos = self._more(data, pos, length + _MARGIN), 0
                    limit = len(data) - _MARGIN if len(data) > 2 * _MARGIN else len(data)
                    if length > len(data):
                        raise IndexError
                push(str(data[pos : pos + length], "utf-8", "surrogatepass"))
                pos += length
            elif op == 0x4D:  # BININT2
                push(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x88:  # NEWTRUE
                push(True)
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x47:  # BINFLOAT
                push(float8(data, pos)[0])
                pos += 8
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
            elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                length = op - 0x84
                items = stack[-length:]
                if len(items) < length:
                    raise IndexError
                stack[-length:] = [tuple(items)]
            elif op == 0x74:  # TUPLE
                start = marks.pop()
                stack[start:] = [tuple(stack[start:])]
            elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
                if op == 0x71:
                    index, pos = data[pos], pos + 1
                else:
                    index, pos = int4_unsigned(data, pos)[0], pos + 4
                top = stack[-1]
                if index != len(memo):  # what every pickler writes; anything else could ask for any memory
                    raise PickleRefusedError("is damaged: numbers its objects out of order")
                if type(top) is dict or type(top) is list:
                    memo_index[id(top)] = index
                memo.append(top)
            elif op == 0x95:  # FRAME
                pos += 8
            elif op == 0x2E:  # STOP
                if pos > len(data):
                    raise IndexError
                value = pop()
                if stack or marks:
                    raise PickleRefusedError("is damaged: ends inside an object")
                return value
            else:
                where = self.position - len(data) + pos - 1
                raise PickleRefusedError(
                    f"asks for more than plain data (opcode 0x{op:02x} at byte {where:,}): snapshots never do, "
                    "so nothing of it was read"
                )
