"""Sampler: samples one token per row from a step's logits.

    logits ─▶ penalties ─▶ logit_bias, allowed ids ─▶ bad words ─▶ grammar mask ─▶ min_tokens
           ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ draw (noise of seed, position, token id)

Each operation runs only on the rows that need it, selected by arrays on the host; nothing here waits for the device.
A row's token never depends on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import BROKEN_LOGITS, NO_TOKEN_LEFT
from engine.device.device_link import pick_rows, put_rows
from engine.worker.sampling.logprobs import SampledLogprobs, compute_logprobs
from engine.worker.sampling.state import DrawKind, RowFlag, SamplingState
from kernels import Ops
from kernels.ops import DrawRows
from kernels.torch.sampling import find_sound_rows, make_row_keys, unpack_bitmask
from kernels.upload import upload

EDIT_FLAGS = RowFlag.PENALTIES | RowFlag.EDITS | RowFlag.BAD_WORDS | RowFlag.MIN_TOKENS
HISTORY_FLAGS = RowFlag.PENALTIES | RowFlag.BAD_WORDS


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step."""

    token_ids: Tensor  # [R] int64 on the device; BROKEN_LOGITS or NO_TOKEN_LEFT if none could be sampled
    logprobs: list[SampledLogprobs] = field(default_factory=list)  # of rows that requested them


class Sampler:
    """Samples the rows of a `SamplingState`, and updates their histories with the sampled tokens."""

    def __init__(self, state: SamplingState, ops: Ops) -> None:
        self.state = state
        self.ops = ops

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, bitmask: np.ndarray | None = None,
        is_right: Tensor | None = None,
    ) -> SampledTokens:
        """Sample one token per row, and append it to the histories of penalties and bad words.

        Args:
            logits: [R, V] float32 on the state's device; overwritten.
            rows: [R] rows of the state; distinct if any of them has penalties or bad words.
            positions: [R] position in the sequence of the token being sampled.
            bitmask: [R, ceil(V/32)] int32, bit 1 = allowed; None: no row has a mask.
            is_right: [R] bool on the device: append the token to the row's histories; None: for all rows.
        """
        masks = None if bitmask is None else upload(bitmask, self.state.device)
        if not len(rows):
            return SampledTokens(torch.empty(0, dtype=torch.int64, device=logits.device))
        flags = self.state.flags[rows]
        used_flags = int(np.bitwise_or.reduce(flags))
        raw, wants_logprobs = None, np.flatnonzero(flags & RowFlag.LOGPROBS)
        if len(wants_logprobs):
            raw = logits.index_select(0, upload(wants_logprobs, logits.device))
        if not used_flags & EDIT_FLAGS and (masks is None or self.ops.draw is not None):
            token_ids = self._draw(logits, rows, positions, masks)
        else:
            # Checked before masking, which could hide a NaN.
            is_sound = find_sound_rows(logits)
            self._edit(logits, rows, positions, flags, used_flags, masks)
            drawn = self._draw(logits, rows, positions)
            token_ids = drawn.where(drawn >= 0, NO_TOKEN_LEFT).where(is_sound, BROKEN_LOGITS)
        if used_flags & HISTORY_FLAGS:
            self.state.append(rows, token_ids if is_right is None else token_ids.where(is_right, -1))
        if raw is None:
            return SampledTokens(token_ids)
        return SampledTokens(token_ids, [self._compute_logprobs(raw, wants_logprobs, rows, token_ids, masks)])

    def is_plainly_greedy(self, rows: np.ndarray) -> bool:
        """Whether these rows take the likeliest token of unchanged logits."""
        kinds, flags = self.state.kind[rows], self.state.flags[rows]
        return bool((kinds == DrawKind.GREEDY).all()) and not (flags & EDIT_FLAGS).any()

    def draw_drafts(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Draw tokens as `sample` does from a drafter's logits, without masks; no history changes.

        Args:
            logits: [R, V] float32; overwritten.
            rows: [R] distinct rows of the state.
            positions: [R] position in the sequence of the token being drawn.

        Returns [R] int64, -1 if a row has no token.
        """
        flags = self.state.flags[rows]
        used_flags = int(np.bitwise_or.reduce(flags))
        if used_flags & EDIT_FLAGS:
            self._edit(logits, rows, positions, flags, used_flags, None)
        return self._draw(logits, rows, positions)

    def _edit(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, flags: np.ndarray, used_flags: int,
        masks: Tensor | None,
    ) -> None:
        """Apply every edit before the temperature, in place."""
        state = self.state
        steps = (
            (RowFlag.PENALTIES, partial(state.counts.penalise, penalise=self.ops.penalise)),
            (RowFlag.EDITS, state.edits.apply),
            (RowFlag.BAD_WORDS, state.bad_words.forbid),
        )
        for flag, step in steps:
            if used_flags & flag:
                places = np.flatnonzero(flags & flag)
                step(logits, places, rows[places])
        if masks is not None:
            self.ops.apply_bitmask(logits, masks)
        if not used_flags & RowFlag.MIN_TOKENS:
            return
        places = np.flatnonzero(positions - state.num_prompt_tokens[rows] < state.edits.min_tokens[rows])
        if len(places):
            state.edits.forbid_end(logits, places, rows[places], masks is not None)

    def _draw(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, masks: Tensor | None = None
    ) -> Tensor:
        """Draw one token per row; masks only for `Ops.draw`. Returns [R] int64, negative if a row has no token."""
        state = self.state
        draws = DrawRows(
            make_row_keys(state.seed[rows], positions), state.temperature[rows], state.top_k[rows],
            state.top_p[rows], state.log_min_p[rows],
        )
        if self.ops.draw is not None:
            return self.ops.draw(logits, draws, masks)
        kinds = state.kind[rows]
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            put_rows(token_ids, places, self._draw_kind(kind, pick_rows(logits, places), draws, places))
        return token_ids

    def _draw_kind(self, kind: int, logits: Tensor, draws: DrawRows, places: np.ndarray) -> Tensor:
        if kind == DrawKind.GREEDY:
            return self.ops.draw_greedy(logits)
        top_k, device = draws.top_k[places], logits.device
        keys, temperature, top_p, log_min_p = (
            upload(array[places], device)
            for array in (draws.keys, draws.temperature, draws.top_p, draws.log_min_p)
        )
        if kind == DrawKind.FULL:
            uses_min_p = bool((draws.log_min_p[places] > -np.inf).any())
            return self.ops.draw_full(logits, keys, temperature, log_min_p if uses_min_p else None)
        width = int(top_k.max()) if kind == DrawKind.NARROW else self.state.vocab_size
        return self.ops.draw_filtered(
            logits, keys, temperature, upload(top_k, device), top_p, log_min_p, width
        )

    def _compute_logprobs(
        self, raw: Tensor, places: np.ndarray, rows: np.ndarray, token_ids: Tensor, masks: Tensor | None
    ) -> SampledLogprobs:
        num_top = self.state.num_logprobs[rows[places]]
        own_ids = pick_rows(token_ids, places)
        allowed = None
        if masks is not None:
            allowed = unpack_bitmask(pick_rows(masks, places), self.state.vocab_size)
        packed = compute_logprobs(raw, own_ids, int(num_top.max()), allowed)
        return SampledLogprobs(places, num_top, np.full(len(places), masks is not None), packed)
