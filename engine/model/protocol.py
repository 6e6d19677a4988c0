"""Model: the interface of models for the loader and the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.kv_cache_spec import KVCacheSpec, StateCacheSpec
from engine.model.adapters import MatrixPart, StepAdapters
from engine.model.attn_metadata import AttnMetadata, StepImages
from engine.model.config import ModelConfig
from engine.model.linear import Linear
from kernels import Ops
from kernels.ops import KVCache, Quantization


class Model(Protocol):
    """A torch module that computes steps over a paged KV cache; `DecoderModel` documents its methods.

    Attributes:
        ops: kernels that the forward pass calls.
        dtype: dtype of the hidden states, and of the weights before they are packed.
        weights_hash: hash of the loaded weights.
        lm_head: output projection, which adapters may change.
        embed_tokens: shape, dtype and device of the input embedding, [V, D]; `unpack_embedding` returns its values.
        matrix_parts: matrices that adapters may change, by the module's name in the checkpoint.
        aux_layers: layers whose inputs follow the final hidden state in each row of the result, for draft heads.
        before_layers: called by a step when the inputs of its layers are ready.
    """

    config: ModelConfig
    ops: Ops
    dtype: torch.dtype
    weights_hash: bytes
    lm_head: Linear
    embed_tokens: nn.Parameter
    aux_layers: tuple[int, ...]
    matrix_parts: dict[str, MatrixPart]
    before_layers: Callable[[], None]

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], attn_metadata: AttnMetadata,
        adapters: StepAdapters | None = None, images: StepImages | None = None,
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor: ...

    def unpack_embedding(self) -> Tensor: ...

    def kv_specs(self) -> tuple[KVCacheSpec, ...]: ...

    def state_specs(self) -> tuple[StateCacheSpec, ...]: ...

    def pack(self, quantization: Quantization | None = None) -> None: ...

    def repack(self, ops: Ops) -> Iterator[None]: ...

    def reserve_positions(self, num_positions: int) -> None: ...

    def release_positions(self) -> None: ...

    def limit_positions(self, max_model_len: int) -> None: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
