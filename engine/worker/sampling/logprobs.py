"""Log-probabilities of sampled and prompt tokens, packed into one tensor for a single copy to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count, repeat

import numpy as np
import torch
from torch import Tensor

from engine.outputs import Logprob, TokenLogprobs
from kernels.torch.candidates import rank_tokens, select_candidates
from kernels.torch.sampling import split_rows


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the rows that requested them.

    `packed` is [K, 1 + 3 * (1 + k)] int32 on the device: the rank of the row's token; then ids, bits of the float32
    log-probabilities, and bits of those under the grammar mask, each for the row's token and the k most likely ones,
    best first. All but the last are of the model's distribution, before any penalty, mask or temperature.
    """

    places: np.ndarray  # [K] index of each row in the sampled batch
    num_top: np.ndarray  # [K] alternatives that the row requested, at most k
    has_mask: np.ndarray  # [K] bool
    packed: Tensor

    def move(self, places: np.ndarray) -> SampledLogprobs:
        """Return a copy for a larger batch, in which the sampled rows have the indices `places`."""
        return replace(self, places=places[self.places])

    def to_lists(self, words: np.ndarray) -> dict[int, TokenLogprobs]:
        """Return the logprobs by index in the sampled batch, without rows that have no token."""
        width = (words.shape[1] - 1) // 3
        ids = words[:, 1 : 1 + width]
        values = words[:, 1 + width :].view(np.float32)
        kept = np.flatnonzero(ids[:, 0] >= 0)
        parts = (self.places, words[:, 0], ids, values[:, :width], values[:, width:], self.num_top, self.has_mask)
        found = {}
        for place, rank, row_ids, logprobs, masked, num_top, has_mask in zip(
            *(part[kept].tolist() for part in parts), strict=True
        ):
            end = 1 + num_top
            others = masked[1:end] if has_mask else repeat(None)
            top = [*map(Logprob, row_ids[1:end], logprobs[1:end], count(1), repeat(""), others)]
            own = Logprob(row_ids[0], logprobs[0], rank, "", masked[0] if has_mask else None)
            found[place] = TokenLogprobs(own, top)
        return found


def compute_logprobs(raw: Tensor, token_ids: Tensor, num_top: int, allowed: Tensor | None = None) -> Tensor:
    """Compute log-probabilities of one token per row and of the most likely tokens.

    Args:
        raw: [K, V] float32, the model's logits.
        token_ids: [K] int64; negative if the row has no token.
        num_top: k, at least 0; reduced to V if larger.
        allowed: [K, V] bool, the grammar masks; None: no row has one.

    Returns [K, 1 + 3 * (1 + k)] int32, see `SampledLogprobs`. A row's values do not depend on the other rows.
    """
    num_top = min(num_top, raw.shape[-1])
    packed = torch.empty(raw.shape[0], 4 + 3 * num_top, dtype=torch.int32, device=raw.device)
    vocab = torch.arange(raw.shape[1], device=raw.device)
    for rows in split_rows(raw.shape[0], raw.shape[1], raw.device):
        chunk_allowed = None if allowed is None else allowed[rows]
        packed[rows] = _compute_chunk(raw[rows], vocab, token_ids[rows], num_top, chunk_allowed)
    return packed


def compute_prompt_logprobs(logits: Tensor, next_token_ids: Tensor, num_top: int) -> SampledLogprobs:
    """Compute log-probabilities of prompt tokens.

    Args:
        logits: [T, V] float32, at the positions before the tokens.
        next_token_ids: [T] int64, the prompt token that follows each position.
    """
    length = logits.shape[0]
    packed = compute_logprobs(logits, next_token_ids, num_top)
    return SampledLogprobs(np.arange(length), np.full(length, num_top), np.zeros(length, bool), packed)


def _compute_chunk(
    raw: Tensor, vocab: Tensor, token_ids: Tensor, num_top: int, allowed: Tensor | None
) -> Tensor:
    own = token_ids.clamp(min=0).unsqueeze(-1)
    ids = own
    if num_top > 0:
        ids = torch.cat([own, select_candidates(raw, vocab, num_top)[1]], dim=1)
    logprobs = raw.log_softmax(dim=-1).gather(-1, ids)
    masked = logprobs
    if allowed is not None:
        masked = raw.masked_fill(~allowed, -torch.inf).log_softmax(dim=-1).gather(-1, ids)
    rank = rank_tokens(raw, vocab, own)
    ids = torch.cat([token_ids.unsqueeze(-1), ids[:, 1:]], dim=1)
    words = [rank.to(torch.int32), ids.to(torch.int32), logprobs.view(torch.int32), masked.view(torch.int32)]
    return torch.cat(words, dim=1)
