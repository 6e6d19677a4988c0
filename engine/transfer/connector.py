"""KVConnector: the protocol of a store of units that several cores share, and the choice of one.

Every value has a checksum. A late, damaged or missing unit is a miss, and its tokens are computed again.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from engine.errors import ConfigError
from engine.kv_transfer_config import SHARED_MEMORY, TCP, KVTransferConfig
from engine.transfer.mapped_store import MappedStore
from engine.transfer.tcp_store import TcpStore
from engine.transfer.units import Unit, UnitLayout

logger = logging.getLogger("troupe.engine")


class KVConnector(Protocol):
    """A store. One thread calls all methods; they may block, and steps go on meanwhile.

    The names are those of vLLM's KVConnectorBase_V1, but with keys in place of requests and block ids.

    An OSError means that nothing was found or saved, and is logged. The constructor of a class of
    `kv_connector_module_path` gets the KVTransferConfig and the UnitLayout.
    """

    def get_num_new_matched_tokens(self, keys: Sequence[bytes]) -> int:
        """Return the number of tokens of the longest prefix of `keys` that can be loaded."""

    def start_load_kv(self, units: Sequence[Unit]) -> list[bool]:
        """Fill the parts of these units. Returns which of them were found and are intact."""

    def save_kv(self, units: Sequence[Unit]) -> None:
        """Keep copies of these units."""

    def discard_kv(self, keys: Sequence[bytes]) -> None:
        """Forget units whose values may be wrong, because a request with them failed."""

    def shutdown(self) -> None:
        """Close files and connections."""


def make_connector(config: KVTransferConfig, layout: UnitLayout, secret: str | None) -> KVConnector | None:
    """Return the configured connector; None if the store belongs to replicas of another model or setting."""
    if config.kv_connector_module_path is not None:
        try:
            kind = getattr(importlib.import_module(config.kv_connector_module_path), config.kv_connector)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"kv_transfer_config: kv_connector={config.kv_connector!r}: {error}") from error
        connector: KVConnector = kind(config, layout)
        return connector
    if config.kv_connector == TCP:
        assert secret is not None, "checked by EngineConfig"
        return TcpStore((config.kv_ip, config.kv_port), secret, layout)
    if config.path is None:
        raise ConfigError(
            f"kv_transfer_config: {SHARED_MEMORY} needs the front on this machine; use FileConnector or {TCP}"
        )
    path = Path(config.path)
    try:
        if config.kv_connector != SHARED_MEMORY:
            path.mkdir(parents=True, exist_ok=True)
            path /= f"{layout}.kv"
        return MappedStore(path, config.kv_buffer_size, layout)
    except ValueError as error:
        if config.kv_connector != SHARED_MEMORY:
            raise ConfigError(f"kv_transfer_config: {path}: {error}") from error
        logger.warning("no blocks are exchanged with the other replicas: %s", error)
        return None
    except OSError as error:
        raise ConfigError(f"kv_transfer_config: {path} cannot be used as a store: {error}") from error
