"""NativeLibrary: the compiled kernels, with their C signatures. Calls release the GIL."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels.cpu.structs import SIGNATURES, TAPE_FUNCTIONS

_ISA_NAMES = (
    "AVX2",
    "AVX-512",
    "AVX-512 with bfloat16 and int8 products",
    "AVX-512, and AMX for products of bfloat16 and int8",
    "NEON",
    "NEON with bfloat16 products",
)
MAX_THREADS = 256


class NativeLibrary:
    """A loaded shared library; several engines may use it, each with its own pool of threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(os.fspath(path))
        self._functions = {}
        self._watch_lock = threading.Lock()
        for name, (result, arguments) in SIGNATURES.items():
            function = self._library[f"troupe_{name}"]
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(f"the native library has no function {name!r}") from None

    @contextmanager
    def watch(self, note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
        """Call `note` with the name and arguments, without the pool, of each call that this thread makes."""
        thread = threading.get_ident()

        def make(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(pool: int, *arguments: Any) -> Any:
                if threading.get_ident() == thread:
                    note(name, arguments)
                return function(pool, *arguments)

            return call

        with self._watch_lock:
            try:
                self.__dict__.update({name: make(name, self._functions[name]) for name in TAPE_FUNCTIONS})
                yield
            finally:
                for name in TAPE_FUNCTIONS:
                    del self.__dict__[name]

    @property
    def has_tiles(self) -> bool:
        """Whether products of bfloat16 run on AMX."""
        return "AMX" in self.isa_name

    @property
    def isa_name(self) -> str:
        """The instruction set of its products."""
        return _ISA_NAMES[self._functions["isa"]()]


class ThreadPool:
    """The threads of one engine's native ops; `handle` is the first argument of most functions."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads={num_threads} must be between 1 and {MAX_THREADS}")
        self.num_threads = num_threads
        self.handle: int = library.make_pool(num_threads)
        finalizer = weakref.finalize(self, library.free_pool, self.handle)
        # When the process ends its threads end with it, and there may be a step still running.
        finalizer.atexit = False


def count_cores() -> int:
    """Return how many cores this process may use: its affinity, and its container's share of them."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(num_cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        # no such file, or "max": no limit
        return num_cores
