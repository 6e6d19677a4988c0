"""EngineConfig: the checked settings of an engine; each is a flag, a keyword of `LLM` and TROUPE_<FIELD>."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from engine.config_fields import DEMO_MODEL, EngineFields
from engine.errors import ConfigError
from engine.kv_transfer_config import TCP, UNIT_TOKENS, KVTransferConfig, parse_kv_transfer_config
from engine.packaged_models import PACKAGED_MODELS
from engine.speculative_config import SpeculativeConfig, parse_speculative_config
from engine.vllm_words import EXTRA_NAMES, read_settings

# Defaults by device: requests and tokens in one step.
STEP_LIMITS = {"cpu": (64, 1024), "mps": (64, 1024), "cuda": (256, 8192)}
MIN_KEY_LENGTH = 16
MAX_IMAGES = 32  # of a request
# Default of kv_offload_gb with a kv_transfer_config: all transfers pass through host memory
TRANSFER_GB = 0.5

@dataclass(frozen=True, slots=True, init=False)
class EngineConfig(EngineFields):
    """All settings of one engine. Every field is a flag of `python -m app` and an argument of `LLM(...)`.

    Args:
        settings: fields by their own names or by those of vLLM, see `engine.vllm_words`.

    Raises:
        ConfigError: an unknown setting, or a value outside its range.
    """

    other_names: ClassVar[tuple[str, ...]] = EXTRA_NAMES  # of vLLM: keywords and flags without a field

    def __init__(self, model: str = DEMO_MODEL, **settings: Any) -> None:
        hints = _find_hints()
        EngineFields.__init__(self, str(model), **read_settings(settings, hints, list_aliases()))
        for name, (kind, *_) in hints.items():
            if get_origin(kind) is tuple:
                object.__setattr__(self, name, _split(getattr(self, name)))
        if self.revision is not None:
            object.__setattr__(self, "model", pin_revision(self.model, self.revision))
            object.__setattr__(self, "revision", None)
        packaged = PACKAGED_MODELS.get(self.model)
        if packaged is not None and not Path(self.model).exists():
            object.__setattr__(self, "served_model_name", self.served_model_name or (packaged.name,))
            object.__setattr__(self, "model", str(packaged.path))
        self.__post_init__()

    def __post_init__(self) -> None:
        for name, (kind, *notes) in _find_hints().items():
            if get_origin(kind) is Literal:
                _check_choice(self, name, get_args(kind))
            elif kind is bool:
                _check_switch(self, name)
            elif isinstance(notes[0], tuple):
                _check_range(self, name, *notes[0])
        self._check_adapters()
        self._check_replicas()
        _check_choice(self, "tensor_parallel_size", (1, 2, 4, 8))
        self._check_stages()
        self._check_nodes()
        for name in ("speculative_config", "kv_transfer_config", "hf_overrides", "limit_mm_per_prompt"):
            given: object = getattr(self, name)
            if isinstance(given, Mapping):  # as LLM(speculative_config={...}) passes it
                object.__setattr__(self, name, json.dumps(dict(given)))
        self.read_hf_overrides()
        self.read_image_limit()
        self.read_speculative()
        self._check_kv_transfer()
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError("long_prefill_token_threshold needs enable_chunked_prefill")
        self.find_step_limits("cpu")

    def _check_stages(self) -> None:
        needed = {"kv_offload_gb": 0.0, "kv_transfer_config": None, "enable_lora": False}
        _check_together(self, "pipeline_parallel_size", needed)

    def _check_nodes(self) -> None:
        _check_range(self, "node_rank", 0, self.nnodes - 1)
        if self.num_ranks % self.nnodes:
            raise ConfigError(f"nnodes={self.nnodes} does not divide the {self.num_ranks} ranks of the model")
        needed = {
            "pipeline_parallel_size": 1, "data_parallel_size": 1, "kv_offload_gb": 0.0,
            "kv_transfer_config": None,
        }
        _check_together(self, "nnodes", needed)
        if self.nnodes > 1 and self.data_parallel_key is None:
            raise ConfigError("nnodes above 1 needs data_parallel_key")
        if self.distributed_executor_backend == "ray" and (self.nnodes == 1 or self.node_rank):
            raise ConfigError("distributed_executor_backend=ray needs nnodes above 1, and node_rank=0")

    def _check_adapters(self) -> None:
        _check_range(self, "max_cpu_loras", self.max_loras, 2**20)
        for name in ("lora_modules", "lora_root"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"{name} needs enable_lora")
        self.read_lora_modules()
        if self.enable_lora and self.mock_step_ms is not None:
            raise ConfigError(
                f"mock_step_ms={self.mock_step_ms!r} does not work with enable_lora; it must be None"
            )

    def _check_replicas(self) -> None:
        size, is_ray = self.data_parallel_size, self.data_parallel_backend == "ray"
        if self.core == "local" and size > 1:
            raise ConfigError(f"core=local runs one replica, and data_parallel_size={size}")
        _check_range(self, "data_parallel_size_local", 0, size)
        _check_range(self, "data_parallel_rank", 0, size - 1)
        if self.data_parallel_key is not None and len(self.data_parallel_key) < MIN_KEY_LENGTH:
            raise ConfigError(f"data_parallel_key must have at least {MIN_KEY_LENGTH} characters")
        if is_ray and self.data_parallel_size_local is not None:
            raise ConfigError("data_parallel_size_local has no meaning with data_parallel_backend=ray")
        if self.num_remote_replicas and self.data_parallel_key is None and not is_ray:
            raise ConfigError("replicas on other machines need data_parallel_key")

    def _check_kv_transfer(self) -> None:
        config = self.read_kv_transfer()
        if config is None:
            return
        if self.block_size % UNIT_TOKENS:
            raise ConfigError(
                f"block_size={self.block_size} must be a multiple of {UNIT_TOKENS} with kv_transfer_config"
            )
        if not self.enable_prefix_caching:
            raise ConfigError("kv_transfer_config needs enable_prefix_caching")
        if config.kv_connector == TCP and self.data_parallel_key is None:
            raise ConfigError(f"kv_transfer_config: {TCP} needs data_parallel_key")
        if config.num_prefill_replicas >= self.data_parallel_size > 0 < config.num_prefill_replicas:
            raise ConfigError(
                f"kv_transfer_config: prefill_replicas={config.num_prefill_replicas} must be less than "
                f"data_parallel_size={self.data_parallel_size}"
            )

    def find_step_limits(self, device: str) -> tuple[int, int]:
        """Return the maximum numbers of requests and of tokens in one step on this device.

        Raises:
            ConfigError: a request would get no token.
        """
        default_seqs, default_tokens = STEP_LIMITS[device]
        # Stages work at the same time if a prompt takes several steps.
        default_tokens = max(default_tokens // self.pipeline_parallel_size, default_seqs)
        num_tokens = self.max_num_batched_tokens or max(default_tokens, self.max_num_seqs or 0)
        # Few tokens lower the default of a GPU to that of the CPU, so that a config is valid on both or on neither.
        least_seqs, _ = STEP_LIMITS["cpu"]
        num_seqs = self.max_num_seqs or min(default_seqs, max(num_tokens, least_seqs))
        if num_tokens < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={num_tokens} must be at least max_num_seqs={num_seqs}, so that every running "
                "request gets one token a step"
            )
        return num_seqs, num_tokens

    def read_speculative(self) -> SpeculativeConfig | None:
        """Return the parsed `speculative_config`; None without one."""
        given: object = self.speculative_config
        if given in (None, "off"):
            return None
        if not isinstance(given, str):
            raise ConfigError(f"speculative_config={given!r} must be a JSON object, or off")
        parsed = parse_speculative_config(given)
        # The layers that predict several tokens are in the model's own checkpoint.
        return replace(parsed, model=self.model) if parsed.device_method == "mtp" else parsed

    def read_kv_transfer(self) -> KVTransferConfig | None:
        """Return the parsed `kv_transfer_config`; None without one."""
        given: object = self.kv_transfer_config
        if given is None:
            return None
        if not isinstance(given, str):
            raise ConfigError(f"kv_transfer_config={given!r} must be a JSON object")
        return parse_kv_transfer_config(given)

    def read_hf_overrides(self) -> dict[str, Any]:
        """Return the keys that replace those of config.json."""
        return _read_object("hf_overrides", self.hf_overrides)

    def read_image_limit(self) -> int:
        """Return the largest number of images in a prompt."""
        limits = _read_object("limit_mm_per_prompt", self.limit_mm_per_prompt)
        for key, each in limits.items():
            count = each.get("count") if isinstance(each, dict) else each
            if key not in ("image", "video", "audio") or type(count) is not int or count < 0:
                raise ConfigError(
                    f"limit_mm_per_prompt: {key}={each!r} must be image, video or audio, each with a number"
                )
            limits[key] = count
        return min(MAX_IMAGES, limits.get("image", MAX_IMAGES))

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for blocks outside the KV cache."""
        gib = self.kv_offload_gb or (0.0 if self.kv_transfer_config is None else TRANSFER_GB)
        return int(gib * 2**30)

    def read_lora_modules(self) -> dict[str, str]:
        """Return the paths of the adapters to load at the start, by name."""
        found: dict[str, str] = {}
        for entry in self.lora_modules:
            name, separator, path = entry.partition("=")
            if not (name and separator and path) or name in found:
                raise ConfigError(f"lora_modules: {entry!r} must be name=path, each name once")
            found[name] = path
        return found

    @property
    def num_remote_replicas(self) -> int:
        """Number of replicas that other machines run."""
        local = 0 if self.data_parallel_backend == "ray" else self.data_parallel_size_local
        return 0 if local is None else self.data_parallel_size - local

    @property
    def model_name(self) -> str:
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """All model names in the API."""
        return self.served_model_name or (Path(self.model).name.partition("@")[0] or self.model,)


