"""EagleNet: one decoder layer that predicts the target's next hidden state from the last one and the next token.

    EAGLE-1   x = fc([embedding, hidden]) ─▶ layer ─▶ next hidden ─▶ the target's output matrix
    EAGLE-3   hidden = fc(hidden states of three layers) ─▶ layer over [embedding, hidden] ─▶ next hidden ─▶ norm ─▶ own
              output matrix over the draft vocabulary

Sources: Li et al., 2024 (EAGLE); Li et al., 2025 (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.attention import Attention, StepInputs, plan_groups
from engine.model.attn_metadata import AttnMetadata
from engine.model.decoder import MLP
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.rope import RotaryEmbedding
from engine.model.weight_targets import Targets, WeightTarget, add_prefix
from kernels import Ops
from kernels.ops import KVCache


@dataclass(frozen=True, slots=True)
class EagleShape:
    """The shape of the layer, from a checkpoint's config.json and tensors."""

    layer: LayerSpec
    is_eagle3: bool
    num_aux_layers: int = 0  # hidden states of the target that EAGLE-3 reads
    target_hidden_size: int = 0
    has_fc_bias: bool = False
    has_input_norm: bool = False  # EAGLE-1 usually has none
    draft_vocab_size: int = 0  # 0: the target's output matrix
    norm_before_residual: bool = False  # the normed hidden state enters the residual stream
    norm_output: bool = False  # the next draft reads the normed hidden state


class EagleNet(nn.Module):
    """The layer, with what stands before and after it.

    Args:
        embedding: [V, D], the target's or the checkpoint's own.
    """

    def __init__(
        self, shape: EagleShape, embedding: Tensor, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        spec = shape.layer
        size = spec.hidden_size
        self.shape, self.ops, self.embedding = shape, ops, embedding
        fc_inputs = shape.num_aux_layers * shape.target_hidden_size if shape.is_eagle3 else 2 * size
        self.fc = Linear(fc_inputs, size, shape.has_fc_bias, dtype=dtype, device=device)
        self.attention = Attention(spec, 0, dtype, device)
        self.mlp = MLP(spec, dtype, device)
        self.post_attention_norm = make_parameter(size, dtype=dtype, device=device)
        has_norm = shape.is_eagle3 or shape.has_input_norm
        self.input_norm = make_parameter(size, dtype=dtype, device=device) if has_norm else None
        self.hidden_norm = self.norm = None
        self.lm_head: Linear | None = None
        if shape.is_eagle3:
            self.hidden_norm = make_parameter(size, dtype=dtype, device=device)
            self.norm = make_parameter(size, dtype=dtype, device=device)
            self.lm_head = Linear(size, shape.draft_vocab_size, False, dtype=dtype, device=device)
            q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
            self.attention.qkv_proj = Linear(
                2 * size,
                q_size + 2 * kv_size,
                spec.qkv_bias,
                {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
                dtype=dtype,
                device=device,
            )
        self.rope = RotaryEmbedding(spec.rope, spec.head_size, device)

    def weight_targets(self) -> Targets:
        """Return the memory for each tensor of the checkpoint; the layer is named `layers.0`."""
        layer = {
            "post_attention_layernorm.weight": WeightTarget(self.post_attention_norm),
            **add_prefix("self_attn", self.attention.weight_targets()),
            **add_prefix("mlp", self.mlp.weight_targets()),
        }
        if self.input_norm is not None:
            layer["input_layernorm.weight"] = WeightTarget(self.input_norm)
        targets = add_prefix("fc", self.fc.weight_targets())
        if self.hidden_norm is not None and self.norm is not None and self.lm_head is not None:
            layer["hidden_norm.weight"] = WeightTarget(self.hidden_norm)
            targets["norm.weight"] = WeightTarget(self.norm)
            targets |= add_prefix("lm_head", self.lm_head.weight_targets())
        return targets | add_prefix("layers.0", layer)

    def pack(self, ops: Ops) -> None:
        """Convert the weights to the layout of the ops."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(ops, None)

    def repack(self, ops: Ops) -> Iterator[None]:
        """Move to other ops, one matrix per iteration."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.repack(self.ops, ops, None)
                yield
        self.ops = ops

    def read_target(self, hidden: Tensor) -> Tensor:
        """Return what the layer reads of the target's hidden states, [T, D], from what `observe` was given."""
        size = self.shape.target_hidden_size
        return self.fc(hidden[:, size:].contiguous()) if self.shape.is_eagle3 else hidden[:, :size]

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttnMetadata
    ) -> tuple[Tensor, Tensor]:
        """Compute one step.

        Args:
            token_ids: [T] int64.
            hidden: [T, D], the hidden state before each token, from `read_target` or predicted.
            positions: [T] int64, for RoPE.

        Returns (input of the output matrix, predicted hidden states), each [T, D].
        """
        step = self._prepare(positions, kv_cache, metadata)
        ops, eps = self.ops, self.shape.layer.norm_eps
        embedded = F.embedding(token_ids, self.embedding)
        if self.hidden_norm is not None and self.input_norm is not None:
            normed = ops.rms_norm(hidden.contiguous(), self.hidden_norm, eps)
            residual = normed.clone() if self.shape.norm_before_residual else hidden.clone()
            layer_input = torch.cat((ops.rms_norm(embedded, self.input_norm, eps), normed), dim=-1)
        else:
            residual = self.fc(torch.cat((embedded, hidden), dim=-1))
            layer_input = residual.clone()
            if self.input_norm is not None:
                layer_input = ops.rms_norm(residual, self.input_norm, eps)
        attended = self.attention(layer_input, kv_cache, step)
        normed, residual = ops.add_rms_norm(attended, residual, self.post_attention_norm, eps)
        predicted = residual + self.mlp(normed, ops)
        if self.norm is None:
            return predicted, predicted
        output = ops.rms_norm(predicted, self.norm, eps)
        return output, output if self.shape.norm_output else predicted

    def _prepare(self, positions: Tensor, kv_cache: KVCache, metadata: AttnMetadata) -> StepInputs:
        rotation = self.rope.compute(positions, metadata.query_lens_list, metadata.seq_lens_list)
        groups = plan_groups(self.ops, metadata.use_first_group(1), kv_cache[0].shape[1])
        return StepInputs(self.ops, metadata, groups, (rotation,))
