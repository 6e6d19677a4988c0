"""Attention of one layer: projections, norms of queries and keys, RoPE, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata
from engine.model.image_attention import ImageAttention
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.rope import Rotation, order_pairs
from engine.model.row_linear import make_row_linear
from engine.model.shard import Shard
from engine.model.sharding import ONE_RANK, Sharding
from engine.model.weight_targets import Targets, WeightTarget, add_prefix
from kernels import Ops
from kernels.ops import KVCache, Plan
from kernels.torch.elementwise import compute_sigmoid


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Inputs of a step that the layers of one group share."""

    slot_mapping: Tensor  # [T]
    block_tables: Tensor  # [R, max_blocks]
    plan: Plan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step that all layers share."""

    ops: Ops
    attn_metadata: AttnMetadata
    groups: tuple[GroupInputs, ...]
    rotations: tuple[Rotation, ...]  # one per kind of RoPE in the model
    adapters: StepAdapters | None = None
    images: ImageAttention | None = None  # None: all tokens see those before them only


def plan_groups(ops: Ops, metadata: AttnMetadata, block_size: int) -> tuple[GroupInputs, ...]:
    """Return the inputs of each group of layers."""
    found: list[GroupInputs] = []
    for slot_mapping, block_tables in zip(metadata.slot_mapping, metadata.block_tables, strict=True):
        plan = ops.make_plan(
            block_tables, metadata.query_start_loc, metadata.seq_lens, metadata.query_lens_list,
            metadata.seq_lens_list, block_size, metadata.max_query_len,
        )
        found.append(GroupInputs(slot_mapping, block_tables, plan))
    return tuple(found)


def attend(
    q: Tensor, kv_cache: KVCache, step: StepInputs, group_index: int, spec: LayerSpec, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of queries [T, heads, head_size] over the cache of a group of layers."""
    ops, metadata, group = step.ops, step.attn_metadata, step.groups[group_index]
    found = ops.paged_attention(
        q, *kv_cache, group.block_tables, metadata.query_start_loc, metadata.seq_lens, scale=spec.scale,
        sliding_window=spec.window, soft_cap=spec.soft_cap, sinks=sinks, plan=group.plan,
    )
    if step.images is not None:
        step.images.attend(found, q, kv_cache, group_index, spec)
    return found


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache.

    The weights of query and key norm are stored as one row per head, so that one call computes both. Numbers of query
    and key heads are stored in the order that `order_pairs` gives.

    Args:
        spec: of the whole layer; a rank has some of its heads.
        rope_index: index of the layer's rotation in `StepInputs.rotations`.
        group: index of the layer's group in `StepInputs.groups`.
    """

    name = "self_attn"  # in the names of the checkpoint

    def __init__(
        self, spec: LayerSpec, rope_index: int, dtype: torch.dtype, device: torch.device,
        sharding: Sharding = ONE_RANK, group: int = 0,
    ) -> None:
        super().__init__()
        whole, spec = spec, sharding.shrink(spec)
        self._spec = spec
        self._sharding = sharding
        self._num_all_heads = whole.num_heads
        self._rope_index = rope_index
        self._group = group
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        order = order_pairs(spec.rope, spec.head_size, spec.style.rope_pairs)
        parts, orders = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, {}
        if order is not None:
            orders = {"q_proj": _repeat(order, spec.num_heads), "k_proj": _repeat(order, spec.num_kv_heads)}
        self._gate_size = q_size if spec.style.has_output_gate else 0
        if self._gate_size:
            # The checkpoint has the rows of a head's query and gate together.
            rows = torch.arange(2 * q_size).view(-1, 2, spec.head_size).transpose(0, 1).flip(0).flatten()
            if order is not None:
                rows[q_size:] = rows[q_size:][orders["q_proj"]]
            parts["q_proj"], orders["q_proj"] = 2 * q_size, rows
        if spec.style.has_fused_qkv:
            parts = {"qkv_proj": q_size + 2 * kv_size}
            if order is not None:
                heads = torch.arange(q_size + 2 * kv_size)
                heads[: q_size + kv_size] = _repeat(order, spec.num_heads + spec.num_kv_heads)
                orders = {"qkv_proj": heads}
        self._order = None if order is None else torch.tensor(order)
        self.qkv_proj = Linear(
            spec.hidden_size, sum(parts.values()), spec.qkv_bias, parts, dtype=dtype, device=device,
            orders=orders, shards=_shard_heads(whole, sharding) if sharding.size > 1 else None,
            int4_as="int6",
        )
        self.o_proj = make_row_linear(
            *(whole.num_heads * spec.head_size, spec.hidden_size, spec.output_bias),
            *(sharding, dtype, device),
            int4_as="int6",
        )
        self.qk_norm = None
        if spec.style.qk_norm != "none":
            num_heads = spec.num_heads + spec.num_kv_heads
            self.qk_norm = make_parameter(num_heads, spec.head_size, dtype=dtype, device=device)
        self.sinks = None
        if spec.style.has_sinks:
            self.sinks = make_parameter(spec.num_heads, dtype=torch.float32, device=device)

    def forward(self, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], and write the step's keys and values into the cache."""
        heads, gate = self._project(hidden, step)
        q = self._store(heads, kv_cache, step)
        attended = attend(q, kv_cache, step, self._group, self._spec, self.sinks)
        attended = attended.view(hidden.shape[0], -1)
        if gate is not None:
            attended = attended * compute_sigmoid(gate)
        return self.o_proj(attended, adapters=step.adapters)

    def store_keys(self, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        """Write the step's keys and values into the cache. Returns the queries, [T, heads, head_size]."""
        return self._store(self._project(hidden, step)[0], kv_cache, step)

    def _project(self, hidden: Tensor, step: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Return queries, keys and values [T, heads, head_size], and the output gate [T, heads * head_size]."""
        projected, gate = self.qkv_proj(hidden, adapters=step.adapters), None
        if self._gate_size:
            gate, projected = projected.tensor_split((self._gate_size,), dim=1)
        return projected.view(hidden.shape[0], -1, self._spec.head_size), gate

    def _store(self, heads: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        ops, spec, rotation = step.ops, self._spec, step.rotations[self._rope_index]
        is_full_norm = spec.style.qk_norm == "full"
        if is_full_norm:
            self._norm_all_heads(heads, ops)
        # All keys are written before any is read, because a request may read a block that another one fills now.
        q = ops.norm_rope_store(
            heads, None if is_full_norm else self.qk_norm, spec.norm_eps, rotation.cos, rotation.sin,
            *kv_cache, step.groups[self._group].slot_mapping, spec.num_heads,
        )
        return q if rotation.query_scale is None else (q * rotation.query_scale).to(q.dtype)

    def _norm_all_heads(self, heads: Tensor, ops: Ops) -> None:
        """Norm all queries of a token together, and all its keys, in place."""
        assert self.qk_norm is not None, "the style has this norm"
        num_heads, end = self._spec.num_heads, self._spec.num_heads + self._spec.num_kv_heads
        for part in (slice(0, num_heads), slice(num_heads, end)):
            flat = heads[:, part].flatten(1)
            heads[:, part] = ops.rms_norm(flat, self.qk_norm[part].flatten(), self._spec.norm_eps).view_as(
                heads[:, part]
            )

    def weight_targets(self) -> Targets:
        targets = self.qkv_proj.weight_targets() | add_prefix("o_proj", self.o_proj.weight_targets())
        if self.qk_norm is not None:
            num_heads, offset = self._spec.num_heads, self._spec.style.norm_offset
            for name, rows in (("q_norm", self.qk_norm[:num_heads]), ("k_norm", self.qk_norm[num_heads:])):
                if self._spec.style.qk_norm == "head":
                    target = WeightTarget(rows, is_repeated=True, order=self._order, offset=offset)
                else:
                    order = None if self._order is None else _repeat(self._order.tolist(), len(rows))
                    target = WeightTarget(rows.view(-1), order=order, offset=offset)
                targets[f"{name}.weight"] = target
        if self.sinks is not None:
            part = self._sharding.part(self._num_all_heads)
            targets["sinks"] = WeightTarget(self.sinks, Shard(0, self._num_all_heads, (part,)))
        return targets


def _shard_heads(spec: LayerSpec, sharding: Sharding) -> dict[str, Shard]:
    """Return the rank's rows of the query, key and value matrices, separate or in one."""
    size, q_size, kv_size = (
        spec.head_size, spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size,
    )
    first, count = sharding.kv_part(spec.num_kv_heads)
    queries, keys = sharding.part(q_size), (first * size, count * size)
    if spec.style.has_fused_qkv:
        shifted = [(offset + keys[0], keys[1]) for offset in (q_size, q_size + kv_size)]
        return {"qkv_proj": Shard(0, q_size + 2 * kv_size, (queries, *shifted))}
    key_shard = Shard(0, kv_size, (keys,))
    return {"q_proj": Shard(0, q_size, (queries,)), "k_proj": key_shard, "v_proj": key_shard}


def _repeat(order: list[int], num_heads: int) -> Tensor:
    """Return the order of the rows of several heads, each with this order."""
    starts = torch.arange(num_heads).unsqueeze(1) * len(order)
    return (starts + torch.tensor(order)).flatten()
