"""NativeDecoder: all layers of a model as one structure, made once and used in every step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.lora import NativeLoraStep
from kernels.cpu.structs import DecoderStruct, LayerStruct, LinearStruct, StepStruct
from kernels.cpu.weights import DTYPES, NativeWeight, address
from kernels.ops import INT8_SCALE_BYTES, MAX_INT8_HEAD_DIM, PIECE_SLOTS, KVCache, LayerWeights


class NativeDecoder:
    """A model's layers and caches as C sees them; keeps the weights alive, but not the caches."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        kv_caches: Sequence[KVCache],
        num_heads: int,
        eps: float,
        scale: float,
        final_norm: Tensor,
    ) -> None:
        assert len(layers) == len(kv_caches), f"{len(layers)} layers, {len(kv_caches)} caches"
        self.dtype, self.hidden_size = final_norm.dtype, final_norm.shape[0]
        k_cache = kv_caches[0][0]
        _, block_size, num_kv_heads, size = k_cache.shape
        self.head_dim = size - INT8_SCALE_BYTES if k_cache.dtype == torch.int8 else size
        for pair in kv_caches:
            assert pair[0].shape == k_cache.shape, (
                f"a cache must be {list(k_cache.shape)}, not {pair[0].shape}"
            )
            check_caches(*pair, self.head_dim, self.dtype)
        self._kept: list[Tensor] = [final_norm]
        self._layers = (LayerStruct * len(layers))(*(self._make_layer(layer) for layer in layers))
        self._sources = layers
        addresses = [cache.data_ptr() for pair in kv_caches for cache in pair]
        self._caches = (ctypes.c_void_p * len(addresses))(*addresses)
        self._struct = DecoderStruct(
            self._layers,
            final_norm.data_ptr(),
            *(len(layers), num_heads, num_kv_heads, self.head_dim, block_size, self.hidden_size),
            layers[0].down.in_features,
            eps,
            scale,
            DTYPES[self.dtype],
            k_cache.dtype == torch.int8,
        )
        self.pointer = ctypes.byref(self._struct)

    def make_step(
        self,
        hidden: Tensor,
        out: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        lora: NativeLoraStep | None,
    ) -> StepStruct:
        """Return the operands of one step; the tensors must outlive the call."""
        tensors = (hidden, out, cos, sin, slots)
        return StepStruct(
            *(tensor.data_ptr() for tensor in tensors),
            *(ctypes.addressof(self._caches), hidden.shape[0]),
            None if lora is None else ctypes.pointer(lora.struct),
        )

    def _make_layer(self, layer: LayerWeights) -> LayerStruct:
        norms = (layer.input_norm, layer.post_attention_norm, layer.qk_norm)
        return LayerStruct(
            *(address(self._keep(norm)) for norm in norms),
            *(_struct(matrix) for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)),
            layer.sliding_window or 0,
        )

    def _keep(self, norm: Tensor | None) -> Tensor | None:
        """Return a norm's weight as C wants it, kept alive."""
        if norm is None:
            return None
        kept = norm.to(self.dtype).contiguous()
        self._kept.append(kept)
        return kept


class DecoderCache:
    """Keeps the decoder of the last step; makes a new one when the model or its caches change.

    The caches are held by weak references, so that their owner can free them.
    """

    def __init__(self) -> None:
        self._sources: tuple[object, object] = (None, None)
        self._caches: list[weakref.ref[Tensor]] = []
        self._decoder: NativeDecoder | None = None

    def find(
        self,
        layers: Sequence[LayerWeights],
        kv_caches: Sequence[KVCache],
        num_heads: int,
        eps: float,
        scale: float,
        final_norm: Tensor,
    ) -> NativeDecoder:
        """Return the decoder of these objects, which are compared by identity."""
        caches = [cache for pair in kv_caches for cache in pair]
        is_same = self._sources[0] is layers and self._sources[1] is final_norm
        if self._decoder is None or not is_same or not self._has(caches):
            self._decoder = NativeDecoder(layers, kv_caches, num_heads, eps, scale, final_norm)
            self._sources = (layers, final_norm)
            self._caches = [weakref.ref(cache) for cache in caches]
        return self._decoder

    def _has(self, caches: Sequence[Tensor]) -> bool:
        # A freed cache equals no other, not even a new one at the same address.
        return len(caches) == len(self._caches) and all(
            old() is new for old, new in zip(self._caches, caches, strict=True)
        )


def _struct(matrix: object) -> LinearStruct:
    assert isinstance(matrix, NativeWeight), (
        f"matrices must be packed by native ops, not {type(matrix).__name__}"
    )
    return matrix.struct


def check_caches(k_cache: Tensor, v_cache: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Check the keys and values of a layer with heads of this size and dtype."""
    is_int8, block_size = k_cache.dtype == torch.int8, k_cache.shape[1]
    unit = 4 if is_int8 else 2
    assert head_dim % unit == 0, f"head_dim={head_dim} must be a multiple of {unit}"
    assert head_dim <= MAX_INT8_HEAD_DIM, f"head_dim={head_dim} must be at most {MAX_INT8_HEAD_DIM}"
    assert not is_int8 or block_size % PIECE_SLOTS == 0, (
        f"block_size={block_size} must be a multiple of {PIECE_SLOTS}"
    )
    shape = (*k_cache.shape[:3], head_dim + INT8_SCALE_BYTES if is_int8 else head_dim)
    for cache in (k_cache, v_cache):
        is_fit = cache.shape == shape and cache.dtype in (dtype, torch.int8) and cache.dtype == k_cache.dtype
        assert is_fit and cache.is_contiguous(), (
            f"a cache must be {list(shape)} {dtype} or int8, not {list(cache.shape)} {cache.dtype}"
        )


def can_run(dtype: torch.dtype) -> bool:
    """Return whether native ops run models of this dtype."""
    return dtype in DTYPES
