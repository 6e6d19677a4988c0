"""Timeline: where the start-up time went, as a short table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Timeline:
    """Phases of the start, in seconds.

    Args:
        start: `time.perf_counter()` at the program's first line.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self._phases: list[tuple[str, float]] = []
        self._parallel: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str, is_parallel: bool = False) -> Iterator[None]:
        """Measure a block."""
        begin = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - begin, is_parallel)

    def add(self, name: str, seconds: float, is_parallel: bool = False) -> None:
        (self._parallel if is_parallel else self._phases).append((name, seconds))

    def extend(self, phases: Iterable[tuple[str, float]]) -> None:
        """Take over the phases of the engine."""
        self._phases += phases

    def table(self) -> str:
        """Return one line per phase, concurrent phases last, and the whole time."""
        total = time.perf_counter() - self.start
        rows = [(name, seconds, "") for name, seconds in self._phases]
        rows += [(name, seconds, " (meanwhile)") for name, seconds in self._parallel]
        rows.append(("start-up", total, " in all"))
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"  {name:<{width}} {seconds:7.2f} s{note}" for name, seconds, note in rows)
