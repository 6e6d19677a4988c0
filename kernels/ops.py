"""Ops: everything a forward pass calls, as one object. The model knows these signatures and no implementation.

    kernels.torch.make_ops         torch alone, on CPU and CUDA
    kernels.triton.make_ops        Triton kernels on CUDA
    kernels.cpu.make_native_ops    the native extension on CPU, once it is built

Letters in shapes: T tokens, R requests, H query heads, KV key heads, D head size, M model size, I inner size.
Tensors are on the device of the ops; results are contiguous, of the dtype of the input; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.grouped import GroupedRows
from kernels.lora import LoraMatrix, LoraSegment, LoraTables, PackedLora
from kernels.states import RunConv, ScanStates, StateSegments
from kernels.step_buffers import StepBuffers

# int6 is for the matrices of an int4 model whose rounding harms most; int4 where a device has no 6 bits.
Quantization = Literal["int8", "int6", "int4", "fp8"]
# Keys and values, each [num_blocks, block_size, KV, D]. Where the values are the keys it is one tensor, named
# twice, which is never int8 and has no pieces of values. In int8 the last dimension is D + INT8_SCALE_BYTES, and
# block_size is a multiple of PIECE_SLOTS. With `Ops.has_pieces` the numbers of a block are in the order of
# `cpu/src/kv_pieces.h`.
KVCache = tuple[Tensor, Tensor]
INT8_SCALE_BYTES = 4
PIECE_SLOTS = 16
MAX_INT8_HEAD_DIM = 1024  # and of the other caches of the native ops
# Inputs of a convolution [slots, K - 1, C] and states of a recurrence [slots, H, key, value] by slot, float32.
StateCache = tuple[Tensor, Tensor]
# Result of `pack_linear`: a tensor, or a small dataclass of the same implementation.
PackedWeight = Any
# Result of `pack_experts`; its type depends on the implementation.
PackedExperts = Any
# Plain values and tensors of a packed matrix.
StoredPart = tuple[dict[str, Any], dict[str, Tensor]]
# Result of `make_plan`; its type depends on the implementation.
Plan = Any


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """gate * sigmoid(alpha * gate) * up. With a limit, gate <= limit, |up| <= limit, and 1 is added to up."""

    alpha: float = 1.0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen, and how their results are weighted."""

    top_k: int  # experts per token
    # How logits become weights: softmax over all experts, sigmoid, or softmax over the chosen ones.
    score: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    is_normalized: bool = False  # whether the weights of a token are divided by their sum
    scale: float = 1.0  # factor of the weights
    num_groups: int = 1  # experts are chosen from the best groups only
    num_chosen_groups: int = 1
    group_best: int = 2  # a group counts as much as so many of its best experts


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts of one layer; E experts."""

    gate_up: Tensor  # [E, 2 I, M], gate first
    gate_up_bias: Tensor | None  # [E, 2 I]
    down: Tensor  # [E, M, I]
    down_bias: Tensor | None  # [E, M]
    activation: GatedActivation


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The matrices of all experts of one layer, each in codes: those of gate and up in one form, those of down too."""

    gate: Sequence[GroupedRows]  # E of [I, M]
    up: Sequence[GroupedRows]
    down: Sequence[GroupedRows]  # E of [M, I]
    gate_up_bias: Tensor | None  # [E, 2 I]
    down_bias: Tensor | None  # [E, M]
    activation: GatedActivation
    dtype: torch.dtype  # in which the products are computed


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of an engine, as far as the memory that it takes for a while depends on it."""

    num_requests: int
    num_tokens: int
    context_len: int  # tokens of the longest context
    num_context_tokens: int  # of all contexts together, shared blocks counted once
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_size: int
    itemsize: int  # bytes of a number, of the keys and values too


class Multiply(Protocol):
    def __call__(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return x W^T + b, [T, in] -> [T, out], in the dtype of x unless another is given."""


