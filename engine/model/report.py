"""A report on a checkpoint before it is loaded: the code that runs it, its features and its memory.

Only config files and the headers of the weight files are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config_fields import ModelImpl
from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheSpec, group_layers
from engine.model.checkpoint import list_tensor_names, weight_files
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.families import FAMILIES
from engine.model.families.text_parts import TEXT_PARTS
from engine.model.formats.gguf_file import GGUFFile, is_gguf
from engine.model.implementation import EncoderConfig, TransformersConfig, read_model_config
from engine.model.pooling import read_embedding_spec
from engine.model.weight_memory import count_parameters
from engine.model.weight_targets import check_names

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The facts about one checkpoint that are known before it is loaded. Sizes are bytes."""

    architecture: str
    implementation: str  # troupe or transformers
    num_parameters: int
    num_layers: int
    max_model_len: int
    dtype: str  # of the checkpoint
    weight_format: str  # that dtype, or the type of a GGUF file such as Q4_K_M
    weight_bytes: int  # in that format
    kv_bytes_per_token: int  # over all layers, in that dtype
    kv_bytes_outside: int  # of a token outside the windows
    num_groups: int  # of layers; each has a block for `block_size` tokens
    windows: str  # how many layers have which window
    embeddings: str  # how it makes embeddings, or why it makes none
    images: str = ""  # whether it sees images; "": its files have no image encoder
    notices: tuple[str, ...] = ()
    num_state_layers: int = 0  # which keep a state per request instead of keys and values
    state_bytes: int = 0  # of one request

    def list_facts(self) -> list[tuple[str, str]]:
        """Return the report as names and texts, for people."""
        kv_cache = f"{_format(self.kv_bytes_per_token)} per token as {self.dtype}"
        if self.kv_bytes_outside < self.kv_bytes_per_token:
            kv_cache += f", {_format(self.kv_bytes_outside)} of a token outside the windows"
        code = "troupe's decoder" if self.implementation == "troupe" else "the code of transformers"
        facts = [
            ("architecture", f"{self.architecture}, run by {code}"),
            ("parameters", f"{self.num_parameters:,} in {self.num_layers} layers with attention"),
            ("weights", f"{_format(self.weight_bytes)} as {self.weight_format}"),
            ("KV cache", kv_cache),
            ("context", f"{self.max_model_len:,} tokens"),
            ("attention", self.windows),
            ("embeddings", self.embeddings),
        ]
        if self.images:
            facts.append(("images", self.images))
        if self.num_state_layers:
            states = f"{_format(self.state_bytes)} per request in {self.num_state_layers} layers"
            facts.insert(-1, ("states", states))
        return facts + [("note", notice) for notice in self.notices]


def list_families() -> list[tuple[str, str]]:
    """Return the architectures that our decoder runs, with their model types."""
    return [(architecture, family.model_type) for architecture, family in FAMILIES.items()]


def list_image_models() -> list[tuple[str, str]]:
    """Return the model types with an image encoder, and what runs of them."""
    return [(kind, "text and images" if part.vision else "text only") for kind, part in TEXT_PARTS.items()]


def inspect_model(path_or_name: str | Path, model_impl: ModelImpl = "auto") -> ModelReport:
    """Read the files of a folder or of a repository on the hub, without its weights.

    Raises:
        ConfigError: no code fits the checkpoint; names the keys or tensors that are not understood.
    """
    config = read_model_config(path_or_name, model_impl)
    if not isinstance(config, TransformersConfig) and Path(path_or_name).is_dir():
        _check_tensors(Path(path_or_name), config)
    return make_report(path_or_name, config)


def make_report(path_or_name: str | Path, config: ModelConfig) -> ModelReport:
    """Return the report of a checkpoint whose config has been read."""
    notices: tuple[str, ...] = ()
    specs: Sequence[KVCacheSpec]
    if isinstance(config, TransformersConfig):
        implementation, num_parameters, notices = "transformers", config.num_parameters, config.notices
        specs = () if isinstance(config, EncoderConfig) else config.skeleton.kv_specs
    else:
        implementation, num_parameters = "troupe", count_parameters(config)
        specs = [spec.kv_spec for spec in config.layer_specs if spec.state is None]
    states = [spec.state for spec in config.layer_specs if spec.state is not None]
    itemsize = _ITEMSIZE[config.dtype]
    groups = group_layers(specs)
    kept = [layer for group in groups if group.window is None for layer in group.layers]
    weight_format, weight_bytes = config.dtype, num_parameters * itemsize
    if is_gguf(path_or_name):
        file = GGUFFile(path_or_name)
        weight_format, weight_bytes = file.file_type, file.num_bytes
    return ModelReport(
        architecture=config.architecture,
        implementation=implementation,
        num_parameters=num_parameters,
        num_layers=len(specs) or config.num_hidden_layers,
        max_model_len=config.max_model_len,
        dtype=config.dtype,
        weight_format=weight_format,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=2 * sum(spec.num_elements for spec in specs) * itemsize,
        kv_bytes_outside=2 * sum(specs[layer].num_elements for layer in kept) * itemsize,
        num_groups=len(groups),
        windows=_describe_windows(specs),
        num_state_layers=len(states),
        state_bytes=sum(state.cache_spec.num_bytes for state in states),
        embeddings=_describe_embeddings(path_or_name),
        images=_describe_images(config),
        notices=notices,
    )


def _describe_images(config: ModelConfig) -> str:
    if config.vision is not None:
        return "seen; transformers' code encodes them"
    has_encoder = any("vision" in name or "visual" in name for name in config.ignored_weights)
    return "not seen: the text part runs alone" if has_encoder else ""


def _check_tensors(folder: Path, config: ModelConfig) -> None:
    """Compare the names in the weight files with those that our decoder wants; a folder may have none yet."""
    try:
        files = weight_files(folder)
    except ConfigError:
        return
    stored = list_tensor_names(files)
    wanted = DecoderModel(config, torch.float32, torch.device("meta")).weight_targets()
    if not stored & {name for name in wanted.targets if name.startswith("model.")}:
        stored = {f"model.{name}" for name in stored}
    stored = {part for name in stored for part in wanted.list_parts(name) or [name]}
    foreign = stored - wanted.targets.keys() - wanted.tied.keys()
    check_names(folder, wanted.targets.keys() - stored, [name for name in foreign if not wanted.is_ignored(name)])


def _describe_windows(specs: Sequence[KVCacheSpec]) -> str:
    if not specs:
        return "within each text, in both directions"
    counts = Counter(spec.window for spec in specs)
    return ", ".join(
        f"{count} layers over {'all tokens' if window is None else f'{window} tokens'}"
        for window, count in counts.items()
    )


def _describe_embeddings(path_or_name: str | Path) -> str:
    try:
        spec = read_embedding_spec(path_or_name)
    except ConfigError as error:
        return f"none: {error}"
    return {"last": "last token", "cls": "first token"}.get(spec.kind, "mean of all tokens")


def _format(num_bytes: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
