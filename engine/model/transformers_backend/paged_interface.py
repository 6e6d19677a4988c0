"""The attention function that transformers models call instead of their own: keys and values go to the paged cache.

    trace   one forward pass on the meta device records which modules call attention, in which order and shapes
    run     each of these modules attends over the KV cache of its layer

transformers finds the function by name in its registry. Everything else, such as the step's inputs, is reached through
an attribute of the calling module, so that several models of one process do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheSpec, find_groups
from engine.model.attn_metadata import AttnMetadata
from engine.model.mixers.attention import GroupInputs
from kernels import Ops
from kernels.ops import KVCache

NAME = "troupe"
_ATTRIBUTE = "troupe_attention"
# Arguments without effect: the step's metadata contains them, or they concern unused outputs.
INERT = frozenset(
    [
        *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
        *("return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("position_embeddings", "num_items_in_batch", "logits_to_keep", "output_router_logits"),
    ]
)


class UnsupportedModel(ConfigError):
    """The model's code does something that the paged attention cannot do."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arithmetic of one layer's attention, as its code asks for it."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def head_size(self) -> int:
        """Elements per head in the cache: even, and the larger of key and value; the rest is zero."""
        size = max(self.key_size, self.value_size)
        return size + size % 2

    @property
    def kv_spec(self) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_size, self.window)


class Attend(Protocol):
    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        """Attend [1, heads, T, size] tensors, with sinks [heads]; returns [1, T, heads, value size]."""


def register() -> None:
    """Add the function to transformers' registry. Repeating it changes nothing."""
    transformers.AttentionInterface.register(NAME, _forward)


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface."""
    refused = [name for name, each in others.items() if each is not None and name not in INERT]
    refused += ["attention_mask"] if attention_mask is not None else []
    refused += ["dropout"] if dropout else []
    refused += ["is_causal"] if is_causal is False or getattr(module, "is_causal", True) is False else []
    if refused:
        names = ", ".join(refused)
        raise UnsupportedModel(
            f"{type(module).__name__} calls attention with {names}, which the paged kernels lack"
        )
    if query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedModel(
            f"{type(module).__name__} attends queries {list(query.shape)} over keys {list(key.shape)}, "
            "not over the tokens of a step"
        )
    call = AttentionCall(
        *(query.shape[1], key.shape[1], key.shape[3], value.shape[3]),
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        soft_cap=softcap or None,
    )
    attend: Attend | None = getattr(module, _ATTRIBUTE, None)
    if attend is None:
        raise UnsupportedModel(
            f"{type(module).__name__} calls attention, but did not when the model was traced"
        )
    return attend(module, query, key, value, call, s_aux), None


class AttentionTrace:
    """Records the attention calls of one forward pass, by module."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, AttentionCall] = {}

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        if module in self.calls:
            raise UnsupportedModel(f"{type(module).__name__} calls attention more than once in a step")
        if call.num_heads % call.num_kv_heads:
            raise UnsupportedModel(
                f"{call.num_heads} query heads do not share {call.num_kv_heads} KV heads evenly"
            )
        self.calls[module] = call
        return q.new_zeros(1, q.shape[2], call.num_heads, call.value_size)


@dataclass(slots=True)
class StepContext:
    """The step that is being computed; set before each forward pass."""

    ops: Ops | None = None
    metadata: AttnMetadata | None = None
    groups: tuple[GroupInputs, ...] = ()
    kv_caches: Sequence[KVCache] = field(default_factory=tuple)


class LayerAttention:
    """Writes the keys and values of one layer into the paged cache and attends over it."""

    def __init__(self, layer: int, group: int, traced: AttentionCall, context: StepContext) -> None:
        self._layer = layer
        self._group = group
        self._traced = traced
        self._context = context

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        assert call == self._traced, f"attention changed from {self._traced} to {call}"
        context, size = self._context, call.head_size
        ops, metadata = context.ops, context.metadata
        assert ops is not None and metadata is not None, "a step is being computed"
        group = context.groups[self._group]
        queries, keys, values = (_pad(each[0].transpose(0, 1), size) for each in (q, k, v))
        k_cache, v_cache = context.kv_caches[self._layer]
        ops.store_kv(keys, values, k_cache, v_cache, group.slot_mapping)
        more: dict[str, Any] = {} if sinks is None else {"sinks": sinks.float()}
        out = ops.paged_attention(
            queries.contiguous(), k_cache, v_cache, group.block_tables, metadata.query_start_loc,
            metadata.seq_lens, scale=call.scale, sliding_window=call.window, soft_cap=call.soft_cap,
            plan=group.plan, **more,
        )
        return out[None, :, :, : call.value_size]


def _pad(heads: Tensor, size: int) -> Tensor:
    """Append zeros to heads [T, H, D] up to a size: they add nothing to scores and sums."""
    return heads if heads.shape[2] == size else F.pad(heads, (0, size - heads.shape[2]))


def set_attention(model: nn.Module, attend: Attend) -> None:
    """Let every module of the model attend by this function."""
    for module in model.modules():
        setattr(module, _ATTRIBUTE, attend)


def connect_layers(model: nn.Module, calls: dict[str, AttentionCall]) -> StepContext:
    """Connect the modules that call attention, by name and in order, to the layers of the cache."""
    context = StepContext()
    groups = find_groups([call.kv_spec for call in calls.values()])
    for layer, (name, call) in enumerate(calls.items()):
        setattr(model.get_submodule(name), _ATTRIBUTE, LayerAttention(layer, groups[layer], call, context))
    return context


def trace(model: nn.Module, forward: Any) -> dict[str, AttentionCall]:
    """Run a model on the meta device once. Returns its attention calls by name of the module, in order.

    Raises:
        UnsupportedModel: it calls attention in a way that the paged cache cannot serve, or not at all.
    """
    found = AttentionTrace()
    set_attention(model, found)
    with torch.no_grad():
        forward()
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: call for module, call in found.calls.items()}
