"""NativeSwap: the C++ ops from the first step when they are built already, otherwise as soon as they are.

start ─▶ library in the cache ─▶ its ops, before the weights are packed
      └▶ being built ─▶ steps on torch's ops ─▶ built: `move_next` between steps, one matrix each ─▶ model.ops replaced
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from engine.model import Model, ModelConfig
from engine.model.weight_memory import estimate_head_copy
from kernels import Ops
from kernels.cpu import NativeBuild, count_native_threads, make_native_ops
from kernels.cpu.layers import can_run
from kernels.cpu.scratch import estimate_scratch
from kernels.ops import StepShape

logger = logging.getLogger("troupe.worker")


class NativeSwap:
    """Speeds a model on the CPU up; without a compiler, or for a dtype it lacks, nothing changes.

    Args:
        num_threads: of the native ops; None: one per core.
        build: finds or builds the library; default: in the user's cache.
    """

    def __init__(self, dtype: torch.dtype, num_threads: int | None, build: NativeBuild | None = None) -> None:
        self._dtype = dtype
        self._num_threads = num_threads
        self._build = build or NativeBuild()
        self._is_over = not can_run(dtype)  # the model has the native ops, or will never have them
        self._moves: Iterator[None] | None = None

    @property
    def status(self) -> str:
        """In one line: whether they are ready, being built, or why there are none."""
        if not can_run(self._dtype):
            return f"not available for {str(self._dtype).removeprefix('torch.')}"
        return self._build.status

    def start(self, waits: bool = False) -> Ops | None:
        """Begin; the ops when they are there at once.

        Args:
            waits: for the compiler, so that None means that there will be none.
        """
        if not self._is_over:
            self._build.start()
            if waits and not self._build.is_done:
                logger.info("native ops: being built; the start waits for them")
                self._build.wait()
        # This is read before the library: a model moves later to what a build brings in between.
        self._is_over = self._is_over or self._build.is_done
        ops = self._make_ops() if self._is_over else None
        logger.info("native ops: %s", self.status)
        return ops

    @property
    def has_move(self) -> bool:
        """Whether the build has ended and the model has not moved over yet."""
        return not self._is_over and self._build.is_done

    def move_next(self, model: Model) -> None:
        """Repack one more matrix of the model; the last call gives it the native ops. Call it between two steps.

        The matrices that are moved and those that are not hold the same values, so steps may run in between.
        """
        try:
            if self._moves is None:
                ops = self._make_ops()
                self._moves = iter(()) if ops is None else model.repack(ops)
            with torch.inference_mode():
                next(self._moves)
        except StopIteration:
            self._is_over = True
            logger.info("native ops: %s; the model runs on %s", self.status, model.ops.name)
        except RuntimeError as error:  # all that torch says of a lack of memory
            self._is_over = True
            logger.warning("native ops: the weights could not be repacked: %s", error)

    def estimate_move(self, config: ModelConfig) -> int:
        """Bytes that moving takes beside the model as it is: the copy of a tied head, or one matrix twice."""
        if self._is_over:
            return 0
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        widths = [2 * config.intermediate_size, num_heads * config.head_dim]
        widths += [] if config.tie_word_embeddings else [config.vocab_size]
        matrix_bytes = max(widths) * config.hidden_size * self._dtype.itemsize
        return max(2 * matrix_bytes, estimate_head_copy(config, self._dtype))

    def estimate_scratch(self, shape: StepShape) -> int:
        """As `Ops.estimate_scratch` of the ops that are awaited; 0 where none are."""
        return 0 if self._is_over else estimate_scratch(shape, count_native_threads(self._num_threads))

    def _make_ops(self) -> Ops | None:
        library = self._build.library
        if library is None or not can_run(self._dtype):
            return None
        return make_native_ops(library, self._num_threads)
