"""TransformersModel: any decoder-only model of transformers over the paged KV cache.

    skeleton (meta device) ─▶ trace: which modules attend, in which shapes ─▶ leak probe ─▶ weights ─▶ packed matrices

The model's own code computes a step as one row of tokens with positions. Its attention, its `nn.Linear`s and its
experts are ours. Its output head is called with the hidden states of the sampled tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.kv_cache_spec import KVCacheSpec
from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata
from engine.model.mixers.attention import plan_groups
from engine.model.transformers_backend import packed_experts, paged_interface
from engine.model.transformers_backend.foreign import ForeignModel, WideLinear, replace_child
from engine.model.transformers_backend.paged_interface import AttentionCall, UnsupportedModel
from kernels import Ops
from kernels.ops import KVCache, Quantization


class WeightWatch(nn.Linear):
    """A `nn.Linear` of the skeleton that notices whether other code reads its matrix."""

    def __init__(self, source: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self._parameters.update(source._parameters)
        self.is_read = False

    def forward(self, x: Tensor) -> Tensor:
        dtype = self._parameters["weight"].dtype  # type: ignore[union-attr]
        return torch.empty(*x.shape[:-1], self.out_features, dtype=dtype, device=x.device)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.is_read = True
        return super().__getattr__(name)


class DecoderOutput(BaseModelOutputWithPast):
    """Hidden states as a decoder returns them; its other outputs, such as router logits, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class HiddenStates(nn.Module):
    """Stands in for the decoder under the output head: it returns the hidden states that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> HiddenStates:
        """Some heads call the inner part of the decoder."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return DecoderOutput(last_hidden_state=self.hidden)


class Skeleton:
    """The result of tracing a model on the meta device, before weights are loaded.

    Raises:
        UnsupportedModel: the paged cache cannot serve the model's attention.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            model = make_model(config)
        self.num_parameters = sum(each.numel() for each in model.parameters())
        self.is_tied = has_tied_head(model)
        watches = {name: WeightWatch(each) for name, each in _list_linears(model)}
        for name, watch in watches.items():
            model.set_submodule(name, watch)
        ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        decoder = find_decoder(model)[1]
        for module in model.modules():
            freeze_rope(module)
        self.calls: dict[str, AttentionCall] = paged_interface.trace(
            model, lambda: run_decoder(decoder, ids, ids)
        )
        if not self.calls:
            raise UnsupportedModel(
                f"{type(model).__name__} does not call attention through transformers' interface"
            )
        # Other code reads these matrices, so they stay as they are.
        self.read_matrices = frozenset(name for name, watch in watches.items() if watch.is_read)

    @property
    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return tuple(call.kv_spec for call in self.calls.values())


class TransformersModel(ForeignModel):
    """A decoder-only model of transformers.

    Args:
        model: with its weights loaded, on its device, and attention set to ours.
        skeleton: traced from the same config.
    """

    def __init__(
        self, model: PreTrainedModel, skeleton: Skeleton, config: Any, ops: Ops | None = None
    ) -> None:
        super().__init__(model, config, ops)
        self._specs = skeleton.kv_specs
        prefix, decoder = find_decoder(model)
        self._replace_matrices(model, skeleton.read_matrices)
        self._context = paged_interface.connect_layers(model, skeleton.calls)
        self._foreign_experts = packed_experts.pack_experts(model)
        for module in model.modules():
            freeze_rope(module)
        # A Python reference, not a submodule: the decoder is one of the source already.
        self._decoder = (decoder,)
        self._hidden = HiddenStates()
        self._head = (replace_child(model, prefix, self._hidden),)

    def adapt(self, ops: Ops) -> Ops:
        """Return the ops without recorded steps: the model's own code runs between them."""
        return replace(ops, is_graph_safe=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], attn_metadata: AttnMetadata,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Compute one step; see `DecoderModel.forward`."""
        context, metadata, ops = self._context, attn_metadata, self.ops
        context.ops, context.metadata, context.kv_caches = ops, metadata, kv_caches
        context.groups = plan_groups(ops, metadata, kv_caches[0][0].shape[1])
        self.before_layers()
        try:
            return run_decoder(self._decoder[0], input_ids[None], positions[None])[0]
        finally:  # the cache must be freed when its owner drops it
            context.metadata, context.groups, context.kv_caches = None, (), ()

    def compute_logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Return the logits of hidden states: [R, D] -> [R, V] float32, scaled and capped by the model's own head."""
        self._hidden.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # read for its shape alone
        try:
            logits: Tensor = self._head[0](input_ids=ids, use_cache=False).logits
        finally:
            self._hidden.hidden = None
        return logits[0].float()

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return self._specs

    def pack(self, quantization: Quantization | None = None) -> None:
        if quantization is not None and self._foreign_experts:
            names = ", ".join(sorted(self._foreign_experts))
            raise ValueError(f"{names} cannot be quantized: it does not gate its experts by SiLU")
        super().pack(quantization)

    def _replace_matrices(self, model: PreTrainedModel, kept: frozenset[str]) -> None:
        embedding = model.get_input_embeddings().weight
        for name, linear in _list_linears(model):
            if name not in kept:
                is_tied = linear.weight is embedding
                model.set_submodule(name, WideLinear(linear, linear.weight if is_tied else None))


