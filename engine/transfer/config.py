"""KVTransferConfig: the settings of `--kv-transfer-config`, under vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from engine.errors import ConfigError

SHARED_MEMORY, FILE, TCP = CONNECTORS = ("SharedMemoryConnector", "FileConnector", "TcpConnector")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
DEFAULT_MIN_PREFILL = 256
EXTRA_KEYS = ("shared_storage_path", "prefill_replicas", "min_prefill_tokens")


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
        self._check("kv_role", self.kv_role in ROLES, f"must be one of {', '.join(ROLES)}")
        self._check(
            "kv_connector",
            bool(self.kv_connector)
            if self.kv_connector_module_path is not None
            else self.kv_connector in CONNECTORS,
            f"must be one of {', '.join(CONNECTORS)}, or a class of kv_connector_module_path",
        )
        self._check("kv_buffer_size", _is_integer(self.kv_buffer_size, 2**20), "must be at least 2**20 bytes")
        self._check("kv_port", _is_integer(self.kv_port, 0, 65535), "must be from 0 to 65535")
        self._check("kv_ip", bool(self.kv_ip) and isinstance(self.kv_ip, str), "must be an address")
        is_recompute = self.kv_load_failure_policy == "recompute"
        self._check("kv_load_failure_policy", is_recompute, "must be recompute: a missing block is computed")
        extra = self.kv_connector_extra_config
        self._check("kv_connector_extra_config", isinstance(extra, dict), "must be an object")
        unknown = [] if self.kv_connector_module_path else sorted(extra.keys() - set(EXTRA_KEYS))
        self._check(
            "kv_connector_extra_config", not unknown, f"has unknown keys; known: {', '.join(EXTRA_KEYS)}"
        )
        for name, low in (("prefill_replicas", 0), ("min_prefill_tokens", 1)):
            is_valid = name not in extra or _is_integer(extra[name], low, 2**20)
            self._check("kv_connector_extra_config", is_valid, f"{name} must be an integer from {low}")
        self._check(
            "kv_connector_extra_config",
            self.kv_connector != FILE or isinstance(extra.get("shared_storage_path"), str),
            "needs shared_storage_path, the folder of the blocks",
        )

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
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)})

    def _check(self, name: str, is_valid: bool, reason: str) -> None:
        if not is_valid:
            raise ConfigError(f"kv_transfer_config: {name}={getattr(self, name)!r} {reason}")


def parse_kv_transfer_config(text: str) -> KVTransferConfig:
    """Parse the JSON object of `--kv-transfer-config`.

    Raises:
        ConfigError: it is not a JSON object, or a key is unknown, missing or has a wrong value.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"kv_transfer_config is not valid JSON: {error}") from error
    known = {each.name for each in fields(KVTransferConfig)}
    if not isinstance(data, dict) or "kv_connector" not in data or (unknown := sorted(data.keys() - known)):
        detail = (
            f"unknown: {', '.join(unknown)}; " if isinstance(data, dict) and "kv_connector" in data else ""
        )
        raise ConfigError(
            f"kv_transfer_config must be a JSON object with kv_connector; {detail}known: {', '.join(sorted(known))}"
        )
    return KVTransferConfig(**data)


def _is_integer(value: object, low: int, high: int = 2**63) -> bool:
    return type(value) is int and low <= value <= high
