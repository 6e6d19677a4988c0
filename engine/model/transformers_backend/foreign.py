"""ForeignModel: what decoders and encoders on transformers' code share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.kv_cache_spec import StateCacheSpec
from engine.model.adapters import MatrixPart, StepAdapters
from engine.model.linear import Linear
from engine.model.moe import Experts, repack_modules
from kernels import Ops
from kernels.ops import Quantization
from kernels.torch import make_ops


class WideLinear(Linear):
    """A Linear that replaces a `nn.Linear`; it accepts any leading dimensions."""

    def __init__(self, source: nn.Linear, shared: Tensor | None) -> None:
        sizes = source.in_features, source.out_features, source.bias is not None
        meta = torch.device("meta")
        kept = None if shared is None else nn.Parameter(shared.data, requires_grad=False)
        super().__init__(*sizes, dtype=source.weight.dtype, device=meta, shared=kept)
        if shared is None:
            self.weight = nn.Parameter(source.weight.data, requires_grad=False)
        if source.bias is not None:
            self.bias = nn.Parameter(source.bias.data, requires_grad=False)

    def forward(
        self, x: Tensor, out_dtype: torch.dtype | None = None, adapters: StepAdapters | None = None
    ) -> Tensor:
        rows = super().forward(x.reshape(-1, x.shape[-1]), out_dtype, adapters)
        return rows.view(*x.shape[:-1], rows.shape[-1])


class ForeignModel(nn.Module):
    """A model of transformers as `engine.model.protocol.Model`.

    Args:
        source: with its weights, on its device.
    """

    def __init__(self, source: PreTrainedModel, config: Any, ops: Ops | None) -> None:
        super().__init__()
        self.config = config
        self.dtype = source.dtype
        self.ops = self.adapt(ops or make_ops())
        self.quantization: Quantization | None = None
        self.weights_hash = b""  # set by the loader
        self.matrix_parts: dict[str, MatrixPart] = {}  # adapters are refused
        self.before_layers: Callable[[], None] = lambda: None
        self.source = source

    def adapt(self, ops: Ops) -> Ops:
        """Return the ops as this kind of model uses them."""
        raise NotImplementedError

    def state_specs(self) -> tuple[StateCacheSpec, ...]:
        """Return nothing: models with states are refused."""
        return ()

    def pack(self, quantization: Quantization | None = None) -> None:
        """Convert the loaded matrices to the layout of the ops. Call once, after loading."""
        self.quantization = quantization
        for module in self.modules():
            if isinstance(module, Linear | Experts):
                module.pack(self.ops, quantization)

    def repack(self, ops: Ops) -> Iterator[None]:
        """Move to other ops. Repacks one matrix per iteration; steps may run in between."""
        ops = self.adapt(ops)
        yield from repack_modules(self.modules(), self.ops, ops, self.quantization)
        self.ops = ops

    def reserve_positions(self, num_positions: int) -> None:
        """Do nothing: the model's code computes its angles or positions in each step."""

    def release_positions(self) -> None:
        """Do nothing; see `reserve_positions`."""

    def limit_positions(self, max_model_len: int) -> None:
        """Do nothing: the config's limit already excludes lengths that change the frequencies."""


def replace_child(model: PreTrainedModel, name: str, child: nn.Module) -> nn.Module:
    """Return a copy of the model that shares everything but one child."""
    twin = copy(model)
    twin.__dict__["_modules"] = {**model._modules, name: child}
    return twin
