"""RotaryEmbedding: cosines and sines per position, for every supported kind of scaling.

The formulas follow transformers' `modeling_rope_utils`, operation by operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.model.rope_config import RopeConfig, compute_yarn_mscale
from kernels.upload import upload, upload_tensor

_MIN_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a step's tokens in layers of one kind."""

    cos: Tensor  # [T, 1, head_dim] float32
    sin: Tensor
    query_scale: Tensor | None  # [T, 1, 1] float32, factor of the rotated queries

    def select(self, tokens: slice) -> Rotation:
        scale = None if self.query_scale is None else self.query_scale[tokens]
        return Rotation(self.cos[tokens], self.sin[tokens], scale)


def order_pairs(
    config: RopeConfig | None, head_dim: int, pairs: Literal["halves", "interleaved"]
) -> list[int] | None:
    """Return the number of a checkpoint's head that becomes each number of ours; None: all stay.

    The kernels rotate number i with number i + head_dim / 2. Queries and keys are reordered alike, so scores stay.
    Numbers that do not rotate are the last pairs, whose angles are 0.
    """
    if config is None:
        return None
    size = config.rotary_dim(head_dim)
    rotated, rest = list(range(size)), list(range(size, head_dim))
    first, second = (
        (rotated[::2], rotated[1::2])
        if pairs == "interleaved"
        else (rotated[: size // 2], rotated[size // 2 :])
    )
    middle = len(rest) // 2
    order = first + rest[:middle] + second + rest[middle:]
    return None if order == list(range(head_dim)) else order


class RotaryEmbedding:
    """Tables of cos and sin of the angles, [positions, head_dim / 2] float32, extended on demand.

    With dynamic NTK scaling, tokens in contexts beyond the original length are rotated by frequencies that depend on
    the context length, as in transformers; tokens already in the cache are not rotated again. Beyond that length
    results therefore depend on how a prompt is split into chunks.

    Longrope has frequencies for short and for long contexts. One set is used for all requests, chosen by the length
    of the longest context that is allowed, so that a result depends on no chunk and every prefix can be reused.

    Args:
        config: type and parameters of the scaling; None: nothing is rotated.
    """

    def __init__(self, config: RopeConfig | None, head_dim: int, device: torch.device) -> None:
        self._is_identity = config is None
        self._config = config or RopeConfig()
        self._head_dim = head_dim
        self._device = device
        # Only longrope looks at it here; dynamic scaling looks at each request.
        self._max_len = self._config.stretched_len if self._config.rope_type == "longrope" else 0
        self._scaling = _compute_attention_scaling(self._config)
        self._inv_freq = self._compute_inv_freq(self._max_len)
        self._cos = self._sin = torch.empty(0, device=device)

    def move(self, device: torch.device) -> None:
        self._device, self._inv_freq = device, self._inv_freq.to(device)
        self.release()

    def limit(self, max_len: int) -> None:
        """Set the longest context that is allowed, which selects the frequencies of longrope."""
        if self._config.rope_type == "longrope" and max_len != self._max_len:
            self._max_len = max_len
            self._inv_freq = self._compute_inv_freq(max_len)
            self.release()

    def compute(self, positions: Tensor, query_lens: list[int], seq_lens: list[int]) -> Rotation:
        """Return the rotation of each token for `kernels.torch.elementwise.apply_rope`.

        Args:
            positions: [T] int64; [3, T] (time, row, column) where a step computes images.
            query_lens, seq_lens: host copies of the lengths of each request.
        """
        if max(seq_lens) > self._cos.shape[0]:
            self.reserve(max(seq_lens))
        if positions.dim() == 2:
            return self._rotate_axes(positions)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self._config.rope_type == "dynamic":
            self._rotate_long(cos, sin, positions, query_lens, seq_lens)
        return self._spread(cos, sin, positions)

    def _rotate_axes(self, positions: Tensor) -> Rotation:
        """Rotate each pair by the position on its axis. Source: Qwen2-VL (multimodal RoPE)."""
        axes = torch.zeros(self._head_dim // 2, dtype=torch.int64, device=self._device)
        axes[: len(self._config.axes)] = upload(np.array(self._config.axes), self._device)
        index = axes.expand(1, positions.shape[1], -1)
        cos, sin = (table[positions].gather(0, index)[0] for table in (self._cos, self._sin))
        return self._spread(cos, sin, positions[0])

    def _spread(self, cos: Tensor, sin: Tensor, positions: Tensor) -> Rotation:
        """Return what both halves of a head are multiplied by, for angles of pairs, [T, head_dim / 2]."""
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        scale, beta = None, self._config.query_scaling_beta
        if beta:  # the factor of a query grows with its position. Source: Llama 4
            turns = torch.floor(positions / self._config.original_max_position_embeddings)
            scale = (1 + beta * torch.log1p(turns)).view(-1, 1, 1)
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1), scale)

    def _compute_inv_freq(self, seq_len: int) -> Tensor:
        """Return the angle per position of each pair of a head, [head_dim / 2] on the device; 0: not rotated."""
        inv_freq = torch.zeros(self._head_dim // 2)
        if not self._is_identity:
            size = self._config.rotary_dim(self._head_dim)
            inv_freq[: size // 2] = compute_inv_freq(self._config, size, seq_len)
        return upload_tensor(inv_freq, self._device)

    def _rotate_long(
        self, cos: Tensor, sin: Tensor, positions: Tensor, query_lens: list[int], seq_lens: list[int]
    ) -> None:
        start = 0
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            rows = slice(start, start + query_len)
            start += query_len
            if seq_len > self._config.original_max_position_embeddings:
                cos[rows], sin[rows] = self._tables(positions[rows], self._compute_inv_freq(seq_len))

    def reserve(self, num_positions: int) -> None:
        """Extend the tables to positions [0, num_positions). This may reallocate them."""
        if num_positions <= self._cos.shape[0]:
            return
        size = max(_MIN_POSITIONS, 2 * self._cos.shape[0], num_positions)
        self._cos, self._sin = self._tables(torch.arange(size, device=self._device), self._inv_freq)

    def release(self) -> None:
        """Free the tables; the next `reserve` or step computes them again, with the same values."""
        self._cos = self._sin = torch.empty(0, device=self._device)

    def _tables(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(1).float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1:
            size = self._config.rotary_dim(self._head_dim) // 2
            cos[:, :size] *= self._scaling
            sin[:, :size] *= self._scaling
        return cos, sin


def compute_inv_freq(config: RopeConfig, dim: int, seq_len: int | None = None) -> Tensor:
    """Return the angle per position of each pair of a head, [dim / 2] float32 on the CPU."""
    base = config.theta
    original = config.original_max_position_embeddings
    if config.rope_type == "dynamic" and seq_len is not None and seq_len > original:
        stretch = config.factor * seq_len / original - (config.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match config.rope_type:
        case "linear":
            return inv_freq / config.factor
        case "llama3":
            return _scale_llama3(inv_freq, config)
        case "yarn":
            return _scale_yarn(inv_freq, config, dim)
        case "longrope":
            is_long = seq_len is not None and seq_len > original
            return inv_freq / torch.tensor(config.long_factor if is_long else config.short_factor)
        case _:
            return inv_freq


def _scale_llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, interpolate between. Source: Llama 3.1."""
    original, low, high = (
        config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor,
    )
    wavelen = 2 * math.pi / inv_freq
    smooth = (original / wavelen - low) / (high - low)
    blended = (1 - smooth) * inv_freq / config.factor + smooth * inv_freq
    scaled = torch.where(wavelen > original / low, inv_freq / config.factor, blended)
    return torch.where(wavelen < original / high, inv_freq, scaled)


def _scale_yarn(inv_freq: Tensor, config: RopeConfig, dim: int) -> Tensor:
    """Interpolate low-frequency dimensions, extrapolate the others. Source: Peng et al., 2023 (YaRN)."""
    low = _yarn_dim(config.beta_fast, config, dim)
    high = _yarn_dim(config.beta_slow, config, dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        # Avoid a division by zero.
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / config.factor * ramp + inv_freq * (1 - ramp)


def _yarn_dim(num_rotations: float, config: RopeConfig, dim: int) -> float:
    """Return the dimension whose pair rotates `num_rotations` times within the original context."""
    turns = config.original_max_position_embeddings / (num_rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(config.theta))


def _compute_attention_scaling(config: RopeConfig) -> float:
    """Return the factor for cos and sin: the attention temperature of YaRN and longrope, else 1."""
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type == "longrope":
        growth = math.log(max(1.0, config.factor))
        return math.sqrt(1 + growth / math.log(config.original_max_position_embeddings)) if growth else 1.0
    if config.mscale and config.mscale_all_dim:
        scale = compute_yarn_mscale(config.factor, config.mscale)
        return scale / compute_yarn_mscale(config.factor, config.mscale_all_dim)
    return compute_yarn_mscale(config.factor, 1.0)
