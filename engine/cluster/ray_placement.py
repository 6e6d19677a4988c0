"""What `--headless` runs, and Ray as the one who starts such processes: replicas, or the other nodes of a model.

    RayPlacement ──places──▶ Ray ──starts──▶ HeadlessActor: serve_headless ──TCP──▶ front, or rank 0

Our own connections carry the data. When a node ends, its requests continue in other replicas at once, as with any lost
connection. Ray starts the actor on another node, from where it connects under its old number.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from dataclasses import replace
from typing import Any

from engine.cluster.remote import RemoteListener, serve_replica
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.parallel.nodes import serve_node

logger = logging.getLogger("troupe.engine")


def serve_headless(config: EngineConfig) -> None:
    """Run one replica for a front on another machine, or with a `node_rank` this node's ranks for rank 0.

    Raises:
        ConfigError: the other side refuses this one, or the core does not accept the config.
        Exception: the core crashed.
    """
    if config.node_rank:
        serve_node(config)
    asyncio.run(serve_replica(config))


class HeadlessActor:
    """A headless process that Ray started."""

    def run(self, config: EngineConfig) -> None:
        """Serve. If the core crashes, the process ends; Ray starts the actor again and repeats the call."""
        try:
            serve_headless(config)
        finally:
            os._exit(1)


class RayPlacement:
    """Lets Ray start the replicas of a front, or the other nodes of its model.

    Args:
        listener: accepts the replicas; None: nodes connect to rank 0.
    """

    def __init__(self, config: EngineConfig, listener: RemoteListener | None) -> None:
        self._config = config
        self._listener = listener
        self._option = "distributed_executor_backend=ray" if listener is None else "data_parallel_backend=ray"
        self._ray: Any = None
        self._is_owner = False  # whether `close` ends the connection to Ray
        self._actors: list[Any] = []

    async def start(self) -> None:
        """Listen, connect to Ray, and create the actors.

        Raises:
            ConfigError: Ray is not installed or not reachable, or the address cannot be used.
        """
        self._ray = import_ray(self._option)
        if self._listener is not None:
            await self._listener.start()
        await asyncio.to_thread(self._place)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._is_owner:
            self._is_owner = False
            self._ray.shutdown()

    def _list_configs(self) -> list[EngineConfig]:
        if self._listener is None:
            config = replace(self._config, distributed_executor_backend="mp")
            return [replace(config, node_rank=number) for number in range(1, config.nnodes)]
        config = replace(
            self._config, data_parallel_backend="mp", data_parallel_rpc_port=self._listener.port,
            data_parallel_key=self._listener.key,
        )  # fmt: skip
        return [replace(config, data_parallel_rank=rank) for rank in range(config.data_parallel_size)]

    def _place(self) -> None:
        ray, configs = self._ray, self._list_configs()
        self._is_owner = not ray.is_initialized()
        connect_ray(ray)
        resources, num_ranks = ray.cluster_resources(), self._config.ranks_per_node
        num_cpus = max(num_ranks, self._config.num_threads or 1)
        num_gpus = num_ranks if self._config.device != "cpu" and resources.get("GPU", 0) > 0 else 0
        for name, count in (("CPU", num_cpus), ("GPU", num_gpus)):
            if count * len(configs) > resources.get(name, 0):
                logger.warning(
                    "%d actors need %d x %s each, and Ray has %g: some wait until nodes join",
                    *(len(configs), count, name, resources.get(name, 0)),
                )
        make = ray.remote(HeadlessActor).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        for config in configs:
            actor = make.remote()
            actor.run.remote(config)
            self._actors.append(actor)
        logger.info("Ray places %d actors", len(configs))


def import_ray(what: str) -> Any:
    """Return the module, which is optional."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"{what} needs Ray: pip install ray ({error})") from error


def connect_ray(ray: Any) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray on this machine; once per process."""
    if ray.is_initialized():
        return
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r}: {error}") from error
