"""The structures of `src/*.h` as ctypes sees them, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

MAX_ARGUMENTS = 9  # kMaxArguments of `src/exports.cpp`
Field = tuple[str, type]
MAX_ARGUMENTS = 9  # kMaxArguments of `src/exports.cpp`


class LinearStruct(ctypes.Structure):
    """`Linear`: a packed matrix."""

    _fields_: ClassVar[list[Field]] = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("kind", c_int32),
        ("group_size", c_int32),
    ]


class ExpertsStruct(ctypes.Structure):
    """`Experts`: the matrices of all experts of a layer."""

    _fields_: ClassVar[list[Field]] = [
        *((name, POINTER(LinearStruct)) for name in ("gate", "up", "down")),
        ("num_experts", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class BatchStruct(ctypes.Structure):
    """`Batch`: the requests of a step."""

    _fields_: ClassVar[list[Field]] = [
        ("block_tables", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("num_requests", c_int64),
        ("max_blocks", c_int64),
    ]


class AttentionShapeStruct(ctypes.Structure):
    """`AttentionShape`: one layer's view of the cache."""

    _fields_: ClassVar[list[Field]] = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("sliding_window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("dtype", c_int32),
        ("is_int8", c_int32),
        ("sinks", c_void_p),
    ]


class RopeStoreStruct(ctypes.Structure):
    """`RopeStore`: the operands of norm_rope_store."""

    _fields_: ClassVar[list[Field]] = [
        *(
            (name, c_void_p)
            for name in ("heads", "qk_norm", "cos", "sin", "k_cache", "v_cache", "slots", "q")
        ),
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", c_float),
        ("dtype", c_int32),
        ("is_int8", c_int32),
        ("piece_slots", c_int32),
    ]


class LoraPartStruct(ctypes.Structure):
    """`LoraPart`: the change of some outputs of a matrix."""

    _fields_: ClassVar[list[Field]] = [
        *((name, c_void_p) for name in ("b", "factor", "offset")),
        *((name, c_int64) for name in ("start", "width", "first_rank", "rank")),
    ]


class LoraStruct(ctypes.Structure):
    """`Lora`: an adapter's change of one matrix."""

    _fields_: ClassVar[list[Field]] = [
        ("a", c_void_p),
        ("scales", c_void_p),
        ("parts", POINTER(LoraPartStruct)),
        *((name, c_int64) for name in ("num_parts", "num_ranks", "in_features", "out_features")),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class LoraSegmentStruct(ctypes.Structure):
    """`LoraSegment`: the places of one adapter."""

    _fields_: ClassVar[list[Field]] = [("lora", c_void_p), ("first", c_int64), ("count", c_int64)]


class SegmentsStruct(ctypes.Structure):
    """`Segments`: the segments of a step's runs."""

    _fields_: ClassVar[list[Field]] = [
        *((name, c_void_p) for name in ("source", "target", "first", "count", "run_ends")),
        ("num_runs", c_int64),
    ]


class ConvStruct(ctypes.Structure):
    """`Conv`: the operands of run_conv."""

    _fields_: ClassVar[list[Field]] = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "states", "out")),
        *((name, c_int64) for name in ("stride", "channels", "width")),
        ("has_silu", c_int32),
        ("reserved", c_int32),
    ]


class ScanStruct(ctypes.Structure):
    """`Scan`: the operands of scan_states."""

    _fields_: ClassVar[list[Field]] = [
        *((name, c_void_p) for name in ("mixed", "dt", "beta", "a_log", "dt_bias", "skip", "states", "out")),
        *((name, c_int64) for name in ("stride", "query_at", "key_at", "value_at")),
        *((name, c_int64) for name in ("num_heads", "num_groups", "key_size", "value_size")),
    ]


class ArgumentUnion(ctypes.Union):
    """`Argument`: of a call of a tape."""

    _fields_: ClassVar[list[Field]] = [("integer", c_int64), ("number", c_float)]


class CallStruct(ctypes.Structure):
    """`Call`: of a tape."""

    _fields_: ClassVar[list[Field]] = [("function", c_int64), ("arguments", ArgumentUnion * MAX_ARGUMENTS)]


class DrawStruct(ctypes.Structure):
    """`Draw`: rows that draw a token."""

    _fields_: ClassVar[list[Field]] = [
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("keys", "temperature", "top_k", "top_p", "log_min_p", "bitmask")),
        ("words", c_int64),
        ("token_ids", c_void_p),
    ]
