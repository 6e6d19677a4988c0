"""Executor: what runs the steps of an engine, and what it has made of the config.

load ─▶ ready ◀─▶ execute, sample, do_chore
          ├── reset: forget all rows, after a crash
          └── sleep ─▶ asleep ── wake ─▶ ready
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.config import ResolvedConfig
from engine.messages import StepDone, StepMasks, StepPlan
from engine.model import ModelConfig
from engine.worker.device_link import PendingStep


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found out."""

    resolved: ResolvedConfig
    model_config: ModelConfig
    timeline: tuple[tuple[str, float], ...] = ()  # (phase, seconds)


class Executor(Protocol):
    """One thread calls everything but `describe`, `sleep_level` and `close`."""

    def load(self) -> Loaded:
        """Read the checkpoint and get ready for the first step.

        Raises:
            ConfigError: the device, dtype, checkpoint or memory does not allow what the config asks.
        """

    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        """Launch a step; None when every row waits for its mask, and `sample` gives the only answer."""

    def sample(self, masks: StepMasks) -> StepDone | PendingStep | None:
        """Sample the rows of a step that waited for their masks; None when there are none."""

    def get_mask_patience(self, plan: StepPlan) -> float:
        """Seconds to wait for masks before the plan: 0 if no row needs one, infinity if no row can run without."""

    def do_chore(self) -> bool:
        """Do one piece of what may wait for a quiet moment, about as long as a few steps; False if there is none."""

    def reset(self) -> None:
        """Forget all rows. The weights and the memory of the cache stay."""

    def sleep(self, level: int) -> None:
        """Give back the KV cache and the recordings, and the weights as the level says.

        Args:
            level: 1: the weights stay on the host; 2: they are dropped, and read again by `wake`.
        """

    def wake(self) -> None:
        """Take back what `sleep` gave back; there are no rows. After an error it still sleeps."""

    @property
    def sleep_level(self) -> int:
        """0 while it is awake."""

    def close(self, *, frees_memory: bool = True) -> None:
        """End for good.

        Args:
            frees_memory: the memory, which the next engine needs; False where a step may still be running.
        """

    def describe(self) -> dict[str, str | int]:
        """What the next step will run on, in words; changes while recordings and native ops come in."""
