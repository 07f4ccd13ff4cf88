"""Frames and stacks by id: what probes saw as addresses becomes rows of the `frames` and `stacks` tables.

Identity of a frame is (kind, module, file offset), so that a stack is the same in two processes that map a library
at different addresses; of a Python frame (file and function, line).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from leakscope.model.recording import Loss
from leakscope.model.tables import FRAMES, STACKS
from leakscope.record.records import STACK_DUMP_BIT
from leakscope.record.symbols.address_space import AddressSpace, AddressSpaces, Module
from leakscope.record.symbols.kernel import KernelSymbols

_PROBE_MACHINERY = ("__traceiter_", "__bpf_trace_", "bpf_trace_run", "bpf_get_stack", "bpf_prog_")
MAX_DEPTH = 127

RawStack = Callable[[int], bytes | None]
"""Stack map id → the map's value: addresses as u64, innermost first, zero-padded; None when it is gone."""

NamedStack = Callable[[int], Sequence[tuple[str, str, int, bool]] | None]
"""Python stack id → (function, file, line, whether C code called it) of its frames, outermost first; None when it has
no names."""


class Interner:
    """Gives ids to frames and stacks, and keeps the rows that were not written yet. Id 0 means none."""

    def __init__(
        self,
        kernel: KernelSymbols,
        spaces: AddressSpaces,
        raw_stack: RawStack,
        python: NamedStack = lambda number: None,
    ) -> None:
        self._kernel = kernel
        self._spaces = spaces
        self._raw_stack = raw_stack
        self._python = python
        self._frame_ids: dict[tuple[str, str, int], int] = {}
        self._stack_ids: dict[tuple[int, ...], int] = {(): 0}
        self._stack_frames: list[tuple[int, ...]] = [()]
        self._functions: list[str] = [""]
        self._frame_keys: list[tuple[str, str, int]] = [("", "", 0)]
        self._kernel_stacks: dict[int, int] = {}
        self._user_stacks: dict[tuple[int, int, int], int] = {}
        self._python_stacks: dict[int, int] = {0: 0}
        self._new_frames: list[dict[str, object]] = []
        self._new_stacks: list[dict[str, object]] = []
        self.unwound: dict[int, tuple[int, int]] = {}
        """By the id of a stack dump: its stack, and the id of the stack by frame pointers where that is 0."""
        self.unresolved_frames = 0
        self.missing_stacks = 0

    def kernel_frame(self, address: int) -> int:
        """Frame id of a kernel return address."""
        key = ("kernel", "", address)
        if key not in self._frame_ids:
            # A return address points behind the call: one byte back, so that a call at a function's end counts to it.
            function, module, _ = self._kernel.lookup(address - 1)
            self._add_frame(key, function, module or "kernel", "")
        return self._frame_ids[key]

    def kernel_stack(self, map_id: int) -> int:
        """Stack id of a kernel stack without the frames of the probe itself."""
        if map_id < 0:
            return 0
        if map_id not in self._kernel_stacks:
            addresses = self._addresses(map_id)
            frames = [self.kernel_frame(address) for address in addresses]
            names = [self._kernel.lookup(address - 1)[0] for address in addresses[:10]]
            machinery = [i for i, name in enumerate(names) if name.startswith(_PROBE_MACHINERY)]
            own = frames[machinery[-1] + 1 :] if machinery else frames
            self._kernel_stacks[map_id] = self.stack(own[::-1])
        return self._kernel_stacks[map_id]

    def call_site_stack(self, frame: int) -> int:
        """A stack of one frame: all that is known of an allocation whose stack was not taken."""
        return self.stack((frame,)) if frame else 0

    def user_stack(self, pid: int, map_id: int, caller: int, ts_ns: int) -> int:
        """Stack id of a user stack; `caller` is inserted behind the innermost frame when it is code.

        A frame-pointer walk that starts in a function without a frame (a system-call stub, any function at its
        entry) skips that function's caller; the word at the stack pointer is its return address.
        """
        if map_id >= 0 and map_id & STACK_DUMP_BIT:
            stack, map_id = self.unwound.get(map_id & ~STACK_DUMP_BIT, (0, -1))
            if stack:
                return stack
        if map_id < 0:
            return 0
        key = (pid, map_id, caller)
        if key not in self._user_stacks:
            space = self._spaces.at(pid, ts_ns)
            self._user_stacks[key] = self.native_stack(pid, space, self.walked(space, map_id, caller))
        return self._user_stacks[key]

    def walked(self, space: AddressSpace, map_id: int, caller: int) -> list[int]:
        """Program counters of a walk by frame pointers, innermost first, with the caller that it missed."""
        addresses = self._addresses(map_id) if map_id >= 0 else []
        if addresses and caller and space.find(caller) and caller not in addresses[:2]:
            addresses.insert(1, caller)
        return addresses

    def equate(self, pid: int, map_id: int, caller: int, stack: int) -> None:
        """Let a walk by frame pointers, as given to :meth:`user_stack`, stand for a stack that is known otherwise."""
        self._user_stacks[pid, map_id, caller] = stack

    def native_stack(self, pid: int, space: AddressSpace, addresses: Sequence[int]) -> int:
        """Stack id of program counters of one process, innermost first, return addresses but for the first.

        It ends before a return address that is no code: a walk that came through a function without a frame pointer
        goes on with whatever words it meets.
        """
        frames = []
        for depth, address in enumerate(addresses[:MAX_DEPTH]):
            mapping = space.find(address)
            if mapping is None and depth and space.mappings:
                break
            if mapping is None or not mapping.module.path:
                frames.append(self._anonymous_frame(pid, address, int(depth > 0)))
            else:
                offset = address - mapping.start + mapping.file_offset
                frames.append(self._user_frame(mapping.module.path, offset, mapping.module, int(depth > 0)))
        return self.stack(frames[::-1])

    def python_stacks(self, ids: np.ndarray) -> np.ndarray:
        """int32 stack ids of Python stacks by the ids that probes gave them."""
        distinct, group = np.unique(ids, return_inverse=True)
        return np.array([self._python_stack(number) for number in distinct.tolist()], np.int32)[group]

    def _python_stack(self, number: int) -> int:
        if number not in self._python_stacks:
            named = self._python(number)
            if named is None:
                return 0
            self._python_stacks[number] = self.stack([self._python_frame(*frame) for frame in named])
        return self._python_stacks[number]

    def _python_frame(self, function: str, file: str, line: int, entered: bool) -> int:
        key = ("python", f"{file}\0{function}", line << 1 | entered)
        if key not in self._frame_ids:
            self._add_frame(key, function, "", "", file, line, int(entered))
        return self._frame_ids[key]

    def _user_frame(self, path: str, offset: int, module: Module, back: int) -> int:
        key = ("native", path, offset)
        if key not in self._frame_ids:
            function = module.function_at(offset - back) or module.function_at(offset)
            self._add_frame(key, function, path, module.build_id)
        return self._frame_ids[key]

    def _anonymous_frame(self, pid: int, address: int, back: int) -> int:
        """An address that no file is behind: of code made at run time, or no code at all."""
        perf_map, function = self._spaces.jit_function(pid, address - back)
        key = ("native", f"{perf_map}\0{function}" if function else "", address)
        if key not in self._frame_ids:
            self._add_frame(key, function, perf_map, "")
        return self._frame_ids[key]

    def _add_frame(
        self,
        key: tuple[str, str, int],
        function: str,
        module: str,
        build_id: str,
        file: str = "",
        line: int = 0,
        offset: int | None = None,
    ) -> None:
        self._frame_ids[key] = len(self._frame_ids) + 1
        self._functions.append(function)
        self._frame_keys.append(key)
        self.unresolved_frames += not function
        self._new_frames.append(
            {
                "id": self._frame_ids[key],
                "function": function,
                "file": file,
                "line": line,
                "module": module,
                "build_id": build_id,
                "offset": key[2] if offset is None else offset,
                "kind": key[0],
            }
        )

    def forget(self, pids: set[int]) -> None:
        """Drop what only events of these processes could ask for again."""
        self._user_stacks = {key: stack for key, stack in self._user_stacks.items() if key[0] not in pids}

    def stack(self, frames: Sequence[int]) -> int:
        """Stack id of frame ids, outermost first."""
        key = tuple(frames)
        if key not in self._stack_ids:
            self._stack_ids[key] = len(self._stack_ids)
            self._stack_frames.append(key)
            self._new_stacks.append({"id": self._stack_ids[key], "frames": list(key)})
        return self._stack_ids[key]

    def functions(self, stack: int) -> list[str]:
        """Function names of a stack, outermost first."""
        return [self._functions[frame] for frame in self._stack_frames[stack]]

    def frames(self, stack: int) -> list[tuple[str, str, int, str, int, str]]:
        """(function, file, line, module, offset, kind) of the frames of a stack, outermost first."""
        found = []
        for frame in self._stack_frames[stack]:
            (kind, place, offset), function = self._frame_keys[frame], self._functions[frame]
            where = place.split("\0", 1)[0]
            if kind == "python":
                found.append((function, where, offset >> 1, "", 0, kind))
            else:
                found.append((function, "", 0, where or kind, offset, kind))
        return found

    def _addresses(self, map_id: int) -> list[int]:
        raw = self._raw_stack(map_id)
        if raw is None:
            self.missing_stacks += 1
            return []
        addresses = struct.unpack(f"={len(raw) // 8}Q", raw)
        return list(addresses[: addresses.index(0)] if 0 in addresses else addresses)

    def losses(self, named_since: int = 0) -> list[Loss]:
        """Frames without a name, apart from those that got one later, and stacks that were gone."""
        losses = []
        if unresolved := self.unresolved_frames - named_since:
            losses.append(Loss("symbols", "symbol_unresolved", unresolved, "frames without a name"))
        if self.missing_stacks:
            losses.append(Loss("stack maps", "stack_miss", self.missing_stacks, "stacks gone when read"))
        return losses

    def take_new_rows(self) -> tuple[pa.Table, pa.Table]:
        """(frames, stacks) that were added since the last call."""
        frames = pa.Table.from_pylist(self._new_frames, schema=FRAMES)
        stacks = pa.Table.from_pylist(self._new_stacks, schema=STACKS)
        self._new_frames, self._new_stacks = [], []
        return frames, stacks
