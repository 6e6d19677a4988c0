"""Takes packed matrices apart into tensors and plain values, and puts them together again over other memory."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.experts import NativeExperts, make_experts
from kernels.cpu.structs import LinearStruct
from kernels.cpu.weights import NativeWeight, WeightKind
from kernels.ops import GatedActivation, StoredPart


def take_apart(packed: NativeWeight | NativeExperts) -> list[StoredPart]:
    """Return the parts of a matrix, or of all matrices of a layer's experts behind what they share."""
    if isinstance(packed, NativeWeight):
        tensors = {each.name: getattr(packed, each.name) for each in fields(packed)}
        struct = packed.struct
        values: dict[str, Any] = {"dtype": str(packed.dtype).removeprefix("torch.")}
        values |= {name: getattr(struct, name) for name in ("in_features", "out_features", "kind", "group_size")}
        return [(values, {name: each for name, each in tensors.items() if isinstance(each, Tensor)})]
    activation = packed.activation
    first: StoredPart = ({"alpha": activation.alpha, "limit": activation.limit}, {})
    matrices = (*packed.gate, *packed.up, *packed.down)
    return [first, *(take_apart(each)[0] for each in matrices)]


def put_together(parts: list[StoredPart]) -> NativeWeight | NativeExperts:
    """Return what was taken apart; the tensors keep owning the memory."""
    if len(parts) == 1:
        return _put_weight(*parts[0])
    weights = [_put_weight(*each) for each in parts[1:]]
    count = len(weights) // 3
    gate, up, down = (weights[start : start + count] for start in (0, count, 2 * count))
    return make_experts(gate, up, down, GatedActivation(**parts[0][0]))


def _put_weight(values: dict[str, Any], tensors: dict[str, Tensor]) -> NativeWeight:
    struct = LinearStruct(**{name: value for name, value in values.items() if name != "dtype"})
    optional: dict[str, Any] = {each.name: None for each in fields(NativeWeight) if each.type == "Tensor | None"}
    for name, tensor in tensors.items():
        setattr(struct, name, tensor.data_ptr())
    return NativeWeight(
        kind=WeightKind(struct.kind),
        dtype=getattr(torch, values["dtype"]),
        in_features=struct.in_features,
        out_features=struct.out_features,
        struct=struct,
        **(optional | tensors),
    )
