"""Pooler: computes the pooled vectors of prompts from the hidden states of their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import NewRow
from engine.model.adapters import StepAdapters
from engine.sampling_params import Pooling


@dataclass(slots=True)
class _RowPooling:
    pooling: Pooling
    num_prompt_tokens: int
    total: Tensor | None = None  # [hidden_size] float64, sum over the tokens computed so far


class Pooler:
    """The rows of a batch whose requests return a pooled vector.

    Args:
        compute_logits: the model's output head with the adapters of the rows, [R, D] -> [R, V].
    """

    def __init__(self, compute_logits: Callable[[Tensor, StepAdapters | None], Tensor]) -> None:
        self._compute_logits = compute_logits
        self._rows: dict[int, _RowPooling] = {}

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    def add(self, new_row: NewRow) -> None:
        """Note a row that enters the batch; after a preemption it starts again."""
        assert new_row.params.pooling is not None
        self._rows[new_row.row] = _RowPooling(new_row.params.pooling, new_row.num_prompt_tokens)

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)

    def pool(
        self,
        live: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        hidden: Tensor,
        adapters: StepAdapters | None = None,
    ) -> dict[int, Tensor]:
        """Take in the hidden states of a step.

        Args:
            live: [R] index of each row in the step.
            rows, starts, counts: [R] row, first position and number of tokens of each run.
            hidden: [T, D], run after run.
            adapters: those of the step's tokens.

        Returns by index in the step the vectors of the prompts that end in it, float32.
        """
        found = {}
        bounds = np.concatenate(([0], np.cumsum(counts))).tolist()
        for at, row in enumerate(rows.tolist()):
            state = self._rows.get(row)
            start = int(starts[at])
            if state is None or start >= state.num_prompt_tokens:
                continue
            count = min(int(counts[at]), state.num_prompt_tokens - start)
            part = hidden[bounds[at] : bounds[at] + count]
            is_end = start + count == state.num_prompt_tokens
            if state.pooling.kind == "mean":
                total = part.double().sum(dim=0)
                state.total = total if start == 0 or state.total is None else state.total + total
                if is_end:
                    found[int(live[at])] = (state.total / state.num_prompt_tokens).float()
            elif is_end:
                place = np.array([bounds[at] + count - 1])
                head = None if adapters is None else adapters.select_head(place)
                found[int(live[at])] = self._take_last(state.pooling, part[-1:], head)
        return found

    def _take_last(self, pooling: Pooling, last: Tensor, head: StepAdapters | None) -> Tensor:
        """Return the vector of a prompt from the hidden state of its last token [1, D]."""
        if pooling.kind == "last":
            return last[0].float().clone()
        token_ids = torch.tensor(pooling.token_ids, device=last.device)
        return self._compute_logits(last, head)[0].index_select(0, token_ids)
