"""DecoderModel: the one transformer behind every supported family; the config says what differs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.attention import Attention, KVCache, StepInputs
from engine.model.config import ModelConfig
from engine.model.linear import Linear, make_parameter, pack_weight
from engine.model.rope import RotaryEmbedding
from engine.worker.attn_metadata import AttnMetadata
from kernels import AttentionPlan, add_rms_norm, rms_norm, silu_mul


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(
            hidden,
            2 * inner,
            config.mlp_bias,
            {"gate_proj": inner, "up_proj": inner},
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(inner, hidden, config.mlp_bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(hidden)))

    def checkpoint_targets(self) -> dict[str, Tensor]:
        """Return the checkpoint tensors of this part as views of its parameters."""
        targets = self.gate_up_proj.checkpoint_targets()
        return targets | {f"down_proj.{name}": t for name, t in self.down_proj.checkpoint_targets().items()}


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, each added to the residual stream by the next norm."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._eps = config.rms_norm_eps
        self.input_norm = make_parameter(config.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype, device)
        self.post_attention_norm = make_parameter(config.hidden_size, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype, device)

    def forward(
        self, hidden: Tensor | None, residual: Tensor, kv_cache: KVCache, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden: [T, D], the previous layer's output not yet in the residual stream; None for the first.
            residual: [T, D], overwritten.

        Returns (hidden, residual) for the next layer.
        """
        if hidden is None:
            normed = rms_norm(residual, self.input_norm, self._eps)
        else:
            normed, residual = add_rms_norm(hidden, residual, self.input_norm, self._eps)
        hidden = self.attention(normed, kv_cache, step)
        normed, residual = add_rms_norm(hidden, residual, self.post_attention_norm, self._eps)
        return self.mlp(normed), residual

    def checkpoint_targets(self) -> dict[str, Tensor]:
        """Return the checkpoint tensors of this layer as views of its parameters."""
        targets: dict[str, Tensor] = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
        }
        targets |= {f"self_attn.{name}": view for name, view in self.attention.checkpoint_targets().items()}
        return targets | {f"mlp.{name}": view for name, view in self.mlp.checkpoint_targets().items()}


class DecoderModel(nn.Module):
    """A decoder-only language model over a paged KV cache.

    Parameters are uninitialised until `engine.model.loader` fills them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = make_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype, device) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_parameter(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = make_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._rope = RotaryEmbedding(config.rope, config.head_dim, device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        attn_metadata: AttnMetadata,
    ) -> Tensor:
        """Compute one step and write its keys and values into the cache.

        Args:
            input_ids: [T] int64, the new tokens of all requests, one request after another.
            positions: [T] int64, place of each token in its request.
            kv_caches: (k_cache, v_cache) of each layer, each
                [num_blocks, block_size, num_kv_heads, head_dim], dtype of the model.
            attn_metadata: where tokens and contexts sit.

        Returns the final hidden states, [T, D], dtype of the model.
        """
        query_lens, seq_lens = attn_metadata.query_lens_list, attn_metadata.seq_lens_list
        block_size = kv_caches[0][0].shape[1]
        plan = AttentionPlan(attn_metadata.block_tables, query_lens, seq_lens, block_size)
        cos, sin = self._rope.compute_cos_sin(positions, query_lens, seq_lens)
        step = StepInputs(attn_metadata, plan, cos, sin)
        hidden, residual = None, F.embedding(input_ids, self.embed_tokens)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, kv_cache, step)
        assert hidden is not None, "a decoder has at least one layer"
        return add_rms_norm(hidden, residual, self.norm, self.config.rms_norm_eps)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of every token of the vocabulary: [R, D] -> [R, V] float32."""
        return F.linear(hidden, self.lm_head).float()

    def pack(self) -> None:
        """Change the layout of the loaded weights for speed, one matrix at a time. Call once, after loading."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if not self.config.tie_word_embeddings:
            self.lm_head = pack_weight(self.lm_head)

    def checkpoint_targets(self) -> dict[str, Tensor]:
        """Return the name of every tensor a checkpoint must have, with the memory it goes to.

        The targets of head norms are [H, D] for a tensor [D], which is copied to each head.
        """
        targets: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens,
            "model.norm.weight": self.norm,
        }
        if not self.config.tie_word_embeddings:
            targets["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= {f"model.layers.{index}.{name}": t for name, t in layer.checkpoint_targets().items()}
        return targets