def make_model(config: PreTrainedConfig, attention: str = paged_interface.NAME) -> PreTrainedModel:
    """Build the model of a config on the current device, with random weights, float32.

    Raises:
        ValueError: transformers has no decoder-only model for it.
    """
    paged_interface.register()
    packed_experts.register()
    is_ours = attention == paged_interface.NAME
    model: PreTrainedModel = find_auto_class(config).from_config(
        deepcopy(config),  # transformers writes into it
        attn_implementation=attention,
        experts_implementation=packed_experts.NAME if is_ours else "eager",
        dtype=torch.float32,
        trust_remote_code=False,
    )
    return model.eval()


def find_auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' factory for the config: of text models, else of those that take text among other inputs."""
    text, any_input = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    return text if type(config) in text._model_mapping else any_input


def run_decoder(decoder: nn.Module, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the final hidden states [1, T, D] of tokens [1, T] at their positions."""
    out = decoder(input_ids=input_ids, position_ids=positions, use_cache=False, return_dict=True)
    hidden: Tensor = out.last_hidden_state
    return hidden


def find_decoder(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the name and module of the part under the output head."""
    names = [
        name
        for name in (model.base_model_prefix, "model")
        if isinstance(getattr(model, name, None), nn.Module)
    ]
    if not names:
        raise UnsupportedModel(f"{type(model).__name__} has no decoder named {model.base_model_prefix!r}")
    prefix = names[0]
    decoder = getattr(model, prefix)
    code = decoder.forward.__code__ if hasattr(decoder.forward, "__code__") else None
    wrapped = getattr(decoder.forward, "__wrapped__", None)
    while wrapped is not None:
        code, wrapped = wrapped.__code__, getattr(wrapped, "__wrapped__", None)
    if code is None or "position_ids" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        raise UnsupportedModel(
            f"{type(decoder).__name__} does not take position_ids, so requests cannot share a row"
        )
    return prefix, decoder


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the output projection is the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def freeze_rope(module: nn.Module) -> None:
    """Keep the frequencies of dynamic RoPE and longrope as they are up to the original length.

    transformers would choose them by the longest row of the step, so one request would change another.
    """
    for name in ("rope_type", "rope_types"):
        kinds = getattr(module, name, None)
        if isinstance(kinds, str) and kinds != "default":
            setattr(module, name, "frozen")
        elif isinstance(kinds, dict):
            frozen = {layer: "default" if kind == "default" else "frozen" for layer, kind in kinds.items()}
            setattr(module, name, frozen)


def _list_linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear]
