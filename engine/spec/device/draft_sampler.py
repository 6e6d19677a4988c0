"""DraftSampler: draws drafts as the request itself would, at a draft temperature learned from acceptance."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.worker.sampling.sampler import Sampler
from engine.worker.sampling.state import DrawKind

# An underconfident drafter is right more often if its distribution is sharpened.
TEMPERATURES = (0.02, 0.3, 0.5, 0.7, 1.0)  # the first is practically greedy
FIRST = 1  # index of the temperature at the start
MEMORY = 0.02  # weight of a new draft in the acceptance of its temperature
EXPLORE_EVERY = 16  # every so many proposals try another temperature


class DraftSampler:
    """Draws with the request's own parameters, history and noise, so that a draft often equals the model's draw.

    Drafts need no mask: the grammar thread cuts them before they are verified.
    Source: Daliri, Musco and Suresh, 2024 (coupling by Gumbel noise without communication).

    Args:
        is_greedy: take the likeliest token instead.
    """

    def __init__(self, sampler: Sampler, is_greedy: bool) -> None:
        self._sampler = sampler
        self._is_greedy = is_greedy
        self._rates = [0.5] * len(TEMPERATURES)
        self._num_proposals = 0
        self._current = FIRST
        # Row -> (known tokens before the drafts, index of the temperature, drafts).
        self._drawn: dict[int, tuple[int, int, list[int]]] = {}

    @property
    def temperature(self) -> float:
        """The draft temperature with the highest acceptance so far."""
        return TEMPERATURES[int(np.argmax(self._rates))]

    def begin(self) -> None:
        """Choose the temperature of one round of proposals."""
        self._num_proposals += 1
        best = int(np.argmax(self._rates)) if len(set(self._rates)) > 1 else FIRST
        is_trial = self._num_proposals % EXPLORE_EVERY == 0
        self._current = (self._num_proposals // EXPLORE_EVERY) % len(TEMPERATURES) if is_trial else best

    def draw(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Draw one draft per row, [R] int64.

        Args:
            logits: [R, V] float32 of the drafter; overwritten.
            positions: [R] position in the sequence of the token being drawn.
        """
        if self._is_greedy:
            return logits.argmax(dim=-1)
        is_random = self._sampler.state.kind[rows] != DrawKind.GREEDY
        if is_random.any():
            logits.div_(TEMPERATURES[self._current])
        return self._sampler.draw_drafts(logits, rows, positions).clamp(min=0)

    def keep(self, rows: np.ndarray, lengths: np.ndarray, drafts: list[list[int]]) -> None:
        """Remember the drafts, for `settle`."""
        for row, length, token_ids in zip(rows.tolist(), lengths.tolist(), drafts, strict=True):
            self._drawn[row] = (length, self._current, token_ids)

    def forget(self, row: int) -> None:
        """Forget the drafts of a row, which another request takes over."""
        self._drawn.pop(row, None)

    def settle(self, row: int, length: int, token_ids: list[int], num_accepted: int) -> int:
        """Take the result of verifying drafts that follow `length` known tokens.

        Returns how many drafts were drawn there, if these are among them; otherwise 0.
        """
        drawn_length, current, drawn = self._drawn.pop(row, (0, FIRST, []))
        is_own = drawn_length == length and drawn[: len(token_ids)] == token_ids
        if is_own and self._sampler.state.kind[row] != DrawKind.GREEDY:
            rate = self._rates[current]
            for is_right in [1.0] * num_accepted + [0.0] * (num_accepted < len(token_ids)):
                rate += MEMORY * (is_right - rate)
            self._rates[current] = rate
        return len(drawn) if is_own else 0


def to_lists(columns: list[Tensor], members: list[np.ndarray], num_rows: int) -> list[list[int]]:
    """Return the drafts of each row: column j contains the j-th draft of the rows `members[j]`."""
    found: list[list[int]] = [[] for _ in range(num_rows)]
    if columns:
        token_ids = iter(torch.cat(columns).tolist())
        for places in members:
            for place in places.tolist():
                found[place].append(next(token_ids))
    return found
