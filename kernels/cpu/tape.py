"""Tape: the calls of a step's layers, recorded while they are made, and made again by few calls of C.

Python costs a decode of a small model more than its arithmetic. A tape keeps what the calls of C were given, and the
operations of torch between them. Their results lie where they lay, so only the inputs of a step change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.plan import NativePlan
from kernels.cpu.states import find_segments
from kernels.cpu.structs import TAPE_FUNCTIONS, ArgumentUnion, CallStruct
from kernels.states import StateSegments

_ALIGNMENT, _PIECE_BYTES = 64, 2**20
_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)
# They bring values to the host, where the code may branch on them.
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Arena:
    """Memory that is given out piece by piece, and used again when it is cleared."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._index = self._end = 0

    def clear(self) -> None:
        self._index = self._end = 0

    def allocate(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        while self._index < len(self._pieces) and self._end + size > len(self._pieces[self._index]):
            self._index, self._end = self._index + 1, 0
        if self._index == len(self._pieces):
            self._pieces.append(torch.empty(max(size, _PIECE_BYTES), dtype=torch.uint8))
        start, self._end = self._end, self._end + size
        return self._pieces[self._index][start : start + num_bytes]


class Tape:
    """Records a function once, and repeats what it did.

    Args:
        arenas: memory for the results of every other layer. All tapes of one thread may share it.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool, arenas: tuple[Arena, Arena]) -> None:
        self._library, self._pool = library, pool
        self._parts: list[Any] = []  # arrays of calls of C, and functions
        self._calls: list[CallStruct] = []
        self._kept: list[object] = []  # what calls point to
        self._arenas = arenas
        self._num_layers = 0
        self._results: tuple[Tensor, ...] = ()
        self.is_complete = True  # whether all that was done can be repeated

    def record(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call the function, whose inputs stay where they are, and keep what it does."""
        for arena in self._arenas:
            arena.clear()
        with self._library.watch(self._add_call), _Watcher(self):
            self._results = function()
        self._end_calls()
        return self._results

    def next_layer(self) -> None:
        """Note that a layer ends: the next one needs no result of the layer before it."""
        self._num_layers += 1
        self._arenas[self._num_layers % 2].clear()

    def repeat(self) -> tuple[Tensor, ...]:
        """Do the same with the present contents of the inputs. The next call overwrites the results."""
        for part in self._parts:
            if callable(part):
                part()
            else:
                self._library.replay(self._pool.handle, part, len(part))
        return self._results

    @staticmethod
    def copy_plan(plan: NativePlan) -> NativePlan:
        """Return a plan whose contents `update` may change."""
        return replace(plan, struct=type(plan.struct).from_buffer_copy(plan.struct))

    @staticmethod
    def copy_segments(segments: StateSegments) -> StateSegments:
        """Return segments whose contents `update` may change."""
        return replace(segments, native=None)

    @staticmethod
    def update(held: NativePlan | StateSegments, new: NativePlan | StateSegments) -> None:
        """Bring the contents of another plan or other segments into those that were recorded."""
        if isinstance(held, NativePlan) and isinstance(new, NativePlan):
            source: ctypes.Structure = new.struct
            target: ctypes.Structure = held.struct
        else:
            assert isinstance(held, StateSegments) and isinstance(new, StateSegments), "both are of one kind"
            if held.native is None:
                return
            target = held.native.struct
            source = find_segments(new, held.native.num_slots, held.native.num_tokens)
        ctypes.memmove(ctypes.byref(target), ctypes.byref(source), ctypes.sizeof(target))

    def _add_call(self, name: str, arguments: tuple[Any, ...]) -> None:
        call = CallStruct(TAPE_FUNCTIONS.index(name))
        for at, argument in enumerate(arguments):
            call.arguments[at] = self._convert(argument)
        self._calls.append(call)

    def _convert(self, argument: Any) -> ArgumentUnion:
        if isinstance(argument, float):
            return ArgumentUnion(number=argument)
        if argument is None or isinstance(argument, int):
            return ArgumentUnion(integer=argument or 0)
        target = getattr(argument, "_obj", argument)  # of `byref`
        self._kept.append(target)
        return ArgumentUnion(integer=ctypes.addressof(target))

    def _end_calls(self) -> None:
        if self._calls:
            self._parts.append((CallStruct * len(self._calls))(*self._calls))
            self._calls = []

    def add_function(self, function: Callable[[], object]) -> None:
        """Keep what is done between calls of C."""
        self._end_calls()
        self._parts.append(function)

    def allocate(self, meta: Tensor) -> Tensor:
        """Return memory for a result of the present layer."""
        found = self._arenas[self._num_layers % 2].allocate(meta.nbytes)
        return found.view(meta.dtype).view(meta.shape)


class _Watcher(TorchDispatchMode):
    """Gives results memory of the tape, and keeps the operations of torch."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or the first step of each process would import torch._dynamo for 1.6 s."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            return self._tape.allocate(func(*args, **{**kwargs, "device": "meta"}))
        results = func(*args, **kwargs)
        if func in _READS:
            self._tape.is_complete = False
            return results
        several = results if isinstance(results, tuple | list) else (results,)
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns):
            self._tape.add_function(lambda: func(*args, **kwargs))
            return results
        sources = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if all(each.untyped_storage().data_ptr() in sources for each in several):
            return results  # views; functions such as `reshape` may return either

        def compute() -> None:
            again = func(*args, **kwargs)
            for target, source in zip(several, again if len(several) > 1 else (again,), strict=True):
                target.copy_(source)

        self._tape.add_function(compute)
        return results
