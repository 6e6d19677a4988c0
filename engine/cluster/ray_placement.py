"""Replicas as Ray actors: Ray chooses their nodes and starts them again, and our own connections carry the data.

    RayListener ──places──▶ Ray ──starts──▶ HeadlessActor: serve_headless ──TCP──▶ RayListener

When a node ends, its requests continue in other replicas at once, as with any lost connection. Ray starts the actor on
another node, from where it connects under its old rank.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import replace

from engine.cluster.ray_actors import RayActors, import_ray
from engine.cluster.remote import RemoteListener, serve_headless
from engine.config import EngineConfig

OPTION = "data_parallel_backend=ray"


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
        super().__init__(
            *(address, 0, self._secret), config.data_parallel_size > 1, config.heartbeat_timeout_s
        )
        self._config = config
        self._actors: RayActors | None = None

    async def start(self) -> None:
        """Listen, connect to Ray, and create the actors.

        Raises:
            ConfigError: Ray is not installed or not reachable, or the address cannot be used.
        """
        import_ray(OPTION)
        await super().start()
        await asyncio.to_thread(self._place)

    def close(self) -> None:
        super().close()
        if self._actors is not None:
            self._actors.close()
            self._actors = None

    def _place(self) -> None:
        config = replace(
            self._config, data_parallel_backend="mp", data_parallel_rpc_port=self.port,
            data_parallel_key=self._secret,
        )  # fmt: skip
        self._actors = RayActors(OPTION)
        ranks = [replace(config, data_parallel_rank=rank) for rank in range(config.data_parallel_size)]
        self._actors.place(HeadlessActor, ranks, config.num_threads or 1, num_gpus=1)
