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
    has_fused_names: bool = (
        False  # delta: the checkpoint stores in_proj_qkvz and in_proj_ba, ordered by group
    )
    conv_bias: bool = False
    projection_bias: bool = False

    @property
    def key_width(self) -> int:
        """Numbers in the keys of a token."""
        return self.num_groups * self.key_size

    @property
    def value_width(self) -> int:
        """Numbers in the values of a token."""
        return self.num_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.num_conv_channels or 2 * self.key_width + self.value_width

    def count_matrix_numbers(self, hidden_size: int) -> int:
        """Return the number of elements in the projections."""
        if self.kind == "conv":
            return 4 * hidden_size * hidden_size
        # In: the convolution's channels, a gate, step sizes and for the delta rule betas; out: the values.
        per_head = 2 if self.kind == "delta" else 1
        return hidden_size * (self.num_channels + 2 * self.value_width + per_head * self.num_heads)

    def count_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the layer."""
        norm = {"delta": self.value_size, "mamba": self.value_width, "conv": 0}[self.kind]
        small = (2 + (self.kind == "mamba")) * self.num_heads + norm
        conv = (self.conv_width + self.conv_bias) * self.num_channels
        biases = 0
        if self.projection_bias:
            inputs = (
                3 * hidden_size
                if self.kind == "conv"
                else self.num_channels + self.value_width + self.num_heads
            )
            biases = inputs + hidden_size
        return self.count_matrix_numbers(hidden_size) + small + conv + biases

    @property
    def cache_spec(self) -> StateCacheSpec:
        """The layer's state."""
        return StateCacheSpec(
            (self.conv_width - 1, self.num_channels), (self.num_heads, self.key_size, self.value_size)
        )
