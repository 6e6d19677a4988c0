"""Ranks on other nodes: they connect to rank 0, and both sides prove that they know a shared key.

Each rank of `serve_node` greets as in `engine.wire.handshake`. A rank process gets its connection, and Start follows.
Tensors travel through torch.distributed, neither encrypted nor signed, so use a private network.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.wire import handshake
from engine.wire.frames import Channel

logger = logging.getLogger("troupe.engine")

ROOT = Path(__file__).resolve().parents[2]
RETRY_S = 0.5
ARRIVAL_TIMEOUT_S = 600.0  # of all ranks


def accept_ranks(config: EngineConfig) -> dict[int, socket.socket]:
    """Return the connections of the ranks on other nodes, by number."""
    missing, found = set(range(config.ranks_per_node, config.num_ranks)), {}
    place = f"master_addr={config.master_addr!r}, master_port={config.master_port}"
    try:
        server = socket.create_server((config.master_addr, config.master_port))
    except OSError as error:
        raise ConfigError(f"{place}: {error}") from error
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    with server:
        logger.info("waiting for ranks %s at %s", sorted(missing), place)
        while missing:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, peer = server.accept()
            except TimeoutError as error:
                raise ConfigError(f"{place}: ranks {sorted(missing)} have not connected") from error
            number = _greet(connection, _read_key(config))
            if number in missing:
                missing.remove(number)
                found[number] = connection
            else:
                logger.warning("refused a rank at %s: its key or its number %s is wrong", peer, number)
                connection.close()
    return found


def serve_node(config: EngineConfig) -> None:
    """Run the ranks of a node other than 0. They connect again when the model of rank 0 has ended."""
    first = config.node_rank * config.ranks_per_node
    while True:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(config.ranks_per_node):
                processes.append(_start_rank(config, first + index, index))
            for process in processes:
                process.wait()
            logger.warning("the ranks of node %d have ended; they connect again", config.node_rank)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def launch(
    connection: socket.socket, environment: dict[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a rank's process, which owns the connection and the descriptors."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with connection:
        return subprocess.Popen(
            [sys.executable, "-m", "engine.parallel.rank_process", str(connection.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[connection.fileno(), *descriptors],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        )


def choose_device(index: int) -> dict[str, str]:
    """Return the environment in which the process of a node's rank sees one CUDA device."""
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return {"CUDA_VISIBLE_DEVICES": visible[index] if index < len(visible) else str(index)}


def _start_rank(config: EngineConfig, number: int, index: int) -> subprocess.Popen[bytes]:
    """Connect to rank 0, as often as needed, and start the process of a rank."""
    place = (config.master_addr, config.master_port)
    logger.info("rank %d connects to %s:%d", number, *place)
    while True:
        try:
            with socket.create_connection(place, handshake.TIMEOUT_S) as connection:
                handshake.introduce(Channel(connection), "rank", _read_key(config), number)
                connection.settimeout(None)
                return launch(connection, choose_device(index))
        except OSError as error:
            if isinstance(error, handshake.PeerRefused):
                logger.warning("rank %d and rank 0 do not agree: %s", number, error)
            time.sleep(RETRY_S)


def _greet(connection: socket.socket, key: str) -> int | None:
    """Exchange proofs. Returns the number of the rank; None if it does not know the key."""
    connection.settimeout(handshake.TIMEOUT_S)
    try:
        number = handshake.greet(Channel(connection), "rank", key)
    except OSError:
        return None
    connection.settimeout(None)
    return number


def _read_key(config: EngineConfig) -> str:
    assert config.data_parallel_key is not None, "EngineConfig requires a key for several nodes"
    return config.data_parallel_key
