"""Loads a model with the weights of a checkpoint, or with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.checkpoint import hash_weights, read_tensors, resolve_weights, weight_files
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.formats.encoded import EncodedTensor
from engine.model.formats.gguf_file import is_gguf
from engine.model.formats.gguf_model import GGUFModel
from engine.model.formats.safetensors_reader import read_encoded
from engine.model.implementation import TransformersConfig, import_backend, read_model_config
from engine.model.protocol import Model
from engine.model.sharding import ONE_RANK, Sharding
from engine.model.weight_memory import check_weight_memory
from engine.model.weight_targets import SkippedTarget, Target, WeightTarget, WeightTargets
from kernels import Ops
from kernels.ops import Quantization

_MAX_NAMES = 8


class BuildDecoder(Protocol):
    """A class of decoders."""

    def __call__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops | None,
        sharding: Sharding,
    ) -> DecoderModel: ...


def load_model(
    path_or_name: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
    load_format: Literal["auto", "dummy"] = "auto",
    config: ModelConfig | None = None,
    seed: int = 0,
    ops: Ops | None = None,
    quantization: Quantization | None = None,
    sharding: Sharding = ONE_RANK,
    build: BuildDecoder = DecoderModel,
) -> Model:
    """Build the model of a checkpoint and load its weights.

    Args:
        path_or_name: local folder, GGUF file, or name of a repository on the hub.
        dtype: weights are cast to it, but 4-bit codes are kept if the ops take them.
        load_format: "auto" reads safetensors; "dummy" makes random weights and reads only config.json.
        config: the parsed config; None: read it from the checkpoint.
        seed: seed of dummy weights. They are drawn on the device and differ between CPU and CUDA.
        ops: kernels that the forward pass calls, for which the weights are packed; default: torch's.
        quantization: applied to all matrices except the embedding.
        sharding: the rank whose part of the model is loaded.
        build: makes our decoder.

    Returns the model in eval mode, its parameters without gradients.

    Raises:
        ConfigError: the checkpoint is missing or unreadable, its tensors do not match its config, it does not fit into
            memory, or it does not support this quantization.
    """
    if config is None:
        config = read_model_config(path_or_name)
    packs_shared = ops is not None and ops.packs_shared
    has_codes = config.weight_format is not None
    keeps_codes = has_codes and ops is not None and ops.takes_grouped and quantization in (None, "int4")
    num_ranks = sharding.size
    with check_weight_memory(
        path_or_name, config, dtype, device, quantization, packs_shared, keeps_codes, num_ranks
    ):
        is_foreign = isinstance(config, TransformersConfig)
        load = (
            import_backend().load
            if is_foreign
            else partial(_load_decoder, keeps_codes=keeps_codes, build=partial(build, sharding=sharding))
        )
        weight_seed = seed if load_format == "dummy" else None
        model: Model = load(path_or_name, config, dtype, device, ops, weight_seed)
        try:
            model.pack(quantization)
        except ValueError as error:
            raise ConfigError(f"quantization={quantization!r}: {error}") from error
    return model


def _load_decoder(
    path_or_name: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops | None,
    seed: int | None,
    keeps_codes: bool,
    build: Callable[[ModelConfig, torch.dtype, torch.device, Ops | None], DecoderModel],
) -> DecoderModel:
    """Build our decoder; with a seed its weights are random.

    Args:
        keeps_codes: leave the codes of quantized matrices as they are.
    """
    model = build(config, dtype, device, ops).eval()
    if seed is not None:
        _fill_randomly(model, seed)
        model.weights_hash = b"dummy:%d" % seed
    elif is_gguf(path_or_name):
        source = GGUFModel(path_or_name)
        _load_tensors(model, source.read_tensors(), path_or_name, keeps_codes)
        model.weights_hash = source.hash_weights()
    else:
        _load_checkpoint(model, resolve_weights(path_or_name), keeps_codes)
    return model


def _load_checkpoint(model: Model, folder: Path, keeps_codes: bool) -> None:
    files = weight_files(folder)
    weight_format = model.config.weight_format
    tensors = read_tensors(files) if weight_format is None else read_encoded(files, weight_format)
    wanted = model.weight_targets()
    loaded = _load_tensors(model, tensors, folder, keeps_codes)
    if not loaded.isdisjoint(wanted.tied):
        _check_tied(files, wanted, folder)
    model.weights_hash = hash_weights(files)


def _load_tensors(
    model: Model,
    tensors: Iterable[tuple[str, Tensor | EncodedTensor]],
    source: str | Path,
    keeps_codes: bool,
) -> set[str]:
    """Copy tensors to the model; returns their names."""
    wanted = model.weight_targets()
    loaded: set[str] = set()
    unexpected: list[str] = []
    for stored, tensor in tensors:
        name = stored
        if name not in wanted.targets and f"model.{name}" in wanted.targets:
            name = f"model.{name}"  # saved without the output head, as embedding models are
        if name in wanted.targets:
            _load_tensor(wanted.targets[name], tensor, name, source, keeps_codes)
        elif isinstance(tensor, Tensor) and (parts := wanted.list_parts(name)):
            _load_stacked(wanted, parts, tensor, name, source)
            loaded.update(parts)
        elif name not in wanted.tied and not wanted.is_ignored(name):
            unexpected.append(name)
        loaded.add(name)
    missing = [name for name in wanted.targets if name not in loaded]
    if missing or unexpected:
        raise ConfigError(
            f"the tensors of {source} do not match its config: "
            f"missing: {_shorten(missing)}; unexpected: {_shorten(unexpected)}"
        )
    return loaded


def _load_stacked(
    wanted: WeightTargets, parts: list[str], tensor: Tensor, name: str, source: str | Path
) -> None:
    """Copy the matrices of all experts out of one tensor."""
    single = wanted.targets[parts[0]].shape
    if tensor.numel() != len(parts) * single.numel() or tensor.shape[-1] != single[-1]:
        raise ConfigError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, its config says {len(parts)} x {list(single)}"
        )
    for part, matrix in zip(parts, tensor.view(-1, *single), strict=True):
        _load_tensor(wanted.targets[part], matrix, part, source, keeps_codes=False)


def _load_tensor(
    target: Target, tensor: Tensor | EncodedTensor, name: str, source: str | Path, keeps_codes: bool
) -> None:
    if tensor.shape != target.shape:
        raise ConfigError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, its config says {list(target.shape)}"
        )
    if isinstance(target, SkippedTarget):
        return
    if isinstance(tensor, EncodedTensor):
        if keeps_codes and isinstance(target, WeightTarget) and target.keep is not None:
            target.keep(tensor)
            return
        tensor = tensor.dequantize()
    is_known = (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.dtype == target.dtype
    if not is_known:
        raise ConfigError(
            f"{source}: tensor {name} is {tensor.dtype}, and no quantization_config explains it"
        )
    target.copy(tensor)


def _check_tied(files: list[Path], wanted: WeightTargets, folder: Path) -> None:
    """Reject a tied tensor that differs from the tensor that is used in its place."""
    for name, tensor in read_tensors(files):
        if (other := wanted.tied.get(name)) is not None:
            target = wanted.targets[other]
            assert isinstance(target, WeightTarget), "an embedding is stored as it is"
            memory = target.memory
            if not torch.equal(tensor.to(memory.dtype), memory.cpu()):
                raise ConfigError(f"{folder}: its config says that {name} repeats {other}, but they differ")


def _fill_randomly(model: Model, seed: int) -> None:
    """Initialise every parameter: norms 1, biases 0, others from a normal distribution with std 0.02."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            # Expert by expert, because the numbers are float32 at first.
            for part in parameter.unbind() if parameter.dim() == 3 else (parameter,):
                fresh = torch.empty(part.shape, device=device)
                part.copy_(fresh.normal_(0.0, 0.02, generator=generators[device]))


def _shorten(names: list[str]) -> str:
    if not names:
        return "none"
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
