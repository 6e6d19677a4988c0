"""A lean training model of Qwen3 architecture; its parameter names are those of `Qwen3ForCausalLM`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import attend, make_bias


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the decoder; the defaults give 5.5 million parameters."""

    num_layers: int = 6
    width: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    mlp_width: int = 768
    vocabulary_size: int = 3072
    rope_base: float = 10000.0
    context: int = 2048
    norm_eps: float = 1e-6


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.width, heads, bias=False)
        self.k_proj = nn.Linear(shape.width, kv_heads, bias=False)
        self.v_proj = nn.Linear(shape.width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_size, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_size, eps=shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        shape, (B, T, _) = self.shape, x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, shape.num_heads, shape.head_size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, shape.num_kv_heads, shape.head_size)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, shape.num_kv_heads, shape.head_size).transpose(1, 2)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, bias)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))  # [B, T, width]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding over the two halves of each head."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        return self.apply_mlp(self.apply_attention(x, cos, sin, bias))

    def apply_attention(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        """The attention half."""
        return x + self.self_attn(self.input_layernorm(x), cos, sin, bias)

    def apply_mlp(self, x: Tensor) -> Tensor:
        """The MLP half, each position for itself."""
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token embeddings, layers, final norm; the output matrix is the embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary_size, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self._initialize()
        powers = torch.arange(0, shape.head_size, 2).float() / shape.head_size
        angles = torch.outer(torch.arange(shape.context).float(), shape.rope_base**-powers)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _initialize(self) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, 0.0, 0.02 if "embed" in name else weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data.mul_(1 / math.sqrt(2 * self.shape.num_layers))

    def forward(
        self,
        token_ids: Tensor,
        places: Tensor | None = None,
        branches: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, width] after the final norm, or [N, width] of N flat positions alone.

        Args:
            places: [B, T] position of each token in its own sequence; 0, 1, 2, ... by default.
            branches: [B, T] see `make_bias`; one sequence a row by default.
            positions: [N] indices into the flattened [B * T]; the last MLP is computed for these only.
        """
        if places is None:
            places = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        x = self.embed_tokens(token_ids)
        cos, sin = (table[places][:, None].to(x.dtype) for table in (self.cos, self.sin))
        bias = make_bias(torch.zeros_like(places) if branches is None else branches)
        *earlier, last = self.layers
        for layer in earlier:
            x = layer(x, cos, sin, bias)
        x = last.apply_attention(x, cos, sin, bias)
        if positions is not None:
            x = x.reshape(-1, self.shape.width)[positions]
        return self.norm(last.apply_mlp(x))

    def logits_at(
        self,
        token_ids: Tensor,
        positions: Tensor,
        places: Tensor | None = None,
        branches: Tensor | None = None,
    ) -> Tensor:
        """Logits [N, V] in float32 at N flat positions: only the answer tokens need the output matrix."""
        hidden = self(token_ids, places, branches, positions)
        return F.linear(hidden, self.embed_tokens.weight).float()
