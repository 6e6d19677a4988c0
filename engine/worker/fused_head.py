"""FusedHead: computes logits and samples in one kernel, for rows that need no logits afterwards."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.model import Model
from engine.worker.sampling.sampler import SampledTokens
from engine.worker.sampling.state import DrawKind, SamplingState
from engine.worker.sampling.transfer import upload
from kernels.ops import MAX_HEAD_ROWS
from kernels.torch.sampling import make_row_keys


class FusedHead:
    """LM head, temperature and sampling in one op, for small batches of plain rows.

    It is used only if it can sample all rows of the step; otherwise the LM head matrix would be read twice.
    """

    def __init__(self, model: Model, state: SamplingState) -> None:
        self._model = model
        self._state = state

    def takes(self, rows: np.ndarray) -> bool:
        """Whether all rows are greedy or use temperature alone."""
        if self._model.ops.lm_head_sample is None or not 0 < len(rows) <= MAX_HEAD_ROWS:
            return False
        if not self._model.config.has_plain_logits:
            return False
        is_plain = (self._state.flags[rows] == 0) & (self._state.kind[rows] <= DrawKind.FULL)
        return bool(is_plain.all()) and isinstance(self._model.lm_head.packed, Tensor)

    @torch.inference_mode()
    def sample(self, hidden: Tensor, rows: np.ndarray, positions: np.ndarray) -> SampledTokens:
        """Sample one token per row.

        Args:
            hidden: [R, D] final hidden states, contiguous.
            rows: [R] row of each in the sampling state; `takes(rows)` must be true.
            positions: [R] position in the sequence of the token being sampled.
        """
        op, state = self._model.ops.lm_head_sample, self._state
        assert op is not None, "the caller checked `takes`"
        is_greedy = state.kind[rows] == DrawKind.GREEDY
        temperature = np.where(is_greedy, 0.0, state.temperature[rows]).astype(np.float32)
        keys = upload(make_row_keys(state.seed[rows], positions), hidden.device)
        return SampledTokens(op(hidden, self._model.lm_head.packed, keys, upload(temperature, hidden.device)))
