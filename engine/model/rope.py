"""RotaryEmbedding: cosines and sines per position, for every supported kind of scaling.

The formulas follow transformers' `modeling_rope_utils`, operation by operation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.rope_config import RopeConfig

_MIN_POSITIONS = 2048


class RotaryEmbedding:
    """Tables of cos and sin, float32, extended on demand.

    With dynamic NTK scaling, tokens in contexts beyond the original length are rotated by frequencies that depend on
    the context length, as in transformers; tokens already in the cache are not rotated again. Beyond that length
    results therefore depend on how a prompt is split into chunks.

    Args:
        config: type and parameters of the scaling.
        head_dim: size of the rotated vectors.
        device: device of the tables.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        self._device = device
        self._inv_freq = compute_inv_freq(config, head_dim).to(device)
        self._scaling = _compute_attention_scaling(config)
        self._cos = self._sin = torch.empty(0, device=device)

    def compute_cos_sin(
        self, positions: Tensor, query_lens: list[int], seq_lens: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each token for `kernels.apply_rope`, [T, 1, head_dim] float32.

        Args:
            positions: [T] int64.
            query_lens, seq_lens: host copies of the lengths of each request.
        """
        self.reserve(max(seq_lens))
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self._config.rope_type == "dynamic":
            self._rotate_long(cos, sin, positions, query_lens, seq_lens)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _rotate_long(
        self, cos: Tensor, sin: Tensor, positions: Tensor, query_lens: list[int], seq_lens: list[int]
    ) -> None:
        start = 0
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            rows = slice(start, start + query_len)
            start += query_len
            if seq_len > self._config.original_max_position_embeddings:
                inv_freq = compute_inv_freq(self._config, self._head_dim, seq_len)
                if self._device.type == "cuda":
                    # Pinned, because a copy from pageable memory waits for the device.
                    inv_freq = inv_freq.pin_memory().to(self._device, non_blocking=True)
                cos[rows], sin[rows] = self._tables(positions[rows], inv_freq)

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
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def compute_inv_freq(config: RopeConfig, dim: int, seq_len: int | None = None) -> Tensor:
    """Return the angle per position of each pair of a head, [dim / 2] float32 on the CPU.

    Args:
        config: type and parameters of the scaling.
        dim: size of the rotated vectors.
        seq_len: context length, for dynamic scaling beyond the original length.
    """
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
        case _:
            return inv_freq


def _scale_llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, interpolate between. Source: Llama 3.1."""
    original, low, high = (
        config.original_max_position_embeddings,
        config.low_freq_factor,
        config.high_freq_factor,
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
    """Return the factor for cos and sin: YaRN's attention temperature, else 1."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_mscale(config.factor, config.mscale) / _yarn_mscale(config.factor, config.mscale_all_dim)
    return _yarn_mscale(config.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
