"""NativeSwap: the C++ ops from the first step when they are built already, otherwise as soon as they are.

start ─▶ library in the cache ─▶ its ops, before the weights are packed
      └▶ being built ─▶ follow: thread waits ─▶ repacks one matrix at a time ─▶ model.ops replaced
                        executor thread: steps all the while, on what is there
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from engine.model import DecoderModel, ModelConfig
from engine.model.weight_memory import estimate_head_copy
from kernels import Ops
from kernels.cpu import NativeBuild, count_native_threads, make_native_ops
from kernels.cpu.layers import can_run
from kernels.cpu.scratch import estimate_scratch
from kernels.ops import StepShape

logger = logging.getLogger("troupe.worker")
_LOOK_S = 0.2  # how often a thread that waits for the compiler looks whether it is still wanted


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
        self._is_at_work = False  # the model was packed for them from the start
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

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
        if can_run(self._dtype):
            self._build.start()
            if waits and not self._build.is_done:
                logger.info("native ops: being built; the start waits for them")
                self._build.wait()
        ops = self._make_ops()
        if ops is not None:
            self._is_at_work = True
            logger.info("native ops: %s, from the first step on", self.status)
        return ops

    def follow(self, model: DecoderModel) -> None:
        """Move the model over when the ops are built; returns at once."""
        if self._is_at_work:
            return
        if not self._is_awaited:
            logger.info("native ops: %s; plain torch goes on", self.status)
            return
        logger.info("native ops: being built in the background; plain torch until then")
        self._thread = threading.Thread(
            target=self._change_over, args=(model,), name="troupe-native-swap", daemon=True
        )
        self._thread.start()

    @property
    def _is_awaited(self) -> bool:
        """Whether the ops may come while the engine runs."""
        is_in_vain = self._build.is_done and self._build.library is None
        return not self._is_at_work and not is_in_vain and can_run(self._dtype)

    def estimate_move(self, config: ModelConfig) -> int:
        """Bytes that `follow` will take beside the model as it is: the copy of a tied head, or one matrix twice."""
        if not self._is_awaited:
            return 0
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        widths = [2 * config.intermediate_size, num_heads * config.head_dim]
        widths += [] if config.tie_word_embeddings else [config.vocab_size]
        matrix_bytes = max(widths) * config.hidden_size * self._dtype.itemsize
        return max(2 * matrix_bytes, estimate_head_copy(config, self._dtype))

    def estimate_scratch(self, shape: StepShape) -> int:
        """As `Ops.estimate_scratch` of the ops that are awaited; 0 where none are."""
        return estimate_scratch(shape, count_native_threads(self._num_threads)) if self._is_awaited else 0

    def stop(self) -> None:
        """Leave the model as it is from now on."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def join(self) -> None:
        """Wait until the model has changed over, or never will."""
        if self._thread is not None:
            self._thread.join()

    def _change_over(self, model: DecoderModel) -> None:
        start = time.monotonic()
        while not self._build.is_done and not self._is_stopped.is_set():
            self._build.wait(_LOOK_S)
        if self._is_stopped.is_set():
            return
        ops, built = self._make_ops(), time.monotonic()
        if ops is None:
            logger.info("native ops: %s; plain torch goes on", self.status)
            return
        with torch.inference_mode():
            is_changed = model.repack(ops, self._is_stopped.is_set)
        if is_changed:
            logger.info(
                "native ops: %s after %.1f s; the weights were repacked in %.1f s",
                *(self.status, built - start, time.monotonic() - built),
            )

    def _make_ops(self) -> Ops | None:
        library = self._build.library
        if library is None or not can_run(self._dtype):
            return None
        return make_native_ops(library, self._num_threads)
