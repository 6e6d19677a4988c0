"""DecoderModel: a decoder-only transformer for all supported families; the config selects the differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kv_cache_spec import KVCacheSpec, StateCacheSpec, find_groups
from engine.model.adapters import MatrixPart, StepAdapters
from engine.model.attn_metadata import AttnMetadata, StepImages
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer, add_norm
from engine.model.formats.encoded import EncodedTensor
from engine.model.image_attention import ImageAttention
from engine.model.layer_tape import LayerTapes
from engine.model.linear import Linear, make_parameter
from engine.model.mixers.attention import StepInputs, plan_groups
from engine.model.moe import Experts, repack_modules
from engine.model.norm import Norm
from engine.model.rope import RotaryEmbedding
from engine.model.shard import Shard
from engine.model.sharding import ONE_RANK, Sharding
from engine.model.weight_targets import Targets, WeightTarget, WeightTargets, add_prefix
from kernels import Ops
from kernels.ops import KVCache, PackedWeight, Quantization
from kernels.torch import make_ops

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers in old checkpoints that are computed from the config.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class DecoderModel(nn.Module):
    """A decoder-only language model over a paged KV cache.

    Parameters are uninitialised until `engine.model.loader` fills them.

    Args:
        ops: kernels that the forward pass calls; default: torch's.
        sharding: the rank whose part of the model this is.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops | None = None,
        sharding: Sharding = ONE_RANK,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops or make_ops()
        self.dtype = dtype
        self.quantization: Quantization | None = None
        self.weights_hash = b""  # set by the loader
        # Layers whose inputs follow the final hidden state in the result of `forward`; see `engine.spec.device`.
        self.aux_layers: tuple[int, ...] = ()
        self.before_layers: Callable[[], None] = lambda: None
        self.specs = tuple(map(sharding.shrink, config.layer_specs))
        self._sharding = sharding
        self._first, self._end = sharding.layers or (0, len(self.specs))
        # Only the first stage has the embedding and the output head, so that a tied head needs no copy.
        num_embeddings = 0 if self._first else config.vocab_size
        self.embed_tokens = make_parameter(num_embeddings, config.hidden_size, dtype=dtype, device=device)
        self._given_embedding: Tensor | EncodedTensor | None = None  # as the checkpoint has it, until it is packed
        self.embedding: PackedWeight | None = None  # the table, where it is packed; None: `embed_tokens`
        ropes = list(dict.fromkeys((spec.rope, spec.rope_size) for spec in self.specs if spec.state is None))
        self.ropes = tuple(RotaryEmbedding(rope, size, device) for rope, size in ropes)
        groups = find_groups(self.kv_specs())
        # In a model with several stages, every layer has keys and values.
        num_kv, num_states = self._first, 0
        layers = []
        for spec in config.layer_specs[self._first : self._end]:
            rope_index, group, cache_index = 0, 0, len(groups) + num_states
            if spec.state is None:
                rope_index, group = ropes.index((spec.rope, spec.rope_size)), groups[num_kv]
                cache_index, num_kv = num_kv - self._first, num_kv + 1
            else:
                num_states += 1
            layers.append(DecoderLayer(spec, rope_index, group, cache_index, dtype, device, sharding))
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(config.hidden_size, config.style, config.norm_eps, dtype, device)
        # The factor has the precision of the embeddings that it multiplies.
        self._embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype))
        self._vocab_parts = sharding.vocab_parts(config.vocab_size)
        start, length = self._vocab_parts[sharding.rank]
        self._head_shard = Shard(0, config.vocab_size, ((start, length),)) if sharding.size > 1 else None
        if not self._first:
            self.lm_head = Linear(
                config.hidden_size, length, bias=False, dtype=dtype, device=device,
                shards=None if self._head_shard is None else {"": self._head_shard},
                shared=self.embed_tokens[start : start + length] if config.tie_word_embeddings else None,
                int4_as="int8",
            )
        self._tapes: LayerTapes | None = None  # of the present ops
        self.matrix_parts = self._list_parts()  # by the module's name in the checkpoint

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], attn_metadata: AttnMetadata,
        adapters: StepAdapters | None = None, images: StepImages | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Compute one step and write its keys and values into the cache.

        Args:
            input_ids: [T] int64, the new tokens of all requests, request after request.
            positions: [T] int64, position of each token in its request.
            kv_caches: (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim]; then
                (inputs, states) per layer with states, see `kernels.ops.StateCache`.
            attn_metadata: lengths and cache positions of the requests.
            adapters: those of the step's tokens.
            images: features of images in the step's prompts.
            received: what the stage before returned; None in the first stage.

        Returns the final hidden states, [T, D], dtype of the model; with `aux_layers`, [T, D * (1 + their number)].
        A stage before the last one returns [2 + A, T, D]: the output of its last layer, the residual stream, and the
        inputs of the A aux layers so far.
        """
        ops = self.ops
        step = self._prepare(ops, positions, kv_caches, attn_metadata, adapters)
        aux: list[Tensor] = []
        if received is not None:
            hidden, residual, *aux = received
        else:
            hidden, residual = None, self.embed(input_ids)
            if adapters is not None:
                adapters.embed(input_ids, residual)
            if self._embedding_multiplier != 1:
                residual.mul_(self._embedding_multiplier)
        deep: Sequence[Tensor] = ()  # added to the outputs of the first layers
        if images is not None:
            features, *deep = images.features.split(self.config.hidden_size, dim=-1)
            residual.index_copy_(0, images.places, features)
            if images.spans:
                whole = ImageAttention(ops, attn_metadata, images.spans, kv_caches[0][0].shape[1])
                step = replace(step, images=whole)
        self.before_layers()
        is_whole = self._sharding.size == 1 and self._sharding.layers is None and not self.aux_layers
        if is_whole and not deep and step.images is None:
            if self._tapes is None or self._tapes.ops is not ops:
                self._tapes = LayerTapes(ops, self._run_layers)
            return self._tapes.run(residual, kv_caches, step)[0].clone()
        for index, layer in enumerate(self.layers, start=self._first):
            assert isinstance(layer, DecoderLayer)
            if index in self.aux_layers:
                aux.append(residual.clone() if hidden is None else residual + hidden)
            hidden, residual = layer(hidden, residual, kv_caches[layer.cache_index], step)
            if images is not None and index < len(deep):
                hidden.index_add_(0, images.places, deep[index])
        assert hidden is not None, "a decoder has at least one layer"
        if self._end < len(self.specs):
            return torch.stack([hidden, residual, *aux])
        if len(self.specs) in self.aux_layers:
            aux.append(residual + hidden)
        final = add_norm(hidden, residual, self.norm, ops)
        return torch.cat([final, *aux], dim=-1) if aux else final

    def compute_logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Return the logits of final hidden states: [R, D or more] -> [R, V] float32.

        Args:
            adapters: those of the rows, from `StepAdapters.select_head`.
        """
        size = self.config.hidden_size
        final = hidden if hidden.shape[-1] == size else hidden[:, :size].contiguous()
        logits: Tensor = self.lm_head(final, torch.float32, adapters)
        if self._sharding.comm is not None:
            gathered = self._sharding.comm.gather(logits, [length for _, length in self._vocab_parts])
            logits = logits if gathered is None else gathered  # only rank 0 samples
        if self.config.logits_multiplier != 1:
            logits *= self.config.logits_multiplier
        cap = self.config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return the KV cache content of each layer with attention, in layer order, those of other stages included."""
        return tuple(spec.kv_spec for spec in self.specs if spec.state is None)

    def make_stream(self, num_tokens: int, aux_layers: tuple[int, ...]) -> Tensor:
        """Return memory for what the stage before sends, see `forward`."""
        num_aux = sum(layer < self._first for layer in aux_layers)
        return self.norm.norm.new_empty(2 + num_aux, num_tokens, self.config.hidden_size)

    def list_held(self) -> slice:
        """Return which of `kv_specs` this rank holds."""
        return slice(None) if self._sharding.layers is None else slice(self._first, self._end)

    def list_head_parts(self) -> list[tuple[int, int]]:
        """Return (first KV head of this rank, number over all ranks) of each layer with attention."""
        totals = [spec.num_kv_heads for spec in self.config.layer_specs if spec.state is None]
        return [(self._sharding.kv_part(total)[0], total) for total in totals]

    def state_specs(self) -> tuple[StateCacheSpec, ...]:
        return tuple(spec.state.cache_spec for spec in self.specs if spec.state is not None)

    def reserve_positions(self, num_positions: int) -> None:
        """Extend the RoPE tables to positions [0, num_positions), so that they are not reallocated later."""
        for rope in self.ropes:
            rope.reserve(num_positions)

    def release_positions(self) -> None:
        """Free the RoPE tables; the next step computes them again, with the same values."""
        for rope in self.ropes:
            rope.release()

    def limit_positions(self, max_model_len: int) -> None:
        """Set the longest context that is allowed, which selects the frequencies of longrope."""
        for rope in self.ropes:
            rope.limit(max_model_len)

    def pack(self, quantization: Quantization | None = None) -> None:
        """Convert the loaded weights to the layout of the ops, as far as the loader has not. Call once, after loading.

        Raises:
            ValueError: a matrix does not allow this quantization.
        """
        self.quantization = quantization
        for module in self.modules():
            if isinstance(module, Linear | Experts) and not module.is_packed:
                module.pack(self.ops, quantization)

    def move(self, device: torch.device) -> None:
        """Move all but the packed matrices, which are where their ops want them."""
        for parameter in self.parameters():
            if parameter is self.embed_tokens and self.embedding is not None:
                parameter.data = torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
            else:
                parameter.data = parameter.data.to(device)
        for rope in self.ropes:
            rope.move(device)

    def unpack_embedding(self) -> Tensor:
        """Return the table of the embedding, [V, D] in the model's dtype."""
        if self.embedding is None:
            return self.embed_tokens.detach()
        return self.embed(torch.arange(self.config.vocab_size))

    def repack(self, ops: Ops) -> Iterator[None]:
        """Move to other ops. Repacks one matrix per iteration; steps may run in between."""
        yield from repack_modules(self.modules(), self.ops, ops, self.quantization)
        self.ops = ops

    def weight_targets(self) -> WeightTargets:
        targets: Targets = add_prefix("model.norm", self.norm.weight_targets())
        tied = {}
        if not self._first:
            keep = self._keep_embedding if self._sharding.size == 1 else None
            targets[_EMBEDDING] = WeightTarget(self.embed_tokens, keep=keep, owner=self)
            if self.config.tie_word_embeddings:
                tied[_HEAD] = _EMBEDDING
            else:
                targets |= add_prefix("lm_head", self.lm_head.weight_targets())
        for index, layer in enumerate(self.layers, start=self._first):
            assert isinstance(layer, DecoderLayer)
            targets |= add_prefix(f"model.layers.{index}", layer.weight_targets())
        # Layers that predict several tokens follow the others. Those before and after this stage are in other stages.
        config = self.config
        num_more = 0 if config.mtp_prefix else config.num_mtp_layers
        others = [*range(self._first), *range(self._end, len(self.specs) + num_more)]
        ignored = [f"model.layers.{index}." for index in others] + (
            [_EMBEDDING, _HEAD] if self._first else []
        )
        found = WeightTargets(targets, tied, _DERIVED_SUFFIXES, tuple(ignored))
        found = found.rename(config.weight_prefix, config.weight_renames)
        more = config.ignored_weights + ((config.mtp_prefix,) if config.mtp_prefix else ())
        return replace(found, ignored_prefixes=found.ignored_prefixes + more)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, [T] -> [T, D]."""
        if self.embedding is None:
            return F.embedding(input_ids, self.embed_tokens)
        assert self.ops.unpack_rows is not None, "these ops have packed the embedding"
        return self.ops.unpack_rows(self.embedding, input_ids).to(self.dtype)

    def _keep_embedding(self, tensor: Tensor | EncodedTensor) -> None:
        self._given_embedding = tensor
        if self.config.tie_word_embeddings:
            self.lm_head.keep("", tensor)

    def pack_embedding(self, quantization: Quantization | None) -> None:
        """Pack the table, and a tied head with it: as one matrix, unless the head is rounded."""
        tensor, self._given_embedding = self._given_embedding, None
        if tensor is None:
            return
        is_tied = self.config.tie_word_embeddings
        if is_tied:
            self.lm_head.pack(self.ops, quantization)
        if is_tied and quantization is None:
            self.take_embedding(self.lm_head.packed)
        else:
            matrix = tensor if isinstance(tensor, Tensor) else tensor.to_grouped()
            self.take_embedding(self.ops.pack_linear(matrix, None, None, self.dtype))

    def take_embedding(self, packed: PackedWeight) -> None:
        """Take the table in the layout of the ops."""
        self.embedding = packed
        # The parameter says shape, dtype and device, and takes no memory.
        self.embed_tokens.data = self.embed_tokens.new_empty(1).expand(self.embed_tokens.shape)

    def _prepare(
        self, ops: Ops, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttnMetadata,
        adapters: StepAdapters | None,
    ) -> StepInputs:
        query_lens, seq_lens = metadata.query_lens_list, metadata.seq_lens_list
        rotations = tuple(rope.compute(positions, query_lens, seq_lens) for rope in self.ropes)
        groups = plan_groups(ops, metadata, kv_caches[0][0].shape[1])
        return StepInputs(ops, metadata, groups, rotations, adapters)

    def _run_layers(
        self, residual: Tensor, kv_caches: Sequence[KVCache], step: StepInputs,
        next_layer: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """Run all layers and the last norm on the residual stream, which is overwritten."""
        hidden = None
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            next_layer()
            hidden, residual = layer(hidden, residual, kv_caches[layer.cache_index], step)
        return (add_norm(hidden, residual, self.norm, step.ops),)

    def _list_parts(self) -> dict[str, MatrixPart]:
        prefix, parts = self.config.weight_prefix, {}
        for name, target in self.weight_targets().targets.items():
            if target.part is not None:
                parts[name.removeprefix(prefix).removesuffix(".weight")] = target.part
        if not self._first:
            head = MatrixPart(self.lm_head, 0, self.lm_head.out_features, None, self._head_shard)
            parts.setdefault("lm_head", head)
        return parts
