"""StateSpec: the shape of a layer that keeps a state per request instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kv_cache_spec import StateCacheSpec


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A gated delta net, Mamba-2, or a short convolution, which has no recurrence and fields of 0 for it."""

    kind: Literal["delta", "mamba", "conv"]
    conv_width: int  # inputs of the convolution
    num_heads: int = 0
    num_groups: int = 0  # of heads that share queries and keys
    key_size: int = 0
    value_size: int = 0
    num_conv_channels: int = 0  # of a short convolution
    # For delta: the checkpoint stores in_proj_qkvz and in_proj_ba, ordered by group
    has_fused_names: bool = False
    conv_bias: bool = False
    projection_bias: bool = False

    @property
    def key_width(self) -> int:
        return self.num_groups * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_size

    @property
    def num_channels(self) -> int:
        return self.num_conv_channels or 2 * self.key_width + self.value_width

    @property
    def cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec(
            (self.conv_width - 1, self.num_channels), (self.num_heads, self.key_size, self.value_size)
        )
