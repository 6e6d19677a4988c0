"""LatentAttention: multi-head latent attention, whose cache holds one vector per token for all heads.

    latent, rotated part   of a token, normed and rotated: its key of size rank + rope_size in the cache
    query of a head        (plain query) . (key matrix of the head), rotated query
    attention              of all heads over that one key; values are the latents
    result of a head       (mixed latents) . (value matrix of the head)

The key matrix moves from the keys to the queries, so that no key of a head is ever made. Prompts are computed in the
same way, which keeps their results equal however they are cut. Source: DeepSeek-V2 (MLA).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.mixers.attention import StepInputs, attend
from engine.model.rope import order_pairs
from engine.model.row_linear import make_row_linear
from engine.model.shard import Shard
from engine.model.sharding import Sharding
from engine.model.weight_targets import Targets, WeightTarget, add_prefix, own
from kernels.ops import KVCache, Quantization
from kernels.torch.elementwise import apply_rope


class HeadMatrices(Linear):
    """The matrices of each head that turn latents into keys and values, one product each.

    Args:
        num_all_heads: of all ranks; this rank has those of `part`, (first, number).
    """

    def __init__(
        self, spec: LayerSpec, num_all_heads: int, part: tuple[int, int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert spec.latent is not None, "the layer has a latent"
        self._latent = spec.latent
        self._num_heads = part[1]
        self._head_rows = spec.latent.plain_size + spec.latent.value_size
        rows = part[1] * self._head_rows
        super().__init__(spec.latent.rank, rows, False, dtype=dtype, device=device, int4_as="int8")
        self._shard = Shard(0, num_all_heads * self._head_rows, ((part[0] * self._head_rows, rows),))

    def absorb(self, queries: Tensor) -> Tensor:
        """Map plain queries [T, H, plain_size] to what latents are multiplied with, [T, H, rank]."""
        return self._multiply(queries, 0)

    def expand(self, latents: Tensor) -> Tensor:
        """Map mixed latents [T, H, rank or more] to values [T, H, value_size]."""
        return self._multiply(latents[..., : self._latent.rank], 1)

    def _multiply(self, x: Tensor, which: int) -> Tensor:
        pairs = self._packed[which::2]
        return torch.stack(
            [multiply(x[:, head], packed, None) for head, (multiply, packed) in enumerate(pairs)], dim=1
        )

    def _cut(self, weight: Tensor, quantization: Quantization | None) -> Sequence[Tensor]:
        size = self._latent.plain_size
        heads = weight.view(self._num_heads, self._head_rows, -1)
        return [matrix for head in heads for matrix in (head[:size].t(), head[size:])]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        keys = [half.t() for half in parts[::2]]
        return torch.cat([each for pair in zip(keys, parts[1::2], strict=True) for each in pair])

    def weight_targets(self) -> Targets:
        assert self.weight is not None, "weights are loaded before they are packed"
        return own({"weight": WeightTarget(self.weight, self._shard)}, self)


class LatentAttention(nn.Module):
    """Attention of one layer with a `LatentSpec`; arguments as those of `Attention`."""

    name = "self_attn"  # in the names of the checkpoint

    def __init__(
        self, spec: LayerSpec, rope_index: int, dtype: torch.dtype, device: torch.device,
        sharding: Sharding, group: int,
    ) -> None:
        super().__init__()
        whole, spec = spec, sharding.shrink(spec)
        assert spec.latent is not None, "the layer has a latent"
        self._spec, self._latent = spec, spec.latent
        self._rope_index, self._group = rope_index, group
        sizes = self._latent
        first_head, num_heads = part = sharding.part(whole.num_heads)
        rotated = torch.tensor(
            order_pairs(spec.rope, sizes.rope_size, sizes.rope_pairs) or range(sizes.rope_size)
        )
        head = torch.cat((torch.arange(sizes.plain_size), sizes.plain_size + rotated))
        q_rows = (torch.arange(num_heads).unsqueeze(1) * sizes.query_size + head).flatten()
        q_size, all_q_size = num_heads * sizes.query_size, whole.num_heads * sizes.query_size
        shard = Shard(0, all_q_size, ((first_head * sizes.query_size, q_size),))
        orders = {"kv_a_proj_with_mqa": torch.cat((torch.arange(sizes.rank), sizes.rank + rotated))}
        parts, shards = {"kv_a_proj_with_mqa": sizes.key_size}, dict[str, Shard]()
        if sizes.query_rank is None:
            parts, orders["q_proj"] = {"q_proj": q_size} | parts, q_rows
            if sharding.size > 1:
                shards["q_proj"] = shard
        else:
            parts = {"q_a_proj": sizes.query_rank} | parts
        self.a_proj = Linear(
            spec.hidden_size, sum(parts.values()), False, parts, dtype=dtype, device=device, orders=orders,
            shards=shards, int4_as="int6",
        )
        self.q_b_proj = self.q_norm = None
        if sizes.query_rank is not None:
            self.q_b_proj = Linear(
                sizes.query_rank, q_size, False, dtype=dtype, device=device, orders={"": q_rows},
                shards={"": shard} if sharding.size > 1 else None, int4_as="int6",
            )
            self.q_norm = make_parameter(sizes.query_rank, dtype=dtype, device=device)
        self.kv_norm = make_parameter(sizes.rank, dtype=dtype, device=device)
        self.kv_b_proj = HeadMatrices(spec, whole.num_heads, part, dtype, device)
        self.o_proj = make_row_linear(
            whole.num_heads * sizes.value_size, spec.hidden_size, False, sharding, dtype, device, int4_as="int6"
        )

    def forward(self, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], and write the step's keys into the cache."""
        q = self.store_keys(hidden, kv_cache, step)
        attended = attend(q, kv_cache, step, self._group, self._spec)
        values = self.kv_b_proj.expand(attended.view(*q.shape)).flatten(1)
        return self.o_proj(values, adapters=step.adapters)

    def store_keys(self, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        """Write the step's keys into the cache. Returns the queries, [T, heads, key_size]."""
        sizes, ops, rotation = self._latent, step.ops, step.rotations[self._rope_index]
        projected = self.a_proj(hidden, adapters=step.adapters)
        q, latent, rotated = projected.split(
            (projected.shape[1] - sizes.key_size, sizes.rank, sizes.rope_size), dim=1
        )
        if self.q_b_proj is not None and self.q_norm is not None:
            normed = ops.rms_norm(q.contiguous(), self.q_norm, sizes.norm_eps)
            q = self.q_b_proj(normed, adapters=step.adapters)
        q = q.unflatten(1, (-1, sizes.query_size))
        plain, turned = q.split((sizes.plain_size, sizes.rope_size), dim=-1)
        turned = apply_rope(torch.cat((turned, rotated.unsqueeze(1)), dim=1), rotation.cos, rotation.sin)
        latent = ops.rms_norm(latent.contiguous(), self.kv_norm, sizes.norm_eps)
        key = torch.cat((latent.unsqueeze(1), turned[:, -1:]), dim=-1)
        # All keys are written before any is read, because a request may read a block that another one fills now.
        ops.store_kv(key, key, *kv_cache, step.groups[self._group].slot_mapping)
        return torch.cat((self.kv_b_proj.absorb(plain), turned[:, :-1]), dim=-1)

    def weight_targets(self) -> Targets:
        targets = self.a_proj.weight_targets()
        targets |= add_prefix("kv_b_proj", self.kv_b_proj.weight_targets())
        targets |= add_prefix("o_proj", self.o_proj.weight_targets())
        targets["kv_a_layernorm.weight"] = WeightTarget(self.kv_norm)
        if self.q_b_proj is not None and self.q_norm is not None:
            targets |= add_prefix("q_b_proj", self.q_b_proj.weight_targets())
            targets["q_a_layernorm.weight"] = WeightTarget(self.q_norm)
        return targets
