"""A core on a device that is lent for a bounded time: what the front knows before the first lease, and one lease.

front ─▶ Forecast ─▶ CoreReady, ended        a lease: run_core, in another process ──TCP──▶ RemoteConnector of the front
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from engine.cluster.connection import Connection, End
from engine.cluster.core_host import CoreHost, load_tokenizer
from engine.cluster.remote import RemoteConnector, serve_front
from engine.config import EngineConfig
from engine.device.kv_cache import DTYPES
from engine.errors import ConfigError
from engine.host_memory import measure_host_memory
from engine.model import DecoderModel, read_model_config
from engine.model.checkpoint import resolve_weights
from engine.model.formats.gguf_file import is_gguf
from engine.model.implementation import TransformersConfig
from engine.model.weight_memory import count_parameters
from engine.resolved_config import ResolvedConfig
from engine.wire.frames import Link
from engine.wire.link_messages import CoreReady
from engine.worker.cache_sizer import DEVICE_SHARE, CacheSizer
from engine.worker.device_choice import choose_worker_config, probe_device

MAX_WEIGHT_BYTES = 2  # of a parameter on the device


class LeaseConnector:
    """Reports what a core will be, and then waits for those of the leases."""

    def __init__(self, config: EngineConfig, arrivals: RemoteConnector) -> None:
        self._config = config
        self._arrivals = arrivals
        self._is_foreseen = False

    async def connect(self) -> Connection:
        if not self._is_foreseen:
            self._is_foreseen = True
            return Forecast(self._config)
        return await self._arrivals.connect()

    def close(self) -> None:
        """Do nothing: the listener owns the socket."""


class Forecast:
    """A connection that ends once it has reported the config of later cores."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def send(self, message: Any) -> None:
        """Drop it: there is no core yet."""

    async def run(self, handle: Callable[[Any], None]) -> End:
        handle(CoreReady(await asyncio.to_thread(foresee, self._config), [], {"ops": "waiting for a device"}))
        return End("it waits for a device")

    def abort(self) -> None:
        """Do nothing: it ends by itself."""


def foresee(config: EngineConfig) -> ResolvedConfig:
    """Resolve the config without the device and the weights, whose files are fetched, so that no lease waits for them.

    Raises:
        ConfigError: as `Worker.load`, as far as it can be known; the model does not run on our decoder.
    """
    model = read_model_config(config.model, config.model_impl, config.read_hf_overrides())
    if isinstance(model, TransformersConfig):
        raise ConfigError(f"model={config.model!r}: only models on our decoder run on a device that is lent")
    if config.load_format != "dummy" and not is_gguf(config.model):  # a GGUF file has the config in it
        resolve_weights(config.model)
    worker, _ = choose_worker_config(config, model, probe_device(config.device))
    if worker.device == "cuda":
        free_bytes = int(torch.cuda.get_device_properties(0).total_memory * (config.memory_share or DEVICE_SHARE))
    else:
        free_bytes = measure_host_memory()[1]
    decoder = DecoderModel(model, DTYPES[worker.dtype], torch.device("meta"))
    sizer = CacheSizer(config, worker, model, decoder.kv_specs(), state_specs=decoder.state_specs())
    return sizer.resolve(free_bytes - MAX_WEIGHT_BYTES * count_parameters(model))


def run_core(config: EngineConfig, seconds: float) -> None:
    """Serve the front on this machine that `config` names, for so long or until it closes the connection.

    Called in a process that has the device. A later call in it finds the model loaded.

    Raises:
        ConfigError: the core does not accept the config.
        Exception: the core crashed, or there is no front.
    """
    asyncio.run(_serve(config, seconds))


async def _serve(config: EngineConfig, seconds: float) -> None:
    assert config.data_parallel_key is not None and config.data_parallel_rank is not None, "set by LeasedEngine"
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            link = Link(
                *await asyncio.open_connection(config.data_parallel_address, config.data_parallel_rpc_port)
            )
            await serve_front(_make_host(config), link, config.data_parallel_key, config.data_parallel_rank)


@cache
def _make_host(config: EngineConfig) -> CoreHost:
    return CoreHost(config, partial(load_tokenizer, config))
