"""MoE: a mixture-of-experts block, which takes the place of the MLP in a decoder layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from engine.comm import Comm, fold
from engine.model.adapters import StepAdapters
from engine.model.formats.encoded import EncodedPart, EncodedTensor, GroupedColumns
from engine.model.formats.mxfp4 import Mxfp4Tensor
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, find_most_bits, make_parameter
from engine.model.mlp import MLP
from engine.model.moe_spec import MoESpec
from engine.model.shard import Shard
from engine.model.sharding import Sharding
from engine.model.weight_targets import Targets, WeightTarget, add_prefix, own
from kernels import Ops
from kernels.grouped import GROUP_SIZE, ChangedRows, GroupedRows, align
from kernels.ops import ExpertRows, ExpertWeights, PackedExperts, Quantization, RunExperts
from kernels.torch.elementwise import compute_sigmoid


class Experts(nn.Module):
    """The rank's part of a layer's experts. The loader fills the matrices; then they are packed for the ops.

    A rank has a part of each expert's inner values, which is multiplied in slices as in `RowLinear`; or whole experts.
    """

    def __init__(
        self, spec: MoESpec, hidden_size: int, dtype: torch.dtype, device: torch.device, sharding: Sharding
    ) -> None:
        super().__init__()
        self._spec = spec
        self._sharding = sharding
        self._first, num_experts = 0, spec.num_experts
        self._inner = sharding.part(spec.inner_size)
        if sharding.has_whole_experts:
            self._inner = (0, spec.inner_size)
            ends = [0, *sharding.expert_ends(spec.num_experts)]
            self._first, num_experts = ends[sharding.rank], ends[sharding.rank + 1] - ends[sharding.rank]
        self._num_experts, (_, inner_size) = num_experts, self._inner

        def make(*shape: int) -> nn.Parameter:
            return make_parameter(*shape, dtype=dtype, device=device)

        self.gate_up: nn.Parameter | None = make(num_experts, 2 * inner_size, hidden_size)
        self.down: nn.Parameter | None = make(num_experts, hidden_size, inner_size)
        self.gate_up_bias = make(num_experts, 2 * inner_size) if spec.has_bias else None
        self.down_bias = make(num_experts, hidden_size) if spec.has_bias else None
        self._given: dict[tuple[str, int], EncodedTensor] = {}  # gate, up or down of an expert, until all are packed
        # Each packed slice is beside its op, because layers move to other ops while steps run.
        self._packed: list[tuple[RunExperts, PackedExperts]] = []

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Map [T, M] to [T, M]; see `kernels.ops.RunExperts`."""
        comm, (run, packed) = self._sharding.comm, self._packed[0]
        if comm is not None and self._sharding.has_whole_experts:
            run_whole = self._run_whole if hidden.is_cpu else self._add_whole
            return run_whole(hidden, ids, weights, comm)
        if len(self._packed) == 1 and comm is None:
            return run(hidden, ids, weights, packed)
        total = fold([run(hidden, ids, weights, packed, torch.float32) for run, packed in self._packed])
        return (total if comm is None else comm.sum(total)).to(hidden.dtype)

    def _run_whole(self, hidden: Tensor, ids: Tensor, weights: Tensor, comm: Comm) -> Tensor:
        """Run the rank's experts, collect the results of all, and add them in the order of a token's ids."""
        num_tokens, top_k = ids.shape
        ends = torch.tensor(self._sharding.expert_ends(self._spec.num_experts))
        owners = torch.bucketize(ids.flatten(), ends, right=True)
        order = owners.argsort(stable=True)  # pairs of token and expert, by rank
        counts = owners.bincount(minlength=comm.size).tolist()
        own = order.split(counts)[comm.rank]
        rows = hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)
        if len(own):
            experts = ids.flatten()[own, None] - self._first
            ones = torch.ones(len(own), 1)
            run, packed = self._packed[0]
            rows = run(hidden[own // top_k], experts, ones, packed, torch.float32)
        collected = comm.collect(rows, counts)
        places = order.argsort().view(num_tokens, top_k)
        total = torch.zeros(hidden.shape)
        for slot in range(top_k):
            total.addcmul_(collected[places[:, slot]], weights[:, slot, None])
        return total.to(hidden.dtype)

    def _add_whole(self, hidden: Tensor, ids: Tensor, weights: Tensor, comm: Comm) -> Tensor:
        """As `_run_whole`, without reading counts from a device; the order of additions depends on the ranks.

        The pairs of other ranks' experts are skipped.
        """
        own = ids - self._first
        is_own = (own >= 0) & (own < self._num_experts)
        run, packed = self._packed[0]
        part = run(hidden, own.where(is_own, -1), weights, packed, torch.float32)
        return comm.sum(part).to(hidden.dtype)

    def pack(self, ops: Ops, quantization: Quantization | None) -> None:
        """Convert the loaded matrices to the layout of the ops. Earlier views of them become invalid.

        Raises:
            ValueError: the matrices do not allow this quantization.
        """
        assert self.gate_up is not None and self.down is not None, "experts are packed once, then repacked"
        weights = ExpertWeights(
            self.gate_up.data, self.gate_up_bias, self.down.data, self.down_bias, self._spec.activation
        )
        joined = self._join_codes(weights, quantization) or weights
        slices: Iterator[ExpertWeights | ExpertRows] = iter([joined])
        if self._is_cut:
            slices = _cut_inner(joined, self._num_slices, self._num_slices * self._sharding.size)
        self._packed = [(ops.run_experts, ops.pack_experts(each, quantization)) for each in slices]
        self.gate_up = self.down = None

    @property
    def _is_cut(self) -> bool:
        """Whether each expert is multiplied in slices of its inner values."""
        sharding = self._sharding
        return (sharding.size > 1 or sharding.is_sliced) and not sharding.has_whole_experts

    @property
    def _num_slices(self) -> int:
        return self._sharding.count_slices(self._inner[1], multiple=1)

    def _keep_codes(self, part: str, expert: int, shard: Shard | None, tensor: EncodedTensor) -> None:
        self._given[part, expert] = tensor if shard is None else EncodedPart(tensor, shard)

    def _keep_blocks(self, parts: tuple[str, ...], tensor: EncodedTensor) -> None:
        """Take a stack of matrices, whose rows belong to the parts in turn."""
        assert isinstance(tensor, Mxfp4Tensor), "no other format has stacks"
        for expert in range(self._num_experts):
            for place, part in enumerate(parts):
                self._given[part, expert] = tensor[expert][place :: len(parts)]

    def _join_codes(self, weights: ExpertWeights, quantization: Quantization | None) -> ExpertRows | None:
        """Return the matrices in codes; None if some of them have none, and `weights` hold all values."""
        gate, up = weights.gate_up.chunk(2, dim=1)
        memories = {"gate": gate, "up": up, "down": weights.down}
        if quantization is None and len(self._given) < len(memories) * self._num_experts:
            while self._given:
                (part, expert), tensor = self._given.popitem()
                memories[part][expert].copy_(tensor.dequantize())
        if not self._given:
            return None

        def collect(part: str) -> list[Tensor | GroupedRows]:
            given = (self._given.pop((part, expert), None) for expert in range(self._num_experts))
            values = memories[part]
            return [values[at] if each is None else each.to_grouped() for at, each in enumerate(given)]

        rows = align([*collect("gate"), *collect("up")], find_most_bits(quantization))
        down = align(collect("down"), find_most_bits("int6" if quantization == "int4" else quantization))
        return ExpertRows(
            gate=rows[: self._num_experts], up=rows[self._num_experts :], down=down,
            gate_up_bias=weights.gate_up_bias, down_bias=weights.down_bias, activation=weights.activation,
            dtype=weights.down.dtype,
        )

    def take_packed(self, ops: Ops, *packed: PackedExperts) -> None:
        """Take the matrices in the layout of the ops, in place of `pack`."""
        self._packed = [(ops.run_experts, each) for each in packed]
        self.gate_up = self.down = None

    def repack(self, old: Ops, new: Ops, quantization: Quantization | None) -> None:
        for index, (_, packed) in enumerate(self._packed):
            weights = old.unpack_experts(packed)
            self._packed[index] = (new.run_experts, new.pack_experts(weights, quantization))

    def list_packed(self) -> list[PackedExperts]:
        return [packed for _, packed in self._packed]

    @property
    def is_packed(self) -> bool:
        return bool(self._packed)

    def weight_targets(self) -> Targets:
        return own(self._make_targets(), self)

    def _make_targets(self) -> Targets:
        assert self.gate_up is not None and self.down is not None, "weights are loaded before they are packed"
        names = self._spec.names
        match names.layout:
            case "separate":
                return self._separate_targets(self.gate_up, self.down)
            case "stacked":
                memories = (self.gate_up, self.down)
                pairs = zip(names.experts, memories, strict=True)
                return self._shard({f"{name}.weight": WeightTarget(memory) for name, memory in pairs})
            case _:
                return self._shard(self._pair_targets(self.gate_up, self.down))

    def _shard(self, targets: Targets) -> Targets:
        """Return targets that take this rank's part out of tensors of all experts."""
        if self._sharding.size == 1:
            return targets
        if self._sharding.has_whole_experts:
            experts = Shard(0, self._spec.num_experts, ((self._first, self._num_experts),))
            return {name: target.cut(experts) for name, target in targets.items()}
        shards = self._find_inner_shards()
        return {name: target.cut(shards[name]) if name in shards else target for name, target in targets.items()}

    def _find_inner_shards(self) -> dict[str, Shard]:
        """Return the rank's part of each stacked tensor with a dimension of inner values."""
        whole, (start, length) = self._spec.inner_size, self._inner
        pairs = ((2 * start, 2 * length),)  # gate and up alternate
        match self._spec.names.layout:
            case "stacked":
                gate_up, down = (f"{name}.weight" for name in self._spec.names.experts)
                halves = ((start, length), (whole + start, length))
                return {gate_up: Shard(1, 2 * whole, halves), down: Shard(2, whole, ((start, length),))}
            case "interleaved":
                matrices = {
                    "experts.gate_up_proj": Shard(2, 2 * whole, pairs),
                    "experts.down_proj": Shard(1, whole, ((start, length),)),
                }
            case _:
                matrices = {
                    "experts.gate_up_proj": Shard(1, 2 * whole, pairs),
                    "experts.down_proj": Shard(2, whole, ((start, length),)),
                }
        return matrices | {"experts.gate_up_proj_bias": Shard(1, 2 * whole, pairs)}

    def _separate_targets(self, gate_up: Tensor, down: Tensor) -> Targets:
        gate, up, down_name = self._spec.names.experts
        is_whole = self._inner == (0, self._spec.inner_size)
        rows, columns = (
            None if is_whole else Shard(dim, self._spec.inner_size, (self._inner,)) for dim in (0, 1)
        )
        gate_memory, up_memory = gate_up.chunk(2, dim=1)
        parts: list[tuple[str, Tensor, Shard | None, str]] = [
            (f"{gate}.weight", gate_memory, rows, "gate"),
            (f"{up}.weight", up_memory, rows, "up"),
            (f"{down_name}.weight", down, columns, "down"),
        ]
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate_bias, up_bias = self.gate_up_bias.chunk(2, dim=1)
            parts += [(f"{gate}.bias", gate_bias, rows, ""), (f"{up}.bias", up_bias, rows, "")]
            parts.append((f"{down_name}.bias", self.down_bias, None, ""))
        keeps_codes = not self._is_cut or self._inner[1] // self._num_slices % GROUP_SIZE == 0
        targets: Targets = {}
        for expert in range(self._spec.num_experts):
            index = expert - self._first
            is_own = 0 <= index < self._num_experts
            for name, stacked, shard, part in parts:
                memory = stacked[index] if is_own else stacked.new_empty(stacked.shape[1:], device="meta")
                keep = partial(self._keep_codes, part, index, shard) if part and keeps_codes else None
                targets[f"experts.{expert}.{name}"] = WeightTarget(memory, shard, keep_codes=keep)
        return targets

    def _pair_targets(self, gate_up: Tensor, down: Tensor) -> Targets:
        """Return the targets of gpt-oss, whose rows of gate and up alternate."""
        assert self.gate_up_bias is not None and self.down_bias is not None, "gpt-oss has expert biases"
        rows = torch.arange(gate_up.shape[1])
        order = torch.cat((rows[::2], rows[1::2]))
        is_coded = self._spec.names.layout == "mxfp4"
        # Several ranks decode their parts, and one rank that must have their bits does, too.
        keep, keep_down = (
            partial(self._keep_blocks, parts) if is_coded and not self._sharding.is_sliced else None
            for parts in (("gate", "up"), ("down",))
        )
        gate_up, down = (each if is_coded else each.transpose(1, 2) for each in (gate_up, down))
        return {
            "experts.gate_up_proj": WeightTarget(
                gate_up, order=order, order_dim=1 if is_coded else 2, keep_codes=keep
            ),
            "experts.down_proj": WeightTarget(down, keep_codes=keep_down),
            "experts.gate_up_proj_bias": WeightTarget(self.gate_up_bias, order=order, order_dim=1),
            "experts.down_proj_bias": WeightTarget(self.down_bias),
        }


class MoE(nn.Module):
    """A router chooses experts for each token. Their weighted results are added, and a shared expert's if there is one.
    """

    def __init__(
        self, layer: LayerSpec, dtype: torch.dtype, device: torch.device, sharding: Sharding
    ) -> None:
        super().__init__()
        assert layer.moe is not None, "the layer has experts"
        self._spec = spec = layer.moe
        self.name = spec.names.block  # in the names of the checkpoint
        hidden_size = layer.hidden_size
        # Scores in float32: in bfloat16 two experts often have the same score.
        self.router = Linear(
            hidden_size, spec.num_experts, spec.has_bias, dtype=torch.float32, device=device,
            is_quantized=False,
        )
        self.correction_bias = None
        if spec.has_correction_bias:
            self.correction_bias = make_parameter(spec.num_experts, dtype=torch.float32, device=device)
        self.experts = Experts(spec, hidden_size, dtype, device, sharding)
        self.shared = None
        if spec.shared_size:
            self.shared = MLP(replace(layer, intermediate_size=spec.shared_size), dtype, device, sharding)
        self.shared_gate = None
        if spec.is_shared_gated:
            self.shared_gate = Linear(hidden_size, 1, False, dtype=dtype, device=device, is_quantized=False)

    def forward(self, hidden: Tensor, ops: Ops, adapters: StepAdapters | None = None) -> Tensor:
        """Map [T, M] to [T, M]."""
        scores = self.router(hidden.float(), adapters=adapters)
        ids, weights = ops.choose_experts(scores, self._spec, self.correction_bias)
        mixed = self.experts(hidden, ids, weights)
        if self.shared is None:
            return mixed
        shared = self.shared(hidden, ops, adapters)
        if self.shared_gate is not None:
            shared = shared * compute_sigmoid(self.shared_gate(hidden, adapters=adapters))
        return mixed + shared

    def weight_targets(self) -> Targets:
        names = self._spec.names
        targets = add_prefix(names.router, self.router.weight_targets()) | self.experts.weight_targets()
        if self.correction_bias is not None:
            targets[names.correction_bias] = WeightTarget(self.correction_bias)
        if self.shared is not None:
            targets |= add_prefix(names.shared, self.shared.weight_targets())
        if self.shared_gate is not None:
            targets |= add_prefix(f"{names.shared}_gate", self.shared_gate.weight_targets())
        return targets


def _cut_inner(
    experts: ExpertWeights | ExpertRows, num_slices: int, num_parts: int
) -> Iterator[ExpertWeights | ExpertRows]:
    """Yield experts with slices of the inner values.

    Args:
        num_parts: number of slices on all ranks. Each has this share of the down bias, so that they add up to it.
    """
    biases = None
    if experts.gate_up_bias is not None:
        biases = [half.chunk(num_slices, 1) for half in experts.gate_up_bias.chunk(2, 1)]
    down_bias = None if experts.down_bias is None else experts.down_bias / num_parts
    for index in range(num_slices):
        bias = None if biases is None else torch.cat([half[index] for half in biases], 1)
        if isinstance(experts, ExpertRows):
            yield replace(_slice_codes(experts, index, num_slices), gate_up_bias=bias, down_bias=down_bias)
        else:
            yield replace(_slice_values(experts, index, num_slices), gate_up_bias=bias, down_bias=down_bias)


def _slice_values(experts: ExpertWeights, index: int, num_slices: int) -> ExpertWeights:
    halves = (half.chunk(num_slices, 1)[index] for half in experts.gate_up.chunk(2, 1))
    down = experts.down.chunk(num_slices, 2)[index].contiguous()
    return replace(experts, gate_up=torch.cat([*halves], 1), down=down)


def _slice_codes(experts: ExpertRows, index: int, num_slices: int) -> ExpertRows:
    width = experts.down[0].shape[1] // num_slices
    start, end = index * width, (index + 1) * width
    rows = torch.arange(start, end)
    gate, up = ([ChangedRows(each, each.form, rows) for each in part] for part in (experts.gate, experts.up))
    return replace(experts, gate=gate, up=up, down=[GroupedColumns(each, start, end) for each in experts.down])


def repack_modules(
    modules: Iterable[nn.Module], old: Ops, new: Ops, quantization: Quantization | None
) -> Iterator[None]:
    """Move the matrices among modules to other ops, one per iteration; steps may run in between."""
    for module in modules:
        if isinstance(module, Linear | Experts):
            module.repack(old, new, quantization)
            yield
