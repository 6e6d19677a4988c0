"""DraftSampler: draws drafts as the request itself would, at a draft temperature learned from acceptance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.worker.sampling.sampler import Sampler
from engine.worker.sampling.state import DrawKind
from kernels.upload import upload

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

    def draw_chain(
        self, rows: np.ndarray, lengths: np.ndarray, members: np.ndarray, wanted: np.ndarray,
        compute: Callable[[int, Tensor | None, Tensor | None], Tensor],
    ) -> list[list[int]]:
        """Draw the drafts of each row, one position of all rows after the other, and remember them for `settle`.

        Args:
            rows, lengths: [P], as in `Drafter.propose`.
            members: the indices of the rows that get drafts.
            wanted: [P] number of drafts, at least 1 for members.
            compute: returns logits [R, V] float32 of the rows that are left, which are overwritten. It gets the number
                of the position, the tokens drawn before it (None at first), and the indices of the rows that are left
                among those of the last position (None: all).
        """
        self._choose_temperature()
        counts = wanted[members]
        is_greedy = self._is_greedy or self._sampler.is_plainly_greedy(rows[members])
        drafts: list[list[int]] = [[] for _ in rows]
        columns: list[Tensor] = []
        groups: list[np.ndarray] = []
        drawn = places = None
        while len(members):
            logits = compute(len(columns), drawn, places)
            if is_greedy:
                drawn = self._sampler.ops.draw_greedy(logits).clamp_(min=0)
            else:
                drawn = self._draw(logits, rows[members], lengths[members] + len(columns))
            columns.append(drawn)
            groups.append(members)
            is_left, places = counts > len(columns), None
            if not is_left.all():
                members, counts = members[is_left], counts[is_left]
                places = upload(np.flatnonzero(is_left), drawn.device)
                drawn = drawn.index_select(0, places)
        if columns:
            token_ids = torch.cat(columns).tolist()
            for place, token_id in zip(np.concatenate(groups).tolist(), token_ids, strict=True):
                drafts[place].append(token_id)
        for row, length, drawn_ids in zip(rows.tolist(), lengths.tolist(), drafts, strict=True):
            self._drawn[row] = (length, self._current, drawn_ids)
        return drafts

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

    def _choose_temperature(self) -> None:
        """Choose the temperature of one round of proposals."""
        self._num_proposals += 1
        best = int(np.argmax(self._rates)) if len(set(self._rates)) > 1 else FIRST
        is_trial = self._num_proposals % EXPLORE_EVERY == 0
        self._current = (self._num_proposals // EXPLORE_EVERY) % len(TEMPERATURES) if is_trial else best

    def _draw(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Draw one draft per row from its logits, which are overwritten."""
        if (self._sampler.state.kind[rows] != DrawKind.GREEDY).any():
            logits.div_(TEMPERATURES[self._current])
        return self._sampler.draw_drafts(logits, rows, positions).clamp_(min=0)
