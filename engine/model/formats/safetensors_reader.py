"""Reads the matrices of quantized safetensors checkpoints, whose parts lie in several tensors and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.model.formats.encoded import EncodedTensor
from engine.model.formats.mxfp4 import Mxfp4Tensor, Nvfp4Tensor
from engine.model.formats.packed_int import read_awq, read_compressed, read_gptq
from engine.model.formats.quant_config import WeightFormat
from kernels.scaled import ScaledTensor

# (suffix of the tensor that stands for the matrix, suffix of the matrix, suffixes of its required parts, of its others)
_Parts = tuple[str, str, tuple[str, ...], tuple[str, ...]]
_SCALES = (".weight_scale", ".weight_scale_inv")
# Activations and the KV cache are not rounded by these formats here, so their scales are not needed.
_INPUTS = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")
_CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale")
_PARTS: dict[str, tuple[_Parts, ...]] = {
    "awq": ((".qweight", ".weight", (".qzeros", ".scales"), ()),),
    "gptq": ((".qweight", ".weight", (".qzeros", ".scales"), (".g_idx",)),),
    "compressed-tensors": (
        (
            *(".weight_packed", ".weight", (".weight_scale", ".weight_shape")),
            (".weight_zero_point", ".weight_g_idx", *_INPUTS),
        ),
        (".weight_packed", ".weight", (".weight_scale", ".weight_global_scale"), _INPUTS),
        (".weight_packed", ".weight", (".weight_scale",), _INPUTS),
        (".weight", ".weight", (".weight_scale",), (".weight_zero_point", *_INPUTS)),
    ),
    "modelopt": (
        (".weight", ".weight", (".weight_scale", ".weight_scale_2"), _INPUTS),
        (".weight", ".weight", (".weight_scale",), _INPUTS),
    ),
    "mxfp4": (("_blocks", "", ("_scales",), ()),),
    "fp8": (
        (".weight", ".weight", (".weight_scale_inv",), _INPUTS),
        (".weight", ".weight", (".weight_scale",), _INPUTS),
    ),
}


def read_encoded(
    files: list[Path], weight_format: WeightFormat, hold: Callable[[Tensor], None]
) -> Iterator[tuple[str, Tensor | EncodedTensor]]:
    """Yield each tensor of a checkpoint under the name that it has without quantization.

    Tensors that belong to no matrix keep their names. `hold` is called with each part, a view of its mapped file.
    """
    with ExitStack() as stack:
        index = _TensorIndex(files, stack, hold)
        found = {name: parts for name in index.names if (parts := _find_parts(index, name, weight_format))}
        taken = {part for parts in found.values() for part in parts.values()}
        for name in index.names:
            if name in found:
                stem, suffix = _split(name, weight_format)
                tensors = {part: index.read(tensor) for part, tensor in found[name].items()}
                try:
                    yield stem + suffix, _decode(weight_format, index.read(name), tensors)
                except (RuntimeError, IndexError, ValueError) as error:
                    reason = str(error).partition("\n")[0]
                    raise ConfigError(
                        f"{name} is not a matrix in {weight_format.method}: {reason}"
                    ) from error
            elif name not in taken and not name.endswith(_CACHE_SCALES):
                yield name, index.read(name)


class _TensorIndex:
    """The tensors of all files by name."""

    def __init__(self, files: list[Path], stack: ExitStack, hold: Callable[[Tensor], None]) -> None:
        self._hold = hold
        self._files: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
            self._files |= dict.fromkeys(opened.keys(), (file, opened))

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        file, opened = self._files[name]
        try:
            tensor: Tensor = opened.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
        self._hold(tensor)
        return tensor


def _find_parts(index: _TensorIndex, name: str, weight_format: WeightFormat) -> dict[str, str] | None:
    """Return suffix -> name of the other tensors of the matrix that `name` stands for; None if it stands for none."""
    for suffix, _, required, optional in _PARTS[weight_format.method]:
        stem = name.removesuffix(suffix)
        if name.endswith(suffix) and all(index.has(stem + part) for part in required):
            return {part: stem + part for part in (*required, *optional) if index.has(stem + part)}
    return None


def _split(name: str, weight_format: WeightFormat) -> tuple[str, str]:
    """Return the stem of the name, and the suffix of the matrix."""
    for suffix, target, _, _ in _PARTS[weight_format.method]:
        if name.endswith(suffix):
            return name.removesuffix(suffix), target
    raise AssertionError(f"{name} has no suffix of {weight_format.method}")


def _decode(weight_format: WeightFormat, main: Tensor, parts: dict[str, Tensor]) -> EncodedTensor:
    match weight_format.method:
        case "awq":
            return read_awq(main, parts[".qzeros"], parts[".scales"])
        case "mxfp4":
            return Mxfp4Tensor(main, parts["_scales"])
        case "gptq":
            return read_gptq(
                *(main, parts[".qzeros"], parts[".scales"], parts.get(".g_idx")), weight_format.zero_offset
            )
    if ".weight_shape" in parts:
        return read_compressed(
            *(main, parts[".weight_scale"], parts.get(".weight_zero_point"), parts.get(".weight_g_idx")),
            parts[".weight_shape"],
        )
    if ".weight_global_scale" in parts:
        return Nvfp4Tensor(main, parts[".weight_scale"], 1 / parts[".weight_global_scale"].float())
    if ".weight_scale_2" in parts:
        return Nvfp4Tensor(main, parts[".weight_scale"], parts[".weight_scale_2"].float())
    if weight_format.method == "compressed-tensors" and main.dtype == torch.uint8:
        return Mxfp4Tensor(main.unflatten(-1, (-1, 16)), parts[".weight_scale"])
    if ".weight_zero_point" in parts and parts[".weight_zero_point"].count_nonzero():
        raise ValueError("zero points of unpacked integers are not supported")
    scales = next(parts[suffix] for suffix in _SCALES if suffix in parts)
    return ScaledTensor(main, scales, weight_format.block)
