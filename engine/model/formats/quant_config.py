"""WeightFormat: how a checkpoint stores its matrices, from the quantization_config of its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

METHODS = ("gguf", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format and its parameters, as far as the tensors do not say them."""

    method: str  # one of METHODS
    num_bits: int = 4  # gptq, compressed-tensors
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
            _expect(data, where, "fmt", ("e4m3", None))
            return WeightFormat("fp8", block=_parse_block(data.get("weight_block_size"), where))
        case "mxfp4":
            return WeightFormat("mxfp4")
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
    _expect(data, where, "dynamic", (None, {}))
    offset = 0 if data.get("checkpoint_format") == "gptq_v2" else 1
    return WeightFormat("gptq", num_bits=data["bits"], zero_offset=offset)


def _parse_compressed(data: dict[str, Any], where: str) -> WeightFormat:
    _expect(data, where, "kv_cache_scheme", (None,))
    _expect(data, where, "format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    if (data.get("sparsity_config") or {}).get("format") not in (None, "dense"):
        raise ConfigError(f"{where}: sparsity_config={data['sparsity_config']!r} is not supported")
    groups = data.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{where}: config_groups={groups!r} must be an object with at least one group")
    bits = {_parse_bits(group, f"{where}: config_groups") for group in groups.values()}
    if len(bits) > 1:
        raise ConfigError(
            f"{where}: config_groups have weights of {sorted(bits)} bits; one number is supported"
        )
    (num_bits,) = bits
    return WeightFormat("compressed-tensors", num_bits=num_bits)


def _parse_bits(group: Any, where: str) -> int:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ConfigError(f"{where}: {group!r} has no weights")
    _expect(weights, where, "num_bits", (4, 8))
    _expect(weights, where, "type", ("int", "float") if weights["num_bits"] == 8 else ("int",))
    _expect(weights, where, "strategy", ("tensor", "channel", "group", "block"))
    return int(weights["num_bits"])


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
