"""LeasedEngine: an Engine whose core runs on a device that is lent for a bounded time, such as a GPU of ZeroGPU.

a request waits ──lend──▶ a process with the device: run_core ──▶ serves all requests ──▶ the lease ends
       ▲                                                                                      │
       └────────────── those that are not finished wait again, with their tokens ◀────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from engine.cluster.core_host import load_tokenizer
from engine.cluster.leases import LeaseConnector, run_core
from engine.cluster.placement import Placement
from engine.cluster.remote import RemoteListener
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequest, LeaseRefused
from engine.front.replica import Replica
from engine.input.input_processor import Prompt
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

__all__ = ["LeasedEngine", "run_core"]
logger = logging.getLogger("troupe.engine")

LOOPBACK = "127.0.0.1"
LINGER_S = 1.0  # for which a lease without requests is kept for the next one
MAX_VAIN = 3  # leases in a row that a request opens and that fail
# Settings by which the front needs a core when no request waits, or several.
REFUSED = ("data_parallel_size", "nnodes", "tensor_parallel_size", "pipeline_parallel_size", "enable_lora", "journal")


class LeasedEngine(Engine):
    """Opens a lease when a request waits and there is none. The requests that wait open them in turn.

    Args:
        lend: calls `run_core` with these arguments in a process that has the device, and returns or raises when that
            has ended. It runs in a thread, with the context variables of the request that opens the lease.
            It raises LeaseRefused if this request gets no device.
        seconds: after which `run_core` returns.

    Raises:
        ConfigError: a setting does not work with leases.
    """

    def __init__(
        self, config: EngineConfig, lend: Callable[[EngineConfig, float], None], seconds: float
    ) -> None:
        for name in REFUSED:
            if (value := getattr(config, name)) is True or value not in (1, False, None):
                raise ConfigError(f"{name}={value!r} does not work on a device that is lent; leave it out")
        key = secrets.token_hex(32)
        self._remote = RemoteListener(LOOPBACK, 0, key, False, config.heartbeat_timeout_s)
        connector = LeaseConnector(config, self._remote.make_connector(0))
        super().__init__(
            config, Placement([connector], cache(partial(load_tokenizer, config)), self._remote, None)
        )
        self._core_config = replace(
            config, core="local", data_parallel_address=LOOPBACK, data_parallel_key=key, data_parallel_rank=0
        )
        self._lend = lend
        self._seconds = seconds
        self._lease: asyncio.Task[None] | None = None  # the latest
        self._num_ready = 0  # cores that have become ready

    async def close(self) -> None:
        await super().close()
        if self._lease is not None:
            await asyncio.wait([self._lease])  # its process notices that the front is gone

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As Engine.generate.

        Raises:
            LeaseRefused: it was this request's turn to open a lease, and it got none.
        """
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        opening = asyncio.create_task(self._open_leases(), name=f"leases of {request_id}")
        opening.add_done_callback(lambda _: self._abort(request_id))
        try:
            async for output in super().generate(prompt, sampling_params, request_id, **options):
                if any(each.finish_reason == "abort" for each in output.outputs) and opening.done():
                    opening.result()
                yield output
        finally:
            opening.cancel()
            self._end_idle_lease_later()

    async def sleep(self, level: int = 1, *, drain: bool = True) -> bool:
        raise InvalidRequest("the device is lent for single requests; between them nothing is held")

    async def _open_leases(self) -> None:
        """Open leases, in turn with other requests, until cancelled.

        Raises:
            LeaseRefused: this request gets no device, or MAX_VAIN of its leases failed.
        """
        num_vain = 0
        while True:
            is_mine = self._lease is None or self._lease.done()
            if is_mine:
                num_ready = self._num_ready
                config = replace(self._core_config, data_parallel_rpc_port=self._remote.port)
                self._lease = asyncio.create_task(asyncio.to_thread(self._lend, config, self._seconds))
                self._lease.add_done_callback(lambda task: task.cancelled() or task.exception())  # as retrieved
            lease = self._lease
            assert lease is not None, "opened above"
            await asyncio.wait([lease])
            if not is_mine:
                continue
            if isinstance(error := lease.exception(), LeaseRefused):
                raise error
            if error is not None:
                logger.warning("a lease ended early: %r", error)
            num_vain = 0 if error is None and self._num_ready > num_ready else num_vain + 1
            if num_vain == MAX_VAIN:
                raise LeaseRefused(f"{MAX_VAIN} leases of {self._seconds:g} s ended before they were of use: {error}")
            await asyncio.sleep(0)  # another request that waits opens the next lease

    def _end_idle_lease_later(self) -> None:
        asyncio.get_running_loop().call_later(LINGER_S, self._end_idle_lease)

    def _end_idle_lease(self) -> None:
        connection = self.replicas[0].connection
        if connection is not None and not self._client.num_unfinished:
            connection.abort()

    def _note_ready(self, replica: Replica) -> None:
        super()._note_ready(replica)
        self._num_ready += 1
        self._end_idle_lease_later()  # its request may have been aborted meanwhile

    def _note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        super()._note_down(replica, cause, is_crash)
        if self.state == "restarting":  # requests wait for the next lease
            self._set_state("ready")
