"""LlamaCppRunner: the same work by llama.cpp, through a prebuilt library and the optional package `gguf`.

All sequences decode as one batch in one context, each with a cache of its own, as in llama.cpp's own
batched benchmark; greedy sampling is an argmax over the logits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from app.bench.workload import Job, find_lengths
from app.config import UsageError
from engine import EngineConfig
from tests.measure.llama_cpp.gguf_file import write_gguf
from tests.measure.llama_cpp.library import FLASH_ATTENTION, Q4_K_M, load_library

BATCH_TOKENS = 2048  # tokens of one call, llama.cpp's default
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
LIBRARY = load_library()
KINDS = {"bfloat16": Kind.BF16, "float16": Kind.F16}
QUANTIZED = {"int8": Kind.Q8_0, "int4": Kind.Q4_0}


def choose_kind(config: EngineConfig) -> Kind:
    """Return the format of the file for the dtype or quantization of our engine; "auto" is float32 on CPU.

    Raises:
        UsageError: a quantization that has no counterpart there.
    """
    if config.quantization == "fp8":
        raise UsageError("--peer llama.cpp: --quantization fp8 is not one of none, int8, int4")
    return QUANTIZED.get(config.quantization) or KINDS.get(config.dtype, Kind.F32)


def _write_mixed(path: Path, num_threads: int) -> Path:
    """Round a file to Q4_K_M, a mixture of Q4_K and Q6_K."""
    target = path.with_name("mixed.gguf")
    params = LIBRARY.llama_model_quantize_default_params()
    params.file_type, params.num_threads = Q4_K_M, num_threads
    if LIBRARY.llama_model_quantize(str(path).encode(), str(target).encode(), params):
        raise UsageError(f"--peer llama.cpp-q4_k_m: it cannot write {target.name}")
    return target


class LlamaCppRunner:
    """A model of llama.cpp, written to a file of its own and dropped with it."""

    def __init__(self, config: EngineConfig, num_threads: int, is_mixed: bool = False) -> None:
        """Args:
        is_mixed: in Q4_K_M, which llama.cpp writes itself, whatever `config` says.
        """
        kind = Kind.BF16 if is_mixed else choose_kind(config)
        self.name = "llama.cpp Q4_K_M" if is_mixed else f"llama.cpp {kind.name}"
        self._num_threads = num_threads
        self._context: Any = None
        self._capacity = (0, 0)  # sequences, tokens of each
        with TemporaryDirectory(prefix="troupe-gguf-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(config.model), path, kind)
            if is_mixed:
                path = _write_mixed(path, num_threads)
            params = LIBRARY.llama_model_default_params()
            params.num_gpu_layers = 0
            # mapped: the pages stay although the name goes
            self._model = LIBRARY.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise UsageError(f"--peer llama.cpp: it cannot load {config.model}")
        self._num_tokens = LIBRARY.llama_vocab_n_tokens(LIBRARY.llama_model_get_vocab(self._model))
        self._batch = LIBRARY.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._inputs = [
            np.ctypeslib.as_array(array, (BATCH_TOKENS,))
            for array in (self._batch.token, self._batch.position, self._batch.has_logits)
        ]
        np.ctypeslib.as_array(self._batch.num_sequences, (BATCH_TOKENS,))[:] = 1

    def run(self, jobs: Sequence[Job]) -> float:
        """As `Runner.run`; every prompt and every answer must have one length."""
        num_in, num_out = find_lengths(jobs, "llama.cpp")
        self._prepare(len(jobs), num_in + num_out)
        prompts = np.array([job.prompt_token_ids for job in jobs])
        start = time.perf_counter()
        self.generate(prompts, num_out)
        return time.perf_counter() - start

    def generate(self, prompts: np.ndarray, num_tokens: int) -> np.ndarray:
        """Greedy answers [N, num_tokens] to prompts [N, L]."""
        num, length = prompts.shape
        self._prepare(num, length + num_tokens)
        LIBRARY.llama_memory_clear(LIBRARY.llama_get_memory(self._context), False)
        answers = np.empty((num, num_tokens), dtype=np.int64)
        answers[:, 0] = self._prefill(prompts)
        rows, ones = np.arange(num), np.ones(num, dtype=bool)
        for at in range(1, num_tokens):
            positions = np.full(num, length + at - 1)
            answers[:, at] = self._forward(answers[:, at - 1], positions, rows, ones)
        return answers

    def close(self) -> None:
        """As `Runner.close`."""
        if self._context is not None:
            LIBRARY.llama_free(self._context)
        LIBRARY.llama_batch_free(self._batch)
        LIBRARY.llama_model_free(self._model)

    def _prepare(self, num_sequences: int, length: int) -> None:
        """A context with room for that many sequences of that length."""
        if num_sequences > MAX_SEQUENCES:
            raise UsageError(f"--batch-size={num_sequences} must be at most {MAX_SEQUENCES} with llama.cpp")
        if num_sequences == self._capacity[0] and length <= self._capacity[1]:
            return
        if self._context is not None:
            LIBRARY.llama_free(self._context)
        params = LIBRARY.llama_context_default_params()
        params.num_tokens = num_sequences * length
        params.num_sequences = num_sequences
        params.num_batch_tokens = BATCH_TOKENS
        params.num_threads = params.num_prompt_threads = self._num_threads
        params.flash_attention = FLASH_ATTENTION
        params.is_cache_shared = False
        params.has_no_timings = True
        self._context = LIBRARY.llama_init_from_model(self._model, params)
        if not self._context:
            raise UsageError(
                f"--peer llama.cpp: no context for {num_sequences} sequences of {length} tokens; is there memory?"
            )
        self._capacity = (num_sequences, length)

    def _prefill(self, prompts: np.ndarray) -> np.ndarray:
        """The first token [N] of every answer."""
        num, length = prompts.shape
        positions = np.tile(np.arange(length), num)
        sequences = np.repeat(np.arange(num), length)
        tokens, is_last = prompts.ravel(), positions == length - 1
        parts = [slice(at, at + BATCH_TOKENS) for at in range(0, len(tokens), BATCH_TOKENS)]
        return np.concatenate([self._forward(tokens[at], positions[at], sequences[at], is_last[at]) for at in parts])

    def _forward(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, is_last: np.ndarray
    ) -> np.ndarray:
        """Compute tokens [T]; returns the greedy token after each that is the last of its sequence."""
        count = self._batch.num_tokens = len(tokens)
        for array, values in zip(self._inputs, (tokens, positions, is_last), strict=True):
            array[:count] = values
        lists = self._batch.sequence
        for index, sequence in enumerate(sequences.tolist()):
            lists[index][0] = sequence
        code = LIBRARY.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")
        num_rows = int(is_last.sum())
        if not num_rows:
            return np.empty(0, dtype=np.int64)
        logits = np.ctypeslib.as_array(LIBRARY.llama_get_logits(self._context), (num_rows, self._num_tokens))
        return logits.argmax(axis=1)
