"""Inputs of ops that keep a state per request: short convolutions and gated linear recurrences.

A step's run of tokens is cut into segments. Each reads its state from one slot and writes it to another one, so that
a state in the middle of a run can be kept for the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.upload import upload

CONV_WIDTHS = (2, 3, 4)
MAX_TOKENS = 32  # of a run that Triton computes token after token
CHUNK = 32  # tokens of other runs that it computes together


@dataclass(frozen=True, slots=True)
class StateTables:
    """The segments of a step on its device. A recorded step reads the same memory in every replay."""

    segments: Tensor  # [S, 4] int64: source, target, first token, number of tokens
    bounds: Tensor  # [R + 1] int64: first segment of each run, and the end of the last
    chunks: Tensor | None = None  # [N, 2] int64: first token and end of each chunk of the long runs
    has_short: bool = True  # whether some run is computed token after token


@dataclass(eq=False, slots=True)
class StateSegments:
    """The segments of a step, run after run; they cover its tokens in order."""

    source: np.ndarray  # [S] int64, slot that is read; negative: a state of zeros
    target: np.ndarray  # [S] int64, slot that is written
    first: np.ndarray  # [S] int64, first token
    count: np.ndarray  # [S] int64, number of tokens, may be 0
    run_ends: np.ndarray  # [R] int64, index after each run's last segment
    native: Any = None  # what native ops computed from it
    tables: StateTables | None = None  # once an op of a device has asked for them

    def find_tables(self, device: torch.device) -> StateTables:
        """Return the segments on the device; they are uploaded once a step."""
        if self.tables is None:
            rows = np.stack((self.source, self.target, self.first, self.count), axis=1)
            bounds = np.concatenate(([0], self.run_ends))
            chunks, has_short = self._cut_chunks()
            # The bounds come last, so that all begin at a multiple of 16 bytes, for which kernels are compiled.
            flat = upload(np.concatenate((rows.ravel(), chunks.ravel(), bounds)), device)
            segments, cuts, starts = flat.split((rows.size, chunks.size, len(bounds)))
            self.tables = StateTables(segments.view(-1, 4), starts, cuts.view(-1, 2), has_short)
        return self.tables

    def _cut_chunks(self) -> tuple[np.ndarray, bool]:
        """Return the chunks [N, 2] of the long runs, and whether there are others."""
        sizes = np.diff(self.run_ends, prepend=0)
        runs = np.repeat(np.arange(len(sizes)), sizes)
        is_long = np.bincount(runs, weights=self.count, minlength=len(sizes)) > MAX_TOKENS
        first, stop = (each[is_long[runs]] for each in (self.first, self.first + self.count))
        pairs = [
            (start, min(start + CHUNK, end))
            for begin, end in zip(first.tolist(), stop.tolist(), strict=True)
            for start in range(begin, end, CHUNK)
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2), not is_long.all()


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """Shape and weights of one recurrence.

    Tokens are rows [queries | keys | values] in the order of the offsets; G groups of heads share queries and keys.
    """

    num_heads: int
    num_groups: int
    key_size: int
    value_size: int
    query_at: int
    key_at: int
    value_at: int
    a_log: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32
    skip: Tensor | None  # [H] float32, factor of the values in the output


class RunConv(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        segments: StateSegments,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Convolve each channel with its last inputs.

        Args:
            x: [T, C] float32, rows contiguous.
            weight: [K, C] float32, the newest input last; K is 2 to 4.
            bias: [C] float32.
            states: [slots, K - 1, C] float32, the inputs before the next token; overwritten.
            has_silu: whether SiLU follows.

        Returns [T, C] float32.
        """


class ScanStates(Protocol):
    def __call__(
        self,
        mixed: Tensor,
        dt: Tensor,
        beta: Tensor | None,
        weights: ScanWeights,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        """Run a gated linear recurrence over each run; the state S of a head is [key_size, value_size].

        The step size is softplus(dt + dt_bias), the decay exp(-exp(a_log) * step size). With beta this is the gated
        delta rule, S = decay S + k (sigmoid(beta) (v - decay S^T k))^T, with queries and keys scaled to length 1 and
        queries divided by sqrt(key_size); without it Mamba-2, S = decay S + k (step size * v)^T. The output is
        S^T q + skip v. Sources: Yang et al., 2024 (Gated DeltaNet); Dao and Gu, 2024 (Mamba-2).

        Args:
            mixed: [T, C] float32, contiguous.
            dt, beta: [T, H] float32, rows contiguous, with the same strides.
            states: [slots, H, key_size, value_size] float32, overwritten.

        Returns [T, H * value_size] float32.
        """
