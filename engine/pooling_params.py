"""Pooling: which numbers of a prompt's hidden states a request returns beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolingKind = Literal["last", "mean", "logits"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """One vector per prompt, float32.

    last: the final hidden state of the last token, [hidden_size]. mean: the mean over all tokens, which are therefore
    all computed, without the prefix cache. logits: the logits of `token_ids` after the prompt, [len(token_ids)].
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()

    @property
    def needs_all_tokens(self) -> bool:
        return self.kind == "mean"
