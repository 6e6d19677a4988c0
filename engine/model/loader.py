"""Loads a model with the weights of a checkpoint, or with random weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.host_memory import release_pages
from engine.model.checkpoint import hash_weights, read_tensors, resolve_weights, weight_files
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.formats.encoded import EncodedTensor
from engine.model.formats.gguf_file import is_gguf, list_parts, resolve_gguf
from engine.model.formats.gguf_model import GGUFModel
from engine.model.formats.quant_config import WeightFormat
from engine.model.formats.safetensors_reader import read_encoded
from engine.model.implementation import TransformersConfig, import_backend, read_model_config
from engine.model.linear import Linear
from engine.model.moe import Experts
from engine.model.protocol import Model
from engine.model.sharding import ONE_RANK, Sharding
from engine.model.weight_cache import WeightCache
from engine.model.weight_memory import check_weight_memory
from engine.model.weight_targets import WeightTarget, WeightTargets, check_names
from kernels import Ops
from kernels.ops import Quantization


@dataclass(frozen=True, slots=True)
class Loading:
    """How tensors go into a model."""

    quantization: Quantization | None
    keeps_codes: bool  # matrices are packed from the codes of the checkpoint
    keeps_tensors: bool  # matrices are packed from the mapped file, not from a copy


class BuildDecoder(Protocol):
    """A class of decoders."""

    def __call__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops | None,
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
    cache: WeightCache | None = None,
) -> Model:
    """Build the model of a checkpoint and load its weights.

    Args:
        dtype: weights are cast to it, but 4-bit codes are kept if the ops take them.
        load_format: "auto" reads safetensors; "dummy" makes random weights and reads only config.json.
        seed: seed of dummy weights. They are drawn on the device and differ between CPU and CUDA.
        quantization: applied to all matrices except the embedding.
        cache: where packed models are kept; None: nowhere.

    Returns the model in eval mode, its parameters without gradients.
    """
    if config is None:
        config = read_model_config(path_or_name)
    has_codes = config.weight_format is not None
    keeps_codes = has_codes and ops is not None and ops.takes_grouped and quantization in (None, "int4")
    is_native = ops is not None and ops.unpack_rows is not None and device.type == "cpu"
    kept = cache if sharding == ONE_RANK else None
    loading = Loading(quantization, keeps_codes, keeps_tensors=is_native or keeps_codes)
    num_ranks = sharding.size
    with check_weight_memory(
        path_or_name, config, dtype, device, quantization, is_native, keeps_codes, num_ranks,
        has_split=ops is not None and ops.pack_split is not None,
    ):
        is_foreign = isinstance(config, TransformersConfig)
        load = (
            import_backend().load
            if is_foreign
            else partial(_load_decoder, loading=loading, build=partial(build, sharding=sharding), cache=kept)
        )
        weight_seed = seed if load_format == "dummy" else None
        try:
            model: Model = load(path_or_name, config, dtype, device, ops, weight_seed)
            model.pack(quantization)
        except ConfigError:
            raise
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
    loading: Loading,
    build: Callable[[ModelConfig, torch.dtype, torch.device, Ops | None], DecoderModel],
    cache: WeightCache | None,
) -> DecoderModel:
    """Build our decoder; with a seed its weights are random."""
    # In 16 bits, matrices in codes have memory of the host alone, which nothing touches.
    is_moved = loading.keeps_codes and device.type != "cpu"
    model = build(config, dtype, torch.device("cpu") if is_moved else device, ops).eval()
    if seed is not None:
        _fill_randomly(model, seed)
        model.weights_hash = b"dummy:%d" % seed
        return model
    is_file = is_gguf(path_or_name)
    folder = Path() if is_file else resolve_weights(path_or_name)
    files = list_parts(resolve_gguf(path_or_name)) if is_file else weight_files(folder)
    key = None if cache is None else cache.make_key(files, model.ops, f"{config} {dtype} {loading}")
    if cache is not None and key is not None and cache.fill(key, model):
        return model
    if is_file:
        source = GGUFModel(path_or_name)
        with release_pages(files) as hold:
            tensors = source.read_tensors(hold)
            _load_tensors(model.weight_targets(), model.ops, tensors, path_or_name, loading)
        model.weights_hash = source.hash_weights()
    else:
        tied = _load_files(model.weight_targets(), model.ops, folder, config.weight_format, loading)
        if tied:
            _check_tied(files, tied, folder)
        model.weights_hash = hash_weights(files)
    if is_moved:
        model.pack(loading.quantization)
        model.move(device)
    if cache is not None and key is not None:
        model.pack(loading.quantization)
        cache.store(key, model)
    return model


def load_part(
    path_or_name: str | Path, wanted: WeightTargets, ops: Ops, weight_format: WeightFormat | None,
    quantization: Quantization | None,
) -> None:
    """Load a few tensors of a checkpoint, and pack the modules that own them."""
    if is_gguf(path_or_name):
        raise ConfigError(f"{path_or_name}: layers that predict several tokens are not read from GGUF files")
    keeps_codes = weight_format is not None and ops.takes_grouped and quantization in (None, "int4")
    _load_files(
        wanted, ops, resolve_weights(path_or_name), weight_format,
        Loading(quantization, keeps_codes, keeps_tensors=False),
    )


def _load_files(
    wanted: WeightTargets, ops: Ops, folder: Path, weight_format: WeightFormat | None, loading: Loading
) -> dict[str, str]:
    """Load tensors of safetensors files; as `_load_tensors`."""
    files = weight_files(folder)
    with release_pages(files) as hold:
        if weight_format is None:
            return _load_tensors(wanted, ops, read_tensors(files, hold=hold), folder, loading)
        return _load_tensors(wanted, ops, read_encoded(files, weight_format, hold), folder, loading)


def _load_tensors(
    wanted: WeightTargets, ops: Ops, tensors: Iterable[tuple[str, Tensor | EncodedTensor]],
    source: str | Path, loading: Loading,
) -> dict[str, str]:
    """Give tensors to a model, and pack each module as soon as it has all of its own.

    Returns the tied tensors among them, with the name of the tensor that each must equal.
    """
    waiting = Counter(target.owner for target in wanted.targets.values())
    loaded: set[str] = set()
    unexpected: list[str] = []

    def load(name: str, tensor: Tensor | EncodedTensor) -> None:
        target = wanted.targets[name]
        _load_tensor(target, tensor, name, source, loading)
        loaded.add(name)
        waiting[target.owner] -= 1
        if waiting[target.owner]:
            return
        if isinstance(target.owner, Linear | Experts):
            target.owner.pack(ops, loading.quantization)
        elif isinstance(target.owner, DecoderModel):
            target.owner.pack_embedding(loading.quantization)

    for stored, tensor in tensors:
        name = stored
        if name not in wanted.targets and f"model.{name}" in wanted.targets:
            name = f"model.{name}"  # saved without the output head, as embedding models are
        if name in loaded:
            continue  # a repeated tensor in another file
        if name in wanted.targets:
            load(name, tensor)
        elif isinstance(tensor, Tensor) and (parts := wanted.list_parts(name)):
            for part, matrix in _split_experts(wanted, parts, tensor, name, source):
                load(part, matrix)
        elif name not in wanted.tied and not wanted.is_ignored(name):
            unexpected.append(name)
        loaded.add(name)
    missing = [name for name in wanted.targets if name not in loaded]
    check_names(source, missing, unexpected)
    return {name: other for name, other in wanted.tied.items() if name in loaded}


def _split_experts(
    wanted: WeightTargets, parts: list[str], tensor: Tensor, name: str, source: str | Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of all experts out of one tensor."""
    single = wanted.targets[parts[0]].shape
    if tensor.numel() != len(parts) * single.numel() or tensor.shape[-1] != single[-1]:
        raise ConfigError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, its config says {len(parts)} x {list(single)}"
        )
    yield from zip(parts, tensor.view(-1, *single), strict=True)


def _load_tensor(
    target: WeightTarget, tensor: Tensor | EncodedTensor, name: str, source: str | Path, loading: Loading
) -> None:
    if tensor.shape != target.shape:
        raise ConfigError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, its config says {list(target.shape)}"
        )
    if target.memory.is_meta:
        return
    keep = target.keep if loading.keeps_tensors else None
    if isinstance(tensor, EncodedTensor):
        if loading.keeps_codes and (keep_codes := target.keep_codes or keep) is not None:
            keep_codes(tensor)
            return
        tensor = tensor.dequantize()
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        raise ConfigError(
            f"{source}: tensor {name} is {tensor.dtype}, and no quantization_config explains it"
        )
    if keep is None:
        target.copy(tensor)
    else:
        keep(tensor)


def _check_tied(files: list[Path], tied: dict[str, str], folder: Path) -> None:
    """Reject a tied tensor that differs from the tensor that is used in its place."""
    names = {*tied, *tied.values()}
    tensors = {name: tensor for name, tensor in read_tensors(files) if name in names}
    for name, other in tied.items():
        if not torch.equal(tensors[name].to(tensors[other].dtype), tensors[other]):
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
