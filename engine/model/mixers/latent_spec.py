"""LatentSpec: the sizes of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.rope_config import RopeConfig, compute_yarn_mscale


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads are products with one vector per token; a part of each key is rotated."""

    rank: int  # numbers of that vector, the latent
    rope_size: int  # rotated numbers of a key, which all heads share
    plain_size: int  # other numbers of a head's query and key
    value_size: int  # of a head
    query_rank: int | None  # queries are products with a vector of this size; None: with the layer's input
    rope_pairs: Literal["halves", "interleaved"] = "interleaved"
    norm_eps: float = 1e-6  # of the norms of both vectors, whatever that of the other norms is

    @property
    def query_size(self) -> int:
        """Numbers of a head's query in the checkpoint."""
        return self.plain_size + self.rope_size

    @property
    def key_size(self) -> int:
        """Numbers that the cache holds per token: the latent, then the rotated part."""
        return self.rank + self.rope_size

    def compute_scale(self, rope: RopeConfig) -> float:
        """Return the factor of the attention scores. Source: DeepSeek-V2."""
        mscale = compute_yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
        return float(self.query_size**-0.5 * mscale * mscale)
