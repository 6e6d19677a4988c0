"""WeightFormat: how a checkpoint stores its matrices, from the quantization_config of its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

METHODS = ("gguf", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "modelopt")
_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format and its parameters, as far as the tensors do not say them."""

    method: str  # one of METHODS
    zero_offset: int = 0  # gptq: what the stored zero points lack
    block: tuple[int, int] | None = None  # fp8: sizes of a scale's block


def parse_format(data: Any, where: str) -> WeightFormat | None:
    """Return the format; None if there is none."""
    if data is None:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be an object")
    match data.get("quant_method"):
        case "gguf":
            return WeightFormat("gguf")
        case "awq":
            return _parse_awq(data, where)
        case "gptq":
            return _parse_gptq(data, where)
        case "compressed-tensors":
            return _parse_compressed(data, where)
        case "fp8":
            _expect(data, where, "fmt", ("e4m3", "float8_e4m3fn", None))
            return WeightFormat("fp8", block=_parse_block(data.get("weight_block_size"), where))
        case "mxfp4":
            return WeightFormat("mxfp4")
        case "modelopt":
            _expect(data, where, "quant_algo", ("FP8", "NVFP4", "MIXED_PRECISION"))
            return WeightFormat("modelopt")
        case method:
            supported = ", ".join(each for each in METHODS if each != "gguf")
            raise ConfigError(f"{where}: quant_method={method!r} is not supported; supported: {supported}")


def _parse_awq(data: dict[str, Any], where: str) -> WeightFormat:
    _expect(data, where, "bits", (4,))
    _expect(data, where, "version", ("gemm", "GEMM", None))
    _expect(data, where, "zero_point", (True,))
    return WeightFormat("awq")


def _parse_gptq(data: dict[str, Any], where: str) -> WeightFormat:
    _expect(data, where, "bits", (4, 8))
    _expect(data, where, "checkpoint_format", ("gptq", "gptq_v2", None))
    # The bits of each matrix follow from its tensors, so `dynamic` says nothing new.
    offset = 0 if data.get("checkpoint_format") == "gptq_v2" else 1
    return WeightFormat("gptq", zero_offset=offset)


def _parse_compressed(data: dict[str, Any], where: str) -> WeightFormat:
    if data.get("format") != "mixed-precision":  # else the groups have formats of their own
        _expect(data, where, "format", _COMPRESSED)
    if (data.get("sparsity_config") or {}).get("format") not in (None, "dense"):
        raise ConfigError(f"{where}: sparsity_config={data['sparsity_config']!r} is not supported")
    groups = data.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{where}: config_groups={groups!r} must be an object with at least one group")
    for group in groups.values():
        _check_group(group, f"{where}: config_groups")
    return WeightFormat("compressed-tensors")


def _check_group(group: Any, where: str) -> None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ConfigError(f"{where}: {group!r} has no weights")
    if group.get("format") is not None:
        _expect(group, where, "format", _COMPRESSED)
    _expect(weights, where, "num_bits", (4, 8))
    _expect(weights, where, "type", ("int", "float"))
    _expect(weights, where, "strategy", ("tensor", "channel", "group", "block", "tensor_group"))


def _parse_block(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in value):
        raise ConfigError(f"{where}: weight_block_size={value!r} must be two positive integers")
    return value[0], value[1]


def _expect(data: dict[str, Any], where: str, key: str, allowed: tuple[Any, ...]) -> None:
    value = data.get(key)
    if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
        wanted = ", ".join(repr(each) for each in allowed if each is not None) or "absent"
        raise ConfigError(f"{where}: {key}={value!r} is not supported; supported: {wanted}")
