"""KVTransferConfig: the settings of `--kv-transfer-config`, under vLLM's names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from engine.errors import ConfigError

SHARED_MEMORY, FILE, TCP = CONNECTORS = ("SharedMemoryConnector", "FileConnector", "TcpConnector")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
DEFAULT_MIN_PREFILL = 256
UNIT_TOKENS = 16  # what stores hold, see engine/transfer/units.py
EXTRA_KEYS = ("shared_storage_path", "prefill_replicas", "min_prefill_tokens")


def count_units(block_size: int) -> int:
    """Return how many units a block has. Blocks below the size of a unit do not leave their core."""
    return max(1, block_size // UNIT_TOKENS)



@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How cores exchange blocks. A block that does not arrive is computed, so no setting changes a text.

    Raises:
        ConfigError: a value outside its range.
    """

    kv_connector: str
    kv_role: str = "kv_both"  # producers save blocks; all roles load them
    kv_connector_module_path: str | None = None  # module of a KVConnector class named kv_connector
    kv_buffer_size: int = 10**9  # bytes of the store
    kv_ip: str = "127.0.0.1"  # TcpConnector: where the front of the producers listens
    kv_port: int = 14579
    kv_load_failure_policy: str = "recompute"
    engine_id: str | None = None  # for proxies; ours need none
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_ours, extra = self.kv_connector_module_path is None, self.kv_connector_extra_config
        checks = [
            ("kv_role", self.kv_role in ROLES, f"must be one of {', '.join(ROLES)}"),
            (
                "kv_connector",
                not is_ours or self.kv_connector in CONNECTORS,
                f"must be one of {', '.join(CONNECTORS)}, or a class of kv_connector_module_path",
            ),
            ("kv_buffer_size", _is_integer(self.kv_buffer_size, 2**20), "must be at least 2**20 bytes"),
            ("kv_ip", isinstance(self.kv_ip, str) and bool(self.kv_ip), "must be an address"),
            ("kv_port", _is_integer(self.kv_port, 0, 65535), "must be from 0 to 65535"),
            (
                "kv_load_failure_policy",
                self.kv_load_failure_policy == "recompute",
                "must be recompute: a missing block is computed",
            ),
            ("kv_connector_extra_config", isinstance(extra, dict), "must be an object"),
        ]
        for name, is_valid, reason in checks:
            if not is_valid:
                raise ConfigError(f"kv_transfer_config: {name}={getattr(self, name)!r} {reason}")
        if is_ours and (unknown := sorted(extra.keys() - set(EXTRA_KEYS))):
            known = ", ".join(EXTRA_KEYS)
            raise ConfigError(f"kv_transfer_config: unknown keys {', '.join(unknown)}; known: {known}")
        for name, value, low in (
            ("prefill_replicas", self.num_prefill_replicas, 0),
            ("min_prefill_tokens", self.min_prefill_tokens, 1),
        ):
            if not _is_integer(value, low):
                raise ConfigError(f"kv_transfer_config: {name}={value!r} must be an integer from {low}")
        if self.kv_connector == FILE and not isinstance(self.path, str):
            raise ConfigError(f"kv_transfer_config: {FILE} needs shared_storage_path, a folder")

    @property
    def saves(self) -> bool:
        """Whether blocks are saved for others."""
        return self.kv_role != "kv_consumer"

    @property
    def path(self) -> str | None:
        """The file or folder of the blocks."""
        return self.kv_connector_extra_config.get("shared_storage_path")

    @property
    def num_prefill_replicas(self) -> int:
        """Number of replicas of the front that only compute prompts for the others."""
        count: int = self.kv_connector_extra_config.get("prefill_replicas", 0)
        return count

    @property
    def min_prefill_tokens(self) -> int:
        """Fewest uncached prompt tokens for which a prefill replica is used."""
        count: int = self.kv_connector_extra_config.get("min_prefill_tokens", DEFAULT_MIN_PREFILL)
        return count

    def to_json(self) -> str:
        """Return what `parse_kv_transfer_config` reads."""
        return json.dumps(asdict(self))


def parse_kv_transfer_config(text: str) -> KVTransferConfig:
    """Parse the JSON object of `--kv-transfer-config`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"kv_transfer_config is not valid JSON: {error}") from error
    known = {each.name for each in fields(KVTransferConfig)}
    if not isinstance(data, dict) or "kv_connector" not in data:
        raise ConfigError("kv_transfer_config must be a JSON object with kv_connector")
    if unknown := sorted(data.keys() - known):
        raise ConfigError(
            f"kv_transfer_config: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    return KVTransferConfig(**data)


def _is_integer(value: object, low: int, high: int = 2**63) -> bool:
    return type(value) is int and low <= value <= high
