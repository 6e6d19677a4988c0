"""RayActors: processes that Ray places on its nodes, and starts again when they end."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError

logger = logging.getLogger("troupe.engine")


class RayActors:
    """Actors of one kind, and the connection to Ray.

    Args:
        option: the setting that needs Ray; error messages name it.

    Raises:
        ConfigError: Ray is not installed or not reachable.
    """

    def __init__(self, option: str) -> None:
        self._ray = import_ray(option)
        self._is_owner = not self._ray.is_initialized()  # whether `close` ends the connection
        self._actors: list[Any] = []
        connect_ray(self._ray)

    def place(self, kind: type, configs: Sequence[EngineConfig], num_cpus: int, num_gpus: int) -> None:
        """Create an actor for each config, and let its `run` serve it.

        Args:
            num_cpus: CPUs of each actor.
            num_gpus: GPUs of each actor, if Ray has any and the device is not "cpu".
        """
        ray = self._ray
        resources = ray.cluster_resources()
        num_gpus = num_gpus if configs[0].device != "cpu" and resources.get("GPU", 0) > 0 else 0
        for name, count in (("CPU", num_cpus), ("GPU", num_gpus)):
            if count * len(configs) > resources.get(name, 0):
                logger.warning(
                    "%d actors need %d x %s each, and Ray has %g: some wait until nodes join",
                    *(len(configs), count, name, resources.get(name, 0)),
                )
        make = ray.remote(kind).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        for config in configs:
            actor = make.remote()
            actor.run.remote(config)
            self._actors.append(actor)
        logger.info("Ray places %d actors", len(configs))

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._is_owner:
            self._ray.shutdown()


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
