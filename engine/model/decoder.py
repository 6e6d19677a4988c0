"""DecoderModel: a decoder-only transformer for all supported families; the config selects the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kv_cache_spec import KVCacheSpec
from engine.model.attention import Attention, StepInputs
from engine.model.attn_metadata import AttnMetadata
from engine.model.config import ModelConfig
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.rope import RotaryEmbedding
from engine.model.weight_targets import Targets, WeightTarget, WeightTargets, add_prefix
from kernels import LayerWeights, Ops
from kernels.ops import KVCache, Quantization
from kernels.torch_ops import make_ops

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers in old checkpoints that are computed from the config.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class MLP(nn.Module):
    """Gated feed-forward part of a layer."""

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up_proj = Linear(
            hidden,
            2 * inner,
            spec.mlp_bias,
            {"gate_proj": inner, "up_proj": inner},
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(inner, hidden, spec.mlp_bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, ops: Ops) -> Tensor:
        return self.down_proj(ops.silu_mul(self.gate_up_proj(hidden)))

    def weight_targets(self) -> Targets:
        """Return the memory for each checkpoint tensor of the MLP."""
        return self.gate_up_proj.weight_targets() | add_prefix("down_proj", self.down_proj.weight_targets())


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm; the next norm adds their output to the residual stream."""

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.input_norm = make_parameter(spec.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(spec, dtype, device)
        self.post_attention_norm = make_parameter(spec.hidden_size, dtype=dtype, device=device)
        self.mlp = MLP(spec, dtype, device)

    def forward(
        self, hidden: Tensor | None, residual: Tensor, kv_cache: KVCache, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden: [T, D], the previous layer's output, not yet added to the residual stream; None in the first layer.
            residual: [T, D], overwritten.

        Returns (hidden, residual) for the next layer.
        """
        ops, eps = step.ops, self.spec.rms_norm_eps
        if hidden is None:
            normed = ops.rms_norm(residual, self.input_norm, eps)
        else:
            normed, residual = ops.add_rms_norm(hidden, residual, self.input_norm, eps)
        hidden = self.attention(normed, kv_cache, step)
        normed, residual = ops.add_rms_norm(hidden, residual, self.post_attention_norm, eps)
        return self.mlp(normed, ops), residual

    def list_weights(self) -> LayerWeights:
        """Return the packed weights for ops that run whole layers."""
        attention, mlp = self.attention, self.mlp
        return LayerWeights(
            input_norm=self.input_norm,
            qkv=attention.qkv_proj.packed,
            qkv_bias=attention.qkv_proj.bias,
            qk_norm=attention.qk_norm,
            output=attention.o_proj.packed,
            output_bias=attention.o_proj.bias,
            post_attention_norm=self.post_attention_norm,
            gate_up=mlp.gate_up_proj.packed,
            gate_up_bias=mlp.gate_up_proj.bias,
            down=mlp.down_proj.packed,
            down_bias=mlp.down_proj.bias,
            sliding_window=self.spec.window,
        )

    def weight_targets(self) -> Targets:
        """Return the memory for each checkpoint tensor of the layer."""
        return {
            "input_layernorm.weight": WeightTarget(self.input_norm),
            "post_attention_layernorm.weight": WeightTarget(self.post_attention_norm),
            **add_prefix("self_attn", self.attention.weight_targets()),
            **add_prefix("mlp", self.mlp.weight_targets()),
        }


class DecoderModel(nn.Module):
    """A decoder-only language model over a paged KV cache.

    Parameters are uninitialised until `engine.model.loader` fills them.

    Args:
        ops: kernels that the forward pass calls; default: torch's.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops or make_ops()
        self.dtype = dtype
        self.quantization: Quantization | None = None
        self.weights_hash = b""  # set by the loader
        # Layers whose inputs follow the final hidden state in the result of `forward`; see `engine.spec.device`.
        self.aux_layers: tuple[int, ...] = ()
        self.specs = config.layer_specs
        self.embed_tokens = make_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(spec, dtype, device) for spec in self.specs)
        self.norm = make_parameter(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=device,
            shared=self.embed_tokens if config.tie_word_embeddings else None,
        )
        # All layers share one table of angles.
        ((rope, head_size),) = {(spec.rope, spec.head_size) for spec in self.specs}
        self.rope = RotaryEmbedding(rope, head_size, device)
        self._layer_weights: list[LayerWeights] = []  # for ops that run whole layers

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        attn_metadata: AttnMetadata,
    ) -> Tensor:
        """Compute one step and write its keys and values into the cache.

        Args:
            input_ids: [T] int64, the new tokens of all requests, request after request.
            positions: [T] int64, position of each token in its request.
            kv_caches: (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim].
            attn_metadata: lengths and cache positions of the requests.

        Returns the final hidden states, [T, D], dtype of the model; with `aux_layers`, [T, D * (1 + their number)].
        """
        ops = self.ops
        step = self._prepare(ops, positions, kv_caches, attn_metadata)
        hidden, residual = None, F.embedding(input_ids, self.embed_tokens)
        if ops.run_layers is not None and not self.aux_layers:
            return self._run_layers(ops, residual, kv_caches, step)
        aux = []
        for index, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if index in self.aux_layers:
                aux.append(residual.clone() if hidden is None else residual + hidden)
            hidden, residual = layer(hidden, residual, kv_cache, step)
        assert hidden is not None, "a decoder has at least one layer"
        if len(self.layers) in self.aux_layers:
            aux.append(residual + hidden)
        final = ops.add_rms_norm(hidden, residual, self.norm, self.config.rms_norm_eps)[0]
        return torch.cat([final, *aux], dim=-1) if aux else final

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of final hidden states: [R, D or more] -> [R, V] float32."""
        size = self.config.hidden_size
        final = hidden if hidden.shape[-1] == size else hidden[:, :size].contiguous()
        return self.lm_head(final, torch.float32)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return the KV cache content of each layer, in layer order."""
        return tuple(spec.kv_spec for spec in self.specs)

    def reserve_positions(self, num_positions: int) -> None:
        """Extend the RoPE tables to positions [0, num_positions), so that they are not reallocated later."""
        self.rope.reserve(num_positions)

    def release_positions(self) -> None:
        """Free the RoPE tables; the next step computes them again, with the same values."""
        self.rope.release()

    def pack(self, quantization: Quantization | None = None) -> None:
        """Convert the loaded weights to the layout of the ops, one matrix at a time. Call once, after loading.

        Raises:
            ValueError: a matrix does not allow this quantization.
        """
        self.quantization = quantization
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(self.ops, quantization)
        self._layer_weights = self._list_weights(self.ops)

    def repack(self, ops: Ops) -> Iterator[None]:
        """Move to other ops. Repacks one matrix per iteration; steps may run in between."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.repack(self.ops, ops, self.quantization)
                yield
        self._layer_weights = self._list_weights(ops)
        self.ops = ops

    def weight_targets(self) -> WeightTargets:
        """Return the memory for each tensor of a checkpoint."""
        targets = {_EMBEDDING: WeightTarget(self.embed_tokens), "model.norm.weight": WeightTarget(self.norm)}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= add_prefix(f"model.layers.{index}", layer.weight_targets())
        if self.config.tie_word_embeddings:
            return WeightTargets(targets, {_HEAD: _EMBEDDING}, _DERIVED_SUFFIXES)
        targets |= add_prefix("lm_head", self.lm_head.weight_targets())
        return WeightTargets(targets, {}, _DERIVED_SUFFIXES)

    def _prepare(
        self, ops: Ops, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttnMetadata
    ) -> StepInputs:
        query_lens, seq_lens = metadata.query_lens_list, metadata.seq_lens_list
        plan = ops.make_plan(
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            query_lens,
            seq_lens,
            kv_caches[0][0].shape[1],
        )
        if metadata.shared is not None and ops.share_prefixes is not None:
            plan = ops.share_prefixes(plan, metadata.shared)
        cos, sin = self.rope.compute_cos_sin(positions, query_lens, seq_lens)
        return StepInputs(ops, metadata, plan, cos, sin)

    def _run_layers(self, ops: Ops, hidden: Tensor, kv_caches: Sequence[KVCache], step: StepInputs) -> Tensor:
        assert ops.run_layers is not None
        # Specs differ only in the window, which is in the layer weights.
        metadata, spec = step.attn_metadata, self.specs[0]
        return ops.run_layers(
            self._layer_weights,
            hidden,
            kv_caches,
            step.cos,
            step.sin,
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            step.plan,
            num_heads=spec.num_heads,
            eps=spec.rms_norm_eps,
            scale=spec.scale,
            final_norm=self.norm,
        )

    def _list_weights(self, ops: Ops) -> list[LayerWeights]:
        """Return the weights for `run_layers`; empty without it, so that repacked matrices are freed."""
        if ops.run_layers is None:
            return []
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return [layer.list_weights() for layer in layers]
