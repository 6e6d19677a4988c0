"""NativeOps: the ops of a forward pass on the compiled kernels, with every operand checked before C sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernels.torch as torch_ops
from kernels.cpu.experts import pack_experts, run_experts, unpack_experts
from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.lora import NativeLora, pack_lora
from kernels.cpu.panel_memory import PanelMemory
from kernels.cpu.pieces import check_caches, count_parts, count_piece_slots
from kernels.cpu.plan import NativePlan
from kernels.cpu.result_memory import ResultMemory
from kernels.cpu.sampling import draw, penalise
from kernels.cpu.scratch import estimate_scratch
from kernels.cpu.states import run_conv, scan_states
from kernels.cpu.stored import put_together, take_apart
from kernels.cpu.structs import AttentionShapeStruct, BatchStruct, LoraSegmentStruct, RopeStoreStruct
from kernels.cpu.tape import Arena, Tape
from kernels.cpu.weights import (
    DTYPES,
    NativeWeight,
    WeightKind,
    address,
    pack,
    unpack,
    unpack_rows,
)
from kernels.grouped import GroupedRows
from kernels.lora import LoraSegment
from kernels.ops import Ops, Quantization, StoredForm
from kernels.torch.elementwise import gated_norm

_SILU_MUL, _GELU_MUL, _GELU = range(3)  # `Activation` of elementwise.h
_PAGES_DELAY_S = 5.0  # until weights get large pages: the first tokens have the processor for themselves


class NativeOps:
    """One engine's native ops. Calls are serialised by their pool; results do not depend on its threads."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.library = library
        self.pool = ThreadPool(library, num_threads)
        self._memory = PanelMemory(_PAGES_DELAY_S)
        self._results = ResultMemory()

    def make_ops(self) -> Ops:
        """These ops as the model takes them."""
        return replace(
            torch_ops.make_ops(),
            name="native",
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            silu_mul=self.silu_mul,
            gelu_mul=self.gelu_mul,
            gelu=self.gelu,
            gated_norm=partial(gated_norm, norm=self.rms_norm, multiply=self.silu_mul),
            norm_rope_store=self.norm_rope_store,
            store_kv=self.store_kv,
            make_plan=self.make_plan,
            paged_attention=self.paged_attention,
            linear=self.linear,
            pack_linear=self.pack_linear,
            unpack_linear=partial(unpack, self.library, self.pool),
            unpack_rows=partial(unpack_rows, self.library, self.pool),
            pack_experts=partial(pack_experts, self.library, self.pool, self._memory),
            run_experts=partial(run_experts, self.library, self.pool),
            unpack_experts=partial(unpack_experts, self.library, self.pool),
            run_conv=partial(run_conv, self.library, self.pool),
            scan_states=partial(scan_states, self.library, self.pool),
            draw=partial(draw, self.library, self.pool),
            penalise=partial(penalise, self.library, self.pool),
            pack_lora=pack_lora,
            add_lora=self.add_lora,
            pack_split=partial(self.pack_linear, kind=WeightKind.SPLIT) if self.library.has_tiles else None,
            packs_shared=True,
            takes_grouped=True,
            stored=StoredForm(self.library.path.stem, take_apart, put_together),
            make_tape=partial(Tape, self.library, self.pool, (Arena(), Arena())),
            estimate_scratch=partial(estimate_scratch, num_threads=self.pool.num_threads),
            cache_dtypes=(torch.int8,),
            has_pieces=True,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `kernels.torch.elementwise.rms_norm`."""
        x, weight = x.contiguous(), weight.to(x.dtype).contiguous()
        size = x.shape[-1]
        assert weight.shape[-1] == size, f"a weight of {list(weight.shape)} for rows of {size}"
        out = self._results.take(x.shape, x.dtype)
        self.library.rms_norm(
            self.pool.handle,
            _code(x),
            x.data_ptr(),
            weight.data_ptr(),
            weight.numel() // size,
            eps,
            out.data_ptr(),
            x.numel() // size,
            size,
        )
        return out

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.torch.elementwise.add_rms_norm`."""
        hidden, weight = hidden.contiguous(), weight.to(hidden.dtype).contiguous()
        _check(residual, hidden.shape, hidden.dtype, "residual")
        size = hidden.shape[-1]
        _check(weight, (size,), hidden.dtype, "weight")
        out = self._results.take(hidden.shape, hidden.dtype)
        self.library.add_rms_norm(
            self.pool.handle,
            _code(hidden),
            hidden.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            hidden.numel() // size,
            size,
        )
        return out, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As `kernels.torch.elementwise.silu_mul`."""
        return self._activate(_SILU_MUL, gate_up, gate_up.shape[1] // 2)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """As `kernels.torch.elementwise.gelu_mul`."""
        return self._activate(_GELU_MUL, gate_up, gate_up.shape[1] // 2)

    def gelu(self, x: Tensor) -> Tensor:
        """As `kernels.torch.elementwise.gelu`, of [T, I]."""
        return self._activate(_GELU, x, x.shape[1])

    def _activate(self, kind: int, x: Tensor, size: int) -> Tensor:
        """Return the activation [T, size] of x [T, size or 2 size]."""
        x = x.contiguous()
        out = self._results.take((x.shape[0], size), x.dtype)
        self.library.activate(
            self.pool.handle, kind, _code(x), x.data_ptr(), out.data_ptr(), x.shape[0], size
        )
        return out

    def norm_rope_store(
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
        """Implement `kernels.ops.NormRopeStore`."""
        heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
        num_tokens, _, head_dim = heads.shape
        num_kv_heads = k_cache.shape[2]
        num_stored = num_kv_heads * count_parts(k_cache, v_cache)
        _check(heads, (num_tokens, num_heads + num_stored, head_dim), heads.dtype, "heads")
        check_caches(k_cache, v_cache, head_dim, heads.dtype)
        _check(cos, (num_tokens, 1, head_dim), torch.float32, "cos")
        _check(sin, (num_tokens, 1, head_dim), torch.float32, "sin")
        _check(slot_mapping, (num_tokens,), torch.int64, "slot_mapping")
        if qk_norm is not None:
            qk_norm = qk_norm.to(heads.dtype).contiguous()
            _check(qk_norm, (num_heads + num_kv_heads, head_dim), heads.dtype, "qk_norm")
        q = self._results.take((num_tokens, num_heads, head_dim), heads.dtype)
        pointers = (heads, qk_norm, cos, sin, k_cache, v_cache, slot_mapping, q)
        struct = RopeStoreStruct(
            *(address(tensor) for tensor in pointers),
            *(num_tokens, num_heads, num_kv_heads, head_dim, eps, _code(heads)),
            *(k_cache.dtype == torch.int8, count_piece_slots(k_cache.shape[1])),
        )
        self.library.rope_store(self.pool.handle, ctypes.byref(struct))
        return q

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """As `kernels.torch.elementwise.store_kv`."""
        # A rotation by an angle of 0, without queries.
        cos = torch.ones(k.shape[0], 1, k.shape[2])
        heads = k if count_parts(k_cache, v_cache) == 1 else torch.cat((k, v), dim=1)
        self.norm_rope_store(heads, None, 0.0, cos, torch.zeros_like(cos), k_cache, v_cache, slot_mapping, 0)

    def make_plan(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        query_lens: Sequence[int],
        seq_lens_list: Sequence[int],
        block_size: int,
        max_query_len: int = 0,
    ) -> NativePlan:
        """Check the requests of a step once; lists are not needed, the memory is the host's."""
        num_requests = block_tables.shape[0]
        if block_tables.stride(1) != 1:
            block_tables = block_tables.contiguous()
        _check(query_start_loc, (num_requests + 1,), torch.int32, "query_start_loc")
        _check(seq_lens, (num_requests,), torch.int32, "seq_lens")
        assert block_tables.dtype == torch.int32, f"block_tables must be int32, not {block_tables.dtype}"
        tensors = (block_tables, query_start_loc, seq_lens)
        pointers = (tensor.data_ptr() for tensor in tensors)
        return NativePlan(BatchStruct(*pointers, num_requests, block_tables.stride(0)), block_size, tensors)

    def paged_attention(
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
        plan: NativePlan | None = None,
    ) -> Tensor:
        """Implement `kernels.ops.PagedAttention`; equal bit for bit however requests are batched and chunked."""
        if plan is None:
            plan = self.make_plan(block_tables, query_start_loc, seq_lens, (), (), k_cache.shape[1])
        _, num_heads, head_dim = q.shape
        check_caches(k_cache, v_cache, head_dim, q.dtype)
        num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads cannot share {num_kv_heads}"
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        if sinks is not None:
            _check(sinks, (num_heads,), torch.float32, "sinks")
        shape = AttentionShapeStruct(
            *(num_heads, num_kv_heads, head_dim, block_size, sliding_window or 0, scale, soft_cap or 0.0),
            *(_code(q), k_cache.dtype == torch.int8, address(sinks)),
        )
        out = self._results.take(q.shape, q.dtype)
        self.library.attention(
            self.pool.handle,
            ctypes.byref(plan.struct),
            ctypes.byref(shape),
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
        )
        return out

    def pack_linear(
        self,
        weight: Tensor | GroupedRows,
        bias: Tensor | None,
        quantization: Quantization | None,
        dtype: torch.dtype | None = None,
        kind: WeightKind | None = None,
    ) -> NativeWeight:
        """Pack a matrix [out, in] and its bias; see `kernels.ops.PackLinear`.

        Raises:
            ValueError: a dtype or quantization that native ops do not have.
        """
        return pack(self.library, self.pool, self._memory, weight, bias, quantization, kind, dtype)

    def linear(
        self, x: Tensor, weight: NativeWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `kernels.torch.linear.linear`, its float32 sums rounded once; the bias is the one that was packed."""
        assert (bias is None) == (weight.bias is None), "the bias must be the one that was packed"
        x = x.contiguous()
        num_rows = x.shape[0]
        _check(x, (num_rows, weight.in_features), x.dtype, "x")
        out = self._results.take((num_rows, weight.out_features), out_dtype or x.dtype)
        self.library.linear(
            self.pool.handle,
            ctypes.byref(weight.struct),
            x.data_ptr(),
            _code(x),
            out.data_ptr(),
            _code(out),
            num_rows,
        )
        return out

    def add_lora(self, y: Tensor, x: Tensor, rows: Tensor, segments: Sequence[LoraSegment]) -> None:
        """As `kernels.lora.add_lora`, its float32 sums rounded once more; a row's bits do not depend on the others."""
        first: NativeLora = segments[0].matrix
        x = x.contiguous()
        _check(x, (y.shape[0], first.in_features), x.dtype, "x")
        _check(y, (y.shape[0], first.out_features), y.dtype, "y")
        _check(rows, (rows.shape[0],), torch.int64, "rows")
        structs = (LoraSegmentStruct * len(segments))()
        for struct, (matrix, start, end) in zip(structs, segments, strict=True):
            struct.lora, struct.first, struct.count = ctypes.pointer(matrix.struct), start, end - start
        self.library.lora(
            self.pool.handle,
            rows.data_ptr(),
            structs,
            len(segments),
            x.data_ptr(),
            _code(x),
            y.data_ptr(),
            _code(y),
        )


def _code(tensor: Tensor) -> int:
    assert tensor.dtype in DTYPES, f"native ops take float32 and bfloat16, not {tensor.dtype}"
    return DTYPES[tensor.dtype]


def _check(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    is_fit = tensor.shape == tuple(shape) and tensor.dtype == dtype and tensor.is_contiguous()
    assert is_fit, (
        f"{name} must be {list(shape)} {dtype}, contiguous, not {list(tensor.shape)} {tensor.dtype}"
    )
