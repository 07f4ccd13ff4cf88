"""Frames and stacks by id: what probes saw as addresses becomes rows of the `frames` and `stacks` tables.

Identity of a frame is (kind, module, file offset), so that a stack is the same in two processes that map a library
at different addresses; of a Python frame (file and function, line).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from leakscope.model.recording import Loss
from leakscope.model.tables import FRAMES, STACKS
from leakscope.record.symbols.address_space import AddressSpace, AddressSpaces, Module
from leakscope.record.symbols.kernel import KernelSymbols

_PROBE_MACHINERY = ("__traceiter_", "__bpf_trace_", "bpf_trace_run", "bpf_get_stack", "bpf_prog_")
MAX_DEPTH = 127

NamedStack = Callable[[int], Sequence[tuple[str, str, int, bool]] | None]
"""Python stack id → (function, file, line, whether C code called it) of its frames, outermost first; None when it has
no names."""


class Interner:
    """Gives ids to frames and stacks, and keeps the rows that were not written yet. Id 0 means none."""

    def __init__(
        self,
        kernel: KernelSymbols,
        spaces: AddressSpaces,
        python: NamedStack = lambda number: None,
    ) -> None:
        self._kernel = kernel
        self._spaces = spaces
        self._python = python
        self._frame_ids: dict[tuple[str, str, int], int] = {}
        self._stack_ids: dict[tuple[int, ...], int] = {(): 0}
        self._stack_frames: list[tuple[int, ...]] = [()]
        self._functions: list[str] = [""]
        self._frame_keys: list[tuple[str, str, int]] = [("", "", 0)]
        self._new_frames: list[dict[str, object]] = []
        self._new_stacks: list[dict[str, object]] = []
        self.unresolved_frames = 0

    def kernel_frame(self, address: int) -> int:
        """Frame id of a kernel return address."""
        key = ("kernel", "", address)
        if key not in self._frame_ids:
            # A return address points behind the call: one byte back, so that a call at a function's end counts to it.
            function, module, _ = self._kernel.lookup(address - 1)
            self._add_frame(key, function, module or "kernel", "")
        return self._frame_ids[key]

    def kernel_stack(self, addresses: Sequence[int]) -> int:
        """Stack id of a kernel stack, innermost first, without the frames of the probe itself."""
        names = [self._kernel.lookup(address - 1)[0] for address in addresses[:10]]
        machinery = [i for i, name in enumerate(names) if name.startswith(_PROBE_MACHINERY)]
        own = addresses[machinery[-1] + 1 :] if machinery else addresses
        return self.stack([self.kernel_frame(address) for address in reversed(own)])

    def call_site_stack(self, frame: int) -> int:
        """A stack of one frame: all that is known of an allocation whose stack was not taken."""
        return self.stack((frame,)) if frame else 0

    def native_stack(self, pid: int, space: AddressSpace, addresses: Sequence[int]) -> int:
        """Stack id of program counters of one process, innermost first, return addresses but for the first.

        It ends before a return address that is no code: a walk that came through a function without a frame pointer
        goes on with whatever words it meets.
        """
        known = space.frames
        frames: list[int] = []
        for address in addresses[:MAX_DEPTH]:
            frame = known.get(address)
            if frame is None:
                frame = self._new_frame(pid, space, address, int(len(frames) > 0))
                if not frame:
                    break
            frames.append(frame)
        return self.stack(frames[::-1])

    def _new_frame(self, pid: int, space: AddressSpace, address: int, back: int) -> int:
        """Frame id of a program counter that its address space does not know yet, 0 for a return address of no code."""
        mapping = space.find(address)
        if mapping is None and back and space.mappings:
            return 0
        if mapping is None:
            return self._nameless_frame(address)
        if not mapping.module.path:
            return self._anonymous_frame(pid, address, back)
        offset = address - mapping.start + mapping.file_offset
        frame = self._user_frame(mapping.module.path, offset, mapping.module, back)
        space.frames[address] = frame
        return frame

    def python_stack(self, number: int) -> int | None:
        """Stack id of a Python stack by the number that a probe gave it, given out once; None when it has no names."""
        named = self._python(number)
        return None if named is None else self.stack([self._python_frame(*frame) for frame in named])

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
        """An address in memory that no file is behind: code made at run time."""
        perf_map, function = self._spaces.jit_function(pid, address - back)
        if not function:
            return self._nameless_frame(address)
        key = ("native", f"{perf_map}\0{function}", address)
        if key not in self._frame_ids:
            self._add_frame(key, function, perf_map, "")
        return self._frame_ids[key]

    def _nameless_frame(self, address: int) -> int:
        key = ("native", "", address)
        if key not in self._frame_ids:
            self._add_frame(key, "", "", "")
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

    def losses(self, named_since: int = 0) -> list[Loss]:
        """Frames without a name, apart from those that got one later."""
        unresolved = self.unresolved_frames - named_since
        return [Loss("symbols", "symbol_unresolved", unresolved, "frames without a name")] if unresolved else []

    def take_new_rows(self) -> tuple[pa.Table, pa.Table]:
        """(frames, stacks) that were added since the last call."""
        frames = pa.Table.from_pylist(self._new_frames, schema=FRAMES)
        stacks = pa.Table.from_pylist(self._new_stacks, schema=STACKS)
        self._new_frames, self._new_stacks = [], []
        return frames, stacks
