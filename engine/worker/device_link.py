"""DeviceLink: how results come back to the host. On the CPU they are there; on CUDA they follow later.

forward stream   forward N │ sample N │ forward N+1 │ sample N+1 │
copies stream                         └ tokens of N ─▶ pinned memory, event
host             launch N, launch N+1, ... then read N
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.messages import StepDone


class Fetch(Protocol):
    """Device tensors on their way to the host."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> list[np.ndarray]:
        """The tensors' values, once they are there."""


class DeviceLink(Protocol):
    """What differs between devices in bringing a step to the device and its results back."""

    is_immediate: bool  # results are there when a step has been launched

    def enter_thread(self) -> None:
        """Called by the thread that will launch steps, before it does."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Start to copy tensors to the host; they must not be written to afterwards."""

    def launch_section(self) -> AbstractContextManager[None]:
        """Wraps whatever must not wait for the device."""


@dataclass(frozen=True, slots=True)
class HostFetch:
    """Tensors that are on the host already."""

    arrays: list[np.ndarray]

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[np.ndarray]:
        return self.arrays


class HostLink:
    """The link to the CPU."""

    is_immediate = True

    def enter_thread(self) -> None:
        """The CPU has no streams."""

    def fetch(self, tensors: Sequence[Tensor]) -> HostFetch:
        return HostFetch([tensor.numpy() for tensor in tensors])

    def launch_section(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step whose results are on their way."""

    fetch: Fetch
    finish: Callable[[list[np.ndarray]], StepDone]

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.fetch.is_done()

    def wait(self) -> StepDone:
        """The step's answer."""
        return self.finish(self.fetch.wait())
