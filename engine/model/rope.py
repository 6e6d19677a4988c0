"""RotaryEmbedding: cosines and sines per position, for every scaling that transformers computes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.rope_config import RopeConfig
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
        self._scaling = 1.0  # of cosines and sines
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
            inv_freq[: size // 2], self._scaling = compute_inv_freq(self._config, size, seq_len)
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


def compute_inv_freq(config: RopeConfig, dim: int, seq_len: int | None = None) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of a head, [dim / 2] float32 on the CPU, and the factor of cosines."""
    if config.rope_type == "default":
        return 1.0 / (config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), 1.0
    source = SimpleNamespace(
        rope_parameters=asdict(config) | {"rope_theta": config.theta},
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=config.original_max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[config.rope_type](source, seq_len=seq_len)  # type: ignore[no-any-return]
