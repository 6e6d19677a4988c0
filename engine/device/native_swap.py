"""NativeSwap: uses the C++ ops from the first step if their library is built, else moves to them after the build.

start ─▶ library in the cache ─▶ its ops, before the weights are packed
      └▶ being built ─▶ steps on torch's ops ─▶ built: `move_next` between steps, one matrix each ─▶ model.ops replaced
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from engine.model import ModelConfig
from engine.model.weight_memory import estimate_head_copy, measure_layer
from kernels import Ops
from kernels.cpu import NativeBuild, count_native_threads, make_native_ops
from kernels.cpu.pieces import turn_into_pieces
from kernels.cpu.scratch import estimate_scratch
from kernels.cpu.weights import DTYPES
from kernels.ops import KVCache, StepShape

logger = logging.getLogger("troupe.worker")


class Repackable(Protocol):
    """A model or drafter whose matrices can be moved to other ops."""

    @property
    def ops(self) -> Ops:
        """The kernels that it calls."""

    def repack(self, ops: Ops) -> Iterator[None]:
        """Move to other ops, one matrix per iteration."""


class NativeSwap:
    """Moves a model on the CPU to native ops. Without a compiler, or for other dtypes, the model stays as it is."""

    def __init__(self, dtype: torch.dtype, num_threads: int | None, build: NativeBuild | None = None) -> None:
        self._dtype = dtype
        self._num_threads = num_threads
        self._build = build or NativeBuild()
        self.is_over = dtype not in DTYPES  # the model uses the native ops, or never will
        self._moves: Iterator[None] | None = None

    @property
    def status(self) -> str:
        """One line: the ops are ready, being built, or not available and why."""
        if self._dtype not in DTYPES:
            return f"not available for {str(self._dtype).removeprefix('torch.')}"
        return self._build.status

    def start(self, waits: bool = False) -> Ops | None:
        """Start the build if necessary. Returns the ops if they are available, else None.

        Args:
            waits: wait for the compiler; None then means that native ops are not available at all.
        """
        if not self.is_over:
            self._build.start()
            if waits and not self._build.is_done:
                logger.info("native ops: waiting for the build")
                self._build.wait()
        # Read is_done before the library: if the build ends in between, the model moves to the ops later.
        self.is_over = self.is_over or self._build.is_done
        ops = self._make_ops() if self.is_over else None
        logger.info("native ops: %s", self.status)
        return ops

    @property
    def has_move(self) -> bool:
        """Whether the build has ended and the model has not been moved yet."""
        return not self.is_over and self._build.is_done

    def move_next(self, model: Repackable, kv_caches: Sequence[KVCache]) -> None:
        """Repack one more matrix of the model; the last call sets `model.ops`. Call it between two steps.

        Repacking does not change values, so steps may run between calls. The last call also reorders the caches.
        """
        try:
            if self._moves is None:
                ops = self._make_ops()
                self._moves = iter(()) if ops is None else model.repack(ops)
            with torch.inference_mode():
                next(self._moves)
        except StopIteration:
            self.is_over = True
            if model.ops.has_pieces:
                # Layers of different groups share memory, with the same shape: see `LoadedModel`.
                for pair in {keys.data_ptr(): (keys, values) for keys, values in kv_caches}.values():
                    turn_into_pieces(*pair)
            logger.info("native ops: %s; the model runs on %s", self.status, model.ops.name)
        except RuntimeError as error:  # torch has no subclass for missing CPU memory
            self.is_over = True
            logger.warning("native ops: the weights could not be repacked: %s", error)

    def estimate_move(self, config: ModelConfig) -> int:
        """Return the additional bytes that moving needs: the copy of a tied head, or one matrix twice.

        All experts of a layer are moved at once.
        """
        if self.is_over:
            return 0
        head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        largest = max(head, *(measure_layer(spec).largest for spec in config.layer_specs))
        return max(2 * largest * self._dtype.itemsize, estimate_head_copy(config, self._dtype))

    def estimate_scratch(self, shape: StepShape) -> int:
        """Return `estimate_scratch` of the native ops; 0 if the model does not move to them."""
        return 0 if self.is_over else estimate_scratch(shape, count_native_threads(self._num_threads))

    def _make_ops(self) -> Ops | None:
        library = self._build.library
        if library is None or self._dtype not in DTYPES:
            return None
        return make_native_ops(library, self._num_threads)
