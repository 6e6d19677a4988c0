"""EagleNet: one decoder layer that predicts the target's next hidden state from the last one and the next token.

    EAGLE-1   x = fc([embedding, hidden]) ─▶ layer ─▶ next hidden ─▶ the target's output matrix
    EAGLE-3   hidden = fc(hidden states of three layers) ─▶ layer over [embedding, hidden] ─▶ next hidden ─▶ norm ─▶ own
              output matrix over the draft vocabulary

Sources: Li et al., 2024 (EAGLE); Li et al., 2025 (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.attn_metadata import AttnMetadata
from engine.model.decoder_layer import DecoderLayer
from engine.model.layer_spec import LayerSpec
from engine.model.layer_tape import LayerTapes
from engine.model.linear import Linear, make_parameter, pack_linears, repack_linears
from engine.model.mixers.attention import Attention, StepInputs, plan_groups
from engine.model.mixers.latent import LatentAttention
from engine.model.rope import RotaryEmbedding, Rotation
from engine.model.sharding import ONE_RANK
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

    Its keys depend on its inputs only, so tokens whose prediction is not needed cost no attention and no MLP.

    Args:
        embedding: [V, D], the target's or the checkpoint's own; None: `embed` looks elsewhere.
    """

    embedding: Tensor

    def __init__(
        self, shape: EagleShape, embedding: Tensor | None, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        spec = shape.layer
        size = spec.hidden_size
        self.shape, self.ops = shape, ops
        self.register_buffer("embedding", embedding, persistent=False)
        fc_inputs = shape.num_aux_layers * shape.target_hidden_size if shape.is_eagle3 else 2 * size
        self.fc = Linear(fc_inputs, size, shape.has_fc_bias, dtype=dtype, device=device)
        self.layer = DecoderLayer(spec, 0, 0, 0, dtype, device, ONE_RANK)
        if not shape.is_eagle3 and not shape.has_input_norm:
            self.layer.input_norm = None
        self.hidden_norm = self.norm = None
        self.pair_norms: tuple[nn.Parameter, ...] = ()  # of embedding and hidden state before `fc`
        self.lm_head: Linear | None = None
        if shape.is_eagle3:
            self.hidden_norm = make_parameter(size, dtype=dtype, device=device)
            self.norm = make_parameter(size, dtype=dtype, device=device)
            self.lm_head = Linear(size, shape.draft_vocab_size, False, dtype=dtype, device=device)
            q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
            self.layer.attention.qkv_proj = Linear(
                2 * size, q_size + 2 * kv_size, spec.qkv_bias,
                {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, dtype=dtype, device=device,
            )
        self._tapes: LayerTapes | None = None  # of the present ops
        self.rope = RotaryEmbedding(spec.rope, spec.rope_size, device)

    def weight_targets(self) -> Targets:
        """Return the memory for each tensor of the checkpoint; the layer is named `layers.0`."""
        targets = add_prefix("fc", self.fc.weight_targets())
        targets |= add_prefix("layers.0", self.layer.weight_targets())
        if self.hidden_norm is not None and self.norm is not None and self.lm_head is not None:
            targets["layers.0.hidden_norm.weight"] = WeightTarget(self.hidden_norm)
            targets["norm.weight"] = WeightTarget(self.norm)
            targets |= add_prefix("lm_head", self.lm_head.weight_targets())
        return targets

    def pack(self, ops: Ops) -> None:
        pack_linears(self, ops)
        self.ops = ops

    def repack(self, ops: Ops) -> Iterator[None]:
        yield from repack_linears(self, self.ops, ops)
        self.ops = ops

    def read_target(self, hidden: Tensor) -> Tensor:
        """Return what the layer reads of the target's hidden states, [T, D], from what `observe` was given."""
        size = self.shape.target_hidden_size
        return self.fc(hidden[:, size:].contiguous()) if self.shape.is_eagle3 else hidden[:, :size]

    def rotate(self, positions: Tensor, metadata: AttnMetadata) -> Rotation:
        return self.rope.compute(positions, metadata.query_lens_list, metadata.seq_lens_list)

    def prepare(self, rotation: Rotation, kv_cache: KVCache, metadata: AttnMetadata) -> StepInputs:
        groups = plan_groups(self.ops, metadata, kv_cache[0].shape[1])
        return StepInputs(self.ops, metadata, groups, (rotation,))

    def store_keys(self, token_ids: Tensor, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> None:
        """Write the keys and values of tokens, given as in `forward`."""
        attention = self.layer.attention
        assert isinstance(attention, Attention | LatentAttention), "the layer has no state"
        attention.store_keys(self._read(self.embed(token_ids), hidden)[0], kv_cache, step)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, [T, D]."""
        return F.embedding(token_ids, self.embedding)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, kv_cache: KVCache, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Compute one step.

        Args:
            token_ids: [T] int64.
            hidden: [T, D], the hidden state before each token, from `read_target` or predicted.

        Returns (input of the output matrix, predicted hidden states), each [T, D].
        """
        if self._tapes is None or self._tapes.ops is not self.ops:
            self._tapes = LayerTapes(self.ops, self._run_layer)
        pairs = torch.cat((self.embed(token_ids), hidden), dim=-1)
        output, predicted = (each.clone() for each in self._tapes.run(pairs, (kv_cache,), step))
        return output, predicted

    def _run_layer(
        self, pairs: Tensor, kv_caches: Sequence[KVCache], step: StepInputs, next_layer: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        """Do the same for embedded tokens and hidden states side by side, [T, 2 D]."""
        ops, layer = self.ops, self.layer
        layer_input, residual = self._read(*pairs.chunk(2, dim=-1))
        attended = layer.attention(layer_input, kv_caches[0], step)
        assert layer.mlp_input_norm is not None, "the loader has checked where the norms are"
        predicted = layer.mlp(layer.mlp_input_norm.add(attended, residual, ops), ops).add_(residual)
        if self.norm is None:
            return predicted, predicted
        output = ops.rms_norm(predicted, self.norm, self.shape.layer.norm_eps)
        return output, output if self.shape.norm_output else predicted

    def _read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention, and the residual stream."""
        ops, input_norm = self.ops, self.layer.input_norm
        if self.hidden_norm is None:
            if self.pair_norms:
                embedded, hidden = (
                    ops.rms_norm(part.contiguous(), norm, self.shape.layer.norm_eps)
                    for part, norm in zip((embedded, hidden), self.pair_norms, strict=True)
                )
            residual = self.fc(torch.cat((embedded, hidden), dim=-1))
            return residual if input_norm is None else input_norm(residual, ops), residual
        assert input_norm is not None, "EAGLE-3 has this norm"
        normed = ops.rms_norm(hidden.contiguous(), self.hidden_norm, self.shape.layer.norm_eps)
        residual = normed.clone() if self.shape.norm_before_residual else hidden.clone()
        return torch.cat((input_norm(embedded, ops), normed), dim=-1), residual