def pin_revision(model: str, revision: str) -> str:
    """Return the name of a repository with its revision, as name@revision. A folder has one version only."""
    if Path(model).expanduser().exists() or "@" in model:
        return model
    repository, colon, file = model.partition(":")
    return f"{repository}@{revision}{colon}{file}"


def _split(given: Any) -> tuple[str, ...]:
    """Return a text with commas, or several texts, as a tuple."""
    if not isinstance(given, str):
        return tuple(given)
    return tuple(part.strip() for part in given.split(",") if part.strip())


def _read_object(name: str, given: object) -> dict[str, Any]:
    """Return the object in a JSON text; empty for None."""
    try:
        found = json.loads(given) if isinstance(given, str) else {} if given is None else given
    except ValueError as error:
        raise ConfigError(f"{name}={given!r} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={given!r} must be a JSON object")
    return found


@cache
def _find_hints() -> dict[str, tuple[Any, ...]]:
    """Return the type and the notes of each field, by name."""
    return {name: get_args(hint) for name, hint in get_type_hints(EngineFields, include_extras=True).items()}


def list_aliases() -> dict[str, str]:
    """Return the fields that have another name in vLLM, by that name."""
    return {
        note.removeprefix("--").replace("-", "_"): name
        for name, (_, *notes) in _find_hints().items()
        for note in notes[:-1]
        if str(note).startswith("--")
    }


def _check_together(config: EngineConfig, size_name: str, needed: Mapping[str, object]) -> None:
    """Check the fields that must have these values if a size is above 1."""
    for name, other in needed.items() if getattr(config, size_name) > 1 else ():
        if (value := getattr(config, name)) != other:
            raise ConfigError(
                f"{name}={value!r} does not work with {size_name} above 1; it must be {other!r}"
            )


def _check_choice(config: EngineConfig, name: str, allowed: tuple[str | int, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}")


def _check_switch(config: EngineConfig, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")


def _check_range(config: EngineConfig, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if value is None and next(f for f in fields(config) if f.name == name).default is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be a number from {low} to {high}")
    if isinstance(low, int) and not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")
