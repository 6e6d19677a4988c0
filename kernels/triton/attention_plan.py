"""AttentionPlan: what the launches of one step need beside its tensors; made on the host, shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Requests with at most this many new tokens go to the kernel that splits contexts.
SHORT_LIMIT = 16


class AttentionPlan:
    """Sizes of one step, or upper bounds of them for a graph.

    Args:
        query_lens, seq_lens, max_query_len: see `kernels.ops.MakePlan`.

    Attributes:
        first_draft: the first token of the requests with 2 to SHORT_LIMIT new tokens.
        num_draft_tokens: from there to the last of theirs; 0: there are none.
    """

    def __init__(self, query_lens: Sequence[int], seq_lens: Sequence[int], max_query_len: int = 0) -> None:
        self.num_requests = len(query_lens)
        self.has_decodes = 1 in query_lens
        self.max_draft_len = max((each for each in query_lens if 1 < each <= SHORT_LIMIT), default=0)
        self.first_draft, self.num_draft_tokens = _find_drafts(query_lens)
        if max_query_len:
            self.has_decodes, self.max_draft_len = True, max_query_len if max_query_len > 1 else 0
            self.first_draft, self.num_draft_tokens = 0, sum(query_lens)
        self.has_long = any(each > SHORT_LIMIT for each in query_lens)
        self.max_seq_len = max(seq_lens, default=0)
        self._scratch: Tensor | None = None

    def take_scratch(self, num_parts: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return room for parts of sums [num_parts, head_dim] and their statistics [num_parts, 2], float32.

        Layers run one after another, so all get the same memory.
        """
        size = num_parts * (head_dim + 2)
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.float32, device=device)
        parts, stats = self._scratch[:size].split((num_parts * head_dim, 2 * num_parts))
        return parts, stats


def _find_drafts(query_lens: Sequence[int]) -> tuple[int, int]:
    """Return the first draft token and the number of tokens up to the last one, other requests' tokens included."""
    first, end, token = 0, 0, 0
    for query_len in query_lens:
        if 1 < query_len <= SHORT_LIMIT:
            first = first if end else token
            end = token + query_len
        token += query_len
    return first, end - first


def make_plan(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_lens: Sequence[int],
    seq_lens_list: Sequence[int],
    block_size: int,
    max_query_len: int = 0,
) -> AttentionPlan:
    """Return the plan of one step; nothing is read from the tensors."""
    return AttentionPlan(query_lens, seq_lens_list, max_query_len)
