"""Medusa: heads that each predict a later token from one hidden state of the target. Source: Cai et al., 2024."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from engine.core.actor_messages import StepPlan
from engine.kv_cache_spec import KVCacheSpec
from engine.model.linear import Linear, pack_linears, repack_linears
from engine.spec.device.draft_sampler import DraftSampler
from engine.spec.device.hidden_store import HiddenStore
from engine.worker.input_batch import InputBatch
from engine.worker.sampling.sampler import Sampler
from kernels import Ops
from kernels.ops import KVCache


class MedusaHead(nn.Module):
    """Residual blocks x + silu(W x + b), then an output matrix."""

    def __init__(
        self, hidden_size: int, num_outputs: int, num_layers: int, has_bias: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Linear(hidden_size, hidden_size, has_bias, dtype=dtype, device=device) for _ in range(num_layers)
        )
        self.output = Linear(hidden_size, num_outputs, False, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [R, outputs] float32 of hidden states [R, D]."""
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        logits: Tensor = self.output(hidden, torch.float32)
        return logits


class Medusa(nn.Module):
    """Proposes with all heads at once from the hidden state before each row's last token.

    Args:
        token_map: [outputs] int64, the token of each output; None: they are the vocabulary.
    """

    aux_layers: tuple[int, ...] = ()

    ops: Ops

    def __init__(self, heads: list[MedusaHead], token_map: Tensor | None, is_greedy: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self._token_map = token_map
        self._is_greedy = is_greedy

    def pack(self, ops: Ops) -> None:
        self.ops = ops
        pack_linears(self, ops)

    def repack(self, ops: Ops) -> Iterator[None]:
        yield from repack_linears(self, self.ops, ops)
        self.ops = ops

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return ()

    def start(self, batch: InputBatch, sampler: Sampler, kv_caches: list[KVCache]) -> None:
        self._vocab_size = sampler.state.vocab_size
        self._sampler = DraftSampler(sampler, self._is_greedy)
        self._store = HiddenStore()

    def take_plan(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._store.clear(new.row)
            self._sampler.forget(new.row)

    def observe(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        self._store.append(rows, starts, counts, hidden)

    def settle(self, row: int, length: int, token_ids: list[int], num_accepted: int) -> None:
        self._sampler.settle(row, length, token_ids, num_accepted)

    @torch.inference_mode()
    def propose(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        # The hidden state before the last token has predicted that token; head k looks k + 1 tokens further.
        found = [
            self._store.read(row, length - 2, length - 1)[1]
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        members = np.flatnonzero([len(each) for each in found])
        if not len(members):
            return [[] for _ in rows]
        hidden = torch.cat([part for parts in found for part in parts])

        def compute(number: int, drawn: Tensor | None, places: Tensor | None) -> Tensor:
            nonlocal hidden
            if places is not None:
                hidden = hidden.index_select(0, places)
            return spread_logits(self.heads[number](hidden), self._token_map, self._vocab_size)

        return self._sampler.draw_chain(rows, lengths, members, np.minimum(wanted, len(self.heads)), compute)


def spread_logits(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits over the target's vocabulary; tokens that the drafter does not know get -inf.

    Args:
        token_map: [outputs] int64, the token of each output; None: output i is token i.
    """
    if token_map is None and logits.shape[1] == vocab_size:
        return logits
    spread = logits.new_full((logits.shape[0], vocab_size), -torch.inf)
    if token_map is None:
        spread[:, : logits.shape[1]] = logits[:, :vocab_size]
    else:
        spread[:, token_map] = logits
    return spread
