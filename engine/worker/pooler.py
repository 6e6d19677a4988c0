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
from engine.worker.launched_step import StartedStep
from kernels.upload import upload


@dataclass(slots=True)
class _RowPooling:
    pooling: Pooling
    num_prompt_tokens: int
    total: Tensor | None = None  # [hidden_size] float64, sum over the tokens computed so far


class Pooler:
    """The rows of a batch whose requests return a pooled vector.

    Args:
        place: a device with float64, for sums.
    """

    def __init__(
        self, compute_logits: Callable[[Tensor, StepAdapters | None], Tensor],
        classify: Callable[[Tensor], Tensor] | None, place: torch.device,
    ) -> None:
        self._place = place
        self._compute_logits = compute_logits
        self._classify = classify
        self.rows: dict[int, _RowPooling] = {}

    def add(self, new_row: NewRow) -> None:
        """Note a row that enters the batch; after a preemption it starts again."""
        assert new_row.params.pooling is not None
        self.rows[new_row.row] = _RowPooling(new_row.params.pooling, new_row.num_prompt_tokens)

    def pool(self, step: StartedStep, hidden: Tensor) -> dict[int, Tensor]:
        """Take in the hidden states of a step, [T, D].

        Returns by index in the step the vectors of the prompts that end in it, float32.
        """
        found, adapters = {}, step.model_input.adapters
        for row, index, start, count, first in step.list_runs():
            state = self.rows.get(row)
            if state is None or start >= state.num_prompt_tokens:
                continue
            count = min(count, state.num_prompt_tokens - start)
            part = hidden[first : first + count]
            is_end = start + count == state.num_prompt_tokens
            if state.pooling.kind == "mean":
                total = part.to(self._place).double().sum(dim=0)
                state.total = total if start == 0 or state.total is None else state.total + total
                if is_end:
                    found[index] = (state.total / state.num_prompt_tokens).float()
            elif state.pooling.kind in ("cls", "labels"):
                assert is_end and start == 0, "an encoder computes whole texts"
                found[index] = self._take_whole(state.pooling, part)
            elif is_end:
                head = None if adapters is None else adapters.select_head(np.array([first + count - 1]))
                found[index] = self._take_last(state.pooling, part[-1:], head)
        return found

    def _take_whole(self, pooling: Pooling, text: Tensor) -> Tensor:
        if pooling.kind == "cls":
            return text[0].float().clone()
        assert self._classify is not None, "the model has a classifier"
        return self._classify(text)

    def _take_last(self, pooling: Pooling, last: Tensor, head: StepAdapters | None) -> Tensor:
        """Return the vector of a prompt from the hidden state of its last token [1, D]."""
        if pooling.kind == "last":
            return last[0].float().clone()
        token_ids = upload(np.array(pooling.token_ids), last.device)
        return self._compute_logits(last, head)[0].index_select(0, token_ids)
