"""Replicas as Ray actors: Ray chooses their nodes and starts them again, and our own connections carry the data.

    RayListener ──places──▶ Ray ──starts──▶ HeadlessActor: serve_headless ──TCP──▶ RayListener

When a node ends, its requests continue in other replicas at once, as with any lost connection. Ray starts the actor on
another node, from where it connects under its old rank.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
from dataclasses import replace
from typing import Any

from engine.cluster.remote import RemoteListener, serve_headless
from engine.config import EngineConfig
from engine.errors import ConfigError

logger = logging.getLogger("troupe.engine")


class HeadlessActor:
    """One replica in a process that Ray started."""

    def run(self, config: EngineConfig) -> None:
        """Serve the front. If the core crashes, the process ends; Ray starts the actor again and repeats the call."""
        try:
            asyncio.run(serve_headless(config))
        finally:
            os._exit(1)


class RayListener(RemoteListener):
    """Places the replicas when it listens."""

    def __init__(self, config: EngineConfig) -> None:
        self._secret = config.data_parallel_key or secrets.token_hex(32)
        address = config.data_parallel_address
        super().__init__(address, 0, self._secret, publishes_kv_events=config.data_parallel_size > 1)
        self._config = config
        self._ray: Any = None
        self._is_owner = False  # of the connection to Ray
        self._actors: list[Any] = []

    async def start(self) -> None:
        """Listen, connect to Ray, and create the actors.

        Raises:
            ConfigError: Ray is not installed or not reachable, or the address cannot be used.
        """
        self._ray = import_ray("data_parallel_backend=ray")
        await super().start()
        await asyncio.to_thread(self._place)

    def close(self) -> None:
        super().close()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._is_owner:
            self._ray.shutdown()

    def _place(self) -> None:
        ray, config = self._ray, self._config
        self._is_owner = not ray.is_initialized()
        connect_ray(ray)
        resources = ray.cluster_resources()
        num_cpus = config.num_threads or 1
        num_gpus = int(config.device != "cpu" and resources.get("GPU", 0) > 0)
        for name, count in (("CPU", num_cpus), ("GPU", num_gpus)):
            if count * config.data_parallel_size > resources.get(name, 0):
                logger.warning(
                    "the replicas need %d x %d %s, and Ray has %g: some wait until nodes join",
                    *(config.data_parallel_size, count, name, resources.get(name, 0)),
                )
        actor_class = ray.remote(HeadlessActor)
        shared = replace(
            config, data_parallel_backend="mp", data_parallel_rpc_port=self.port,
            data_parallel_key=self._secret,
        )  # fmt: skip
        for rank in range(config.data_parallel_size):
            actor = actor_class.options(
                num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1,
                scheduling_strategy="SPREAD",
            ).remote()  # fmt: skip
            actor.run.remote(replace(shared, data_parallel_rank=rank))
            self._actors.append(actor)
        logger.info("Ray places %d replicas", config.data_parallel_size)


def import_ray(what: str) -> Any:
    """Return the module, which is optional.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"{what} needs Ray: pip install 'ray[data]' ({error})") from error


def connect_ray(ray: Any) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray on this machine; once per process.

    Raises:
        ConfigError: the cluster is not reachable.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r}: {error}") from error