class PackLinear(Protocol):
    def __call__(
        self,
        weight: Tensor | GroupedRows,
        bias: Tensor | None,
        quantization: Quantization | None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """Lay a matrix [out, in] out for products in a dtype, by default its own. One in grouped codes keeps them."""


class ChooseExperts(Protocol):
    def __call__(
        self, logits: Tensor, routing: Routing, correction_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights.

        Args:
            logits: [T, E] float32.
            correction_bias: [E] float32, added to the scores for the choice.

        Returns (ids [T, K] int64, weights [T, K] float32).
        """


class RunExperts(Protocol):
    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: PackedExperts,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts.

        A token's results are added in the order of its ids, in float32, and rounded once.

        Args:
            x: [T, M].
            ids: [T, K] int64, the experts of each token; -1: none, which the native ops do not take.
            weights: [T, K] float32, factors of their results.
            experts: from `pack_experts`.
            out_dtype: of the result, the dtype of x or float32; default: that of x.

        Returns [T, M].
        """


class GatedNorm(Protocol):
    def __call__(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, is_gate_first: bool
    ) -> Tensor:
        """Norm the heads or groups of a recurrence's result, and multiply by silu(gate) before or after that.

        Args:
            x: [T, N], contiguous.
            gate: [T, N], rows contiguous.
            weight: [D], or [G, D] with N = G D, of each head or group.
            dtype: of the result.

        Returns [T, N].
        """


class NormRopeStore(Protocol):
    def __call__(
        self,
        heads: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Norm and rotate the queries and keys of a step, write its keys and values, return the queries.

        Args:
            heads: [T, H + 2 KV, D], queries, keys and values side by side; may be overwritten.
            qk_norm: [H + KV, D], the weights of the head norms; None: there are none.
            cos, sin: [T, 1, D] float32 as `kernels.torch.elementwise.apply_rope` takes them.
            slot_mapping: [T] int64; tokens that only pad point into block 0, the null block.
            num_heads: H.

        Returns [T, H, D].
        """


class MakePlan(Protocol):
    def __call__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        query_lens: Sequence[int],
        seq_lens_list: Sequence[int],
        block_size: int,
        max_query_len: int = 0,
    ) -> Plan:
        """Do the index work of one step once, for all layers.

        Args:
            query_lens, seq_lens_list: host copies of the lengths.
            max_query_len: for a graph, whose requests may have so many new tokens each, as many together as
                `query_lens` says; `seq_lens_list` are upper bounds. 0: the step is no graph.
        """


class PagedAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        plan: Plan = None,
    ) -> Tensor:
        """Attend the new tokens of each request over its paged context, causally.

        The keys and values of the new tokens must already be in the cache.

        Args:
            q: [T, H, D], the new tokens of the requests one after another.
            k_cache, v_cache: [num_blocks, block_size, KV, D], contiguous, dtype of q or float8; H is a multiple of KV.
            block_tables: [R, max_blocks] int32.
            query_start_loc: [R + 1] int32, cumulative query lengths.
            seq_lens: [R] int32, context length including the new tokens.
            scale: factor of the scores.
            sliding_window: each token sees itself and this many minus one tokens before it; None: all.
            soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None: unchanged.
            sinks: [H] float32, a score of each head that takes part in the softmax and has no value; None: none.
            plan: this step's plan; without one the lengths are read back from the device.

        Returns [T, H, D]. Memory outside a request's own context, and behind the window of its queries, never
        reaches its result.
        Source: Kwon et al., 2023 (PagedAttention).
        """


class GatherInputs(Protocol):
    def __call__(
        self,
        token_pool: Tensor,
        block_tables: Tensor,
        rows: Tensor,
        starts: Tensor,
        query_start_loc: Tensor,
        block_size: int,
        out: StepBuffers,
    ) -> None:
        """Fill the buffers of a step from what is kept about each row of the batch.

        Args:
            token_pool: [num_rows, max_len] int32, the tokens of every row by position.
            block_tables: [num_groups, num_rows, max_blocks] int32, the blocks of every row.
            rows: [R] int64, the row of each request of the step; -1 only pads.
            starts: [R] int64, position of each request's first new token.
            query_start_loc: [R + 1] int32, cumulative query lengths; a request that pads may have one token or none.
            block_size: tokens in a block.
            out: overwritten. Tokens that pad, of such a request or behind the last one, get token, position and slot
                0, which lies in the null block; requests that pad get a context of one token in the null block.
        """


class Tape(Protocol):
    """Records what a function does, in calls of these ops and of torch, and repeats it with other inputs."""

    @property
    def is_complete(self) -> bool:
        """Whether all that was done can be repeated."""

    def record(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call the function and keep what it does. Its inputs must stay where they are."""

    def next_layer(self) -> None:
        """Note that a layer ends: from now on, no result of the layer before it is needed."""

    def repeat(self) -> tuple[Tensor, ...]:
        """Do the same with the present contents of the inputs. The next call overwrites the results."""

    def copy_plan(self, plan: Plan) -> Plan:
        """Return a plan, for the function, whose contents may change."""

    def copy_segments(self, segments: StateSegments) -> StateSegments:
        """Return segments, for the function, whose contents may change."""

    def update(self, held: Plan | StateSegments, new: Plan | StateSegments) -> None:
        """Bring the contents of others, which must live until `repeat` ends, into a plan or segments."""


# See `kernels.torch.sampling.penalise`.
Penalise = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[bool]], None]


class Draw(Protocol):
    def __call__(self, logits: Tensor, rows: DrawRows, bitmask: Tensor | None) -> Tensor:
        """Mask the logits and draw one token per row.

        Args:
            logits: [R, V] float32; overwritten.
            bitmask: [R, W] int32 as for `apply_bitmask`; None: no row has a mask.

        Returns [R] int64: the tokens of `draw_greedy`, `draw_full` and `draw_filtered`; -1 if the logits hold NaN or
        +inf or no number, -2 if the mask leaves no token.
        """


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How R rows draw their tokens; arrays on the host."""

    keys: np.ndarray  # [R, 2] int32 from `make_row_keys`
    temperature: np.ndarray  # [R] float32; 0: the most likely token
    top_k: np.ndarray  # [R] int64; at least V: off
    top_p: np.ndarray  # [R] float32; above 1: off
    log_min_p: np.ndarray  # [R] float32; -inf: off


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How packed matrices are kept in files."""

    build: str  # differs if another layout, or another processor, may be meant
    take_apart: Callable[[PackedWeight | PackedExperts], list[StoredPart]]
    put_together: Callable[[list[StoredPart]], PackedWeight | PackedExperts]


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of one implementation. Two engines of one process may use different ones."""

    name: str  # what logs and /server_info call it
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # (x [..., D], weight, eps)
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]  # [T, 2 I] -> [T, I]
    gelu_mul: Callable[[Tensor], Tensor]  # [T, 2 I] -> [T, I], the tanh approximation
    gelu: Callable[[Tensor], Tensor]  # [T, I] -> [T, I], the tanh approximation
    gated_norm: GatedNorm
    norm_rope_store: NormRopeStore
    # (k [T, KV, D], v, k_cache, v_cache, slot_mapping): the write of `norm_rope_store` alone
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    make_plan: MakePlan
    paged_attention: PagedAttention
    linear: Multiply
    pack_linear: PackLinear
    # ExpertRows, which are not rounded again, only if `takes_grouped`.
    pack_experts: Callable[[Any, Quantization | None], PackedExperts]
    choose_experts: ChooseExperts
    run_experts: RunExperts
    run_conv: RunConv
    scan_states: ScanStates
    # See `kernels.torch.sampling` for the arguments of these five.
    draw_greedy: Callable[[Tensor], Tensor]
    draw_full: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    draw_filtered: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    apply_bitmask: Callable[[Tensor, Tensor], None]
    penalise: Penalise
    pack_lora: Callable[[LoraMatrix], PackedLora]
    # (y, x, rows, segments); see `kernels.lora.add_lora`
    add_lora: Callable[[Tensor, Tensor, Tensor, Sequence[LoraSegment]], None]
    # The inverses of `pack_linear` and `pack_experts`, as near as the packing kept the matrices.
    unpack_linear: Callable[[PackedWeight], Tensor]
    unpack_experts: Callable[[PackedExperts], ExpertWeights]
    # Bytes that a step takes at most beside the results of its ops.
    estimate_scratch: Callable[[StepShape], int]
    # None: changes are added by `add_lora` alone, and steps with adapters are not recorded.
    lora_tables: LoraTables | None = None
    # (packed weight, ids [N]) -> rows [N, in] float32; None: an embedding stays as it is.
    unpack_rows: Callable[[PackedWeight, Tensor], Tensor] | None = None
    # As `pack_linear`, for float32 products that are exact to 2^-16 only and faster; None: they would not be faster.
    pack_split: PackLinear | None = None
    # (x, packed weight, bias) -> silu(gate) * up of the halves of x W^T + b; None: `linear`, then `silu_mul`.
    gated_linear: Callable[[Tensor, PackedWeight, Tensor | None], Tensor] | None = None
    # Whether a matrix that must also stay as it is (an embedding that is the head too) deserves a packed copy.
    packs_shared: bool = False
    # Whether `pack_linear` takes a matrix in grouped codes, and keeps them.
    takes_grouped: bool = False
    stored: StoredForm | None = None  # None: packed matrices are not kept
    make_tape: Callable[[], Tape] | None = None  # None: a step is not recorded
    # None: rows are drawn by the ops above, one kind of draw after the other.
    draw: Draw | None = None
    # None: the host makes the inputs of a step.
    gather_inputs: GatherInputs | None = None
    # Dtypes in which keys and values may be stored, beside that of the model.
    cache_dtypes: tuple[torch.dtype, ...] = ()
    has_pieces: bool = False  # how keys and values lie, see `KVCache`
    # Whether a step whose rows all have the same few tokens may be recorded once, and replayed when the contents of its
    # tensors have changed.
    is_graph_safe: bool = False
    # Ops whose own kernels failed the check at start, so that torch's run in their place.
    replaced: tuple[str, ...] = ()
