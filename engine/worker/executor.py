"""Executor: the protocol for running an engine's steps.

load ─▶ ready ◀─▶ execute, sample, do_chore
          ├── reset: drop all rows, after a crash
          └── sleep ─▶ asleep ── wake ─▶ ready
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.core.actor_messages import StepDone, StepMasks, StepPlan
from engine.device.device_link import PendingStep
from engine.messages import AdapterRef
from engine.model import ModelConfig
from engine.resolved_config import ResolvedConfig
from engine.transfer.host_store import HostStore


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `load`."""

    resolved: ResolvedConfig
    model_config: ModelConfig
    timeline: tuple[tuple[str, float], ...] = ()  # (phase, seconds)
    # (tokens, seconds) of decode steps, for speculative decoding
    step_times: tuple[tuple[int, float], ...] = ()


class AdapterMemory(Protocol):
    """The adapters of an executor, by digest; any thread may call it."""

    def load(self, ref: AdapterRef, pins: bool = False) -> None:
        """Read an adapter unless it is in memory.

        Args:
            pins: keep it until `unpin`; only pinned adapters may be used by new rows.

        Raises:
            InvalidRequest: the adapter cannot be used.
        """

    def unpin(self, digest: str) -> None:
        """Allow to evict an adapter."""

    def drop(self, digest: str) -> None:
        """Free an adapter, unless it is pinned."""


class Encoder(Protocol):
    """Encodes images; one thread calls it while steps run."""

    def encode(self, pixels: np.ndarray, grid: Sequence[int]) -> np.ndarray:
        """Return the features of one image, [n, D] float32."""


class Executor(Protocol):
    """Runs steps.

    One thread calls all methods except `describe`, `sleep_level`, `adapters`, `encoder`, `host_memory` and `close`.

    Attributes:
        before_layers: `execute` calls this when the inputs of the model's layers are ready.
        take_masks: `execute` calls this after the layers of a step whose rows all need masks, with the step's id and
            the indices of the rows. Returns the masks if all have arrived.
    """

    before_layers: Callable[[], None]
    take_masks: Callable[[int, np.ndarray], StepMasks | None]

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of images; None if the model does not see them."""

    @property
    def adapters(self) -> AdapterMemory | None:
        """The adapters; None if they are not enabled."""

    def load(self) -> Loaded:
        """Load the model and prepare for the first step.

        Raises:
            ConfigError: the device, dtype, checkpoint or memory does not allow the config.
        """

    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        """Launch a step. Returns None if all rows wait for masks and `sample` returns the step's first result."""

    @property
    def host_memory(self) -> HostStore | None:
        """Memory for blocks that left the KV cache; None without it."""

    def sample(self, masks: StepMasks) -> StepDone | PendingStep | None:
        """Sample the rows of a step whose masks have arrived. Returns None if there are none."""

    def get_mask_timeout(self, plan: StepPlan) -> float:
        """Return how many seconds to wait for masks before the plan: 0 if no row needs one, inf if every row does."""

    def do_chore(self) -> bool:
        """Do one piece of background work, about as long as a few steps. Returns False if none is left."""

    def reset(self) -> None:
        """Drop all rows. Weights and cache memory stay allocated."""

    def sleep(self, level: int) -> None:
        """Free the KV cache, the recorded graphs and the device memory of the weights.

        Args:
            level: 1: move the weights to the host; 2: drop them, and read them again in `wake`.
        """

    def wake(self) -> None:
        """Load and allocate again what `sleep` freed, with an empty batch. After an error it is still asleep."""

    @property
    def sleep_level(self) -> int:
        """Level of the current sleep; 0 while awake."""

    def close(self, *, frees_memory: bool = True) -> None:
        """End. The executor is not used again.

        Args:
            frees_memory: False if a step may still be running and use the memory.
        """

    def describe(self) -> dict[str, str | int]:
        """Return which ops the next step uses, and the progress of recorded graphs and native ops."""
