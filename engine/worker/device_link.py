"""DeviceLink: copies results to the host, at once on the CPU and asynchronously on CUDA.

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

from engine.core.actor_messages import StepDone


class Fetch(Protocol):
    """A copy of device tensors to the host, possibly in progress."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> list[np.ndarray]:
        """Wait for the copy and return the tensors' values."""


class DeviceLink(Protocol):
    """Device-specific parts of launching a step and reading its results."""

    is_immediate: bool  # results are available as soon as a step is launched

    def enter_thread(self) -> None:
        """Prepare the calling thread for launching steps."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Start copying tensors to the host. They must not be modified afterwards."""

    def launch_section(self) -> AbstractContextManager[None]:
        """Return a context for code that must not wait for the device."""


@dataclass(frozen=True, slots=True)
class HostFetch:
    """Values of tensors that are on the host already."""

    arrays: list[np.ndarray]

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[np.ndarray]:
        return self.arrays


class HostLink:
    """The link to the CPU."""

    is_immediate = True

    def enter_thread(self) -> None:
        """Do nothing: the CPU has no streams."""

    def fetch(self, tensors: Sequence[Tensor]) -> HostFetch:
        return HostFetch([tensor.numpy() for tensor in tensors])

    def launch_section(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step whose results are being copied, or computed by later stages of a pipeline.

    Gated rows of a step share its fetch.
    """

    fetch: Fetch
    finish: Callable[[list[np.ndarray]], StepDone | None]  # None: all rows wait for masks

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.fetch.is_done()

    def wait(self) -> StepDone | None:
        """Wait for the step and return its results, if it has any without masks."""
        return self.finish(self.fetch.wait())


def wait_for(answer: StepDone | PendingStep | None) -> StepDone | None:
    """Return the results of a step, if it has any, after waiting for them."""
    return answer.wait() if isinstance(answer, PendingStep) else answer
