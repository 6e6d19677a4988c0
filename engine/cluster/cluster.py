"""Cluster: serves an Engine with core processes; Supervisor does the same with one core in this process.

    CoreClient ──▶ Dispatcher ──▶ Replica ──Link──▶ core process

The dispatcher's journal holds every unfinished request with its tokens. When a replica ends, its requests are sent to
others, or wait until one is ready, and continue exactly: noise depends on seed, position and token alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.actors.lag_gauge import watch_loop_lag
from engine.cluster.connection import Connector
from engine.cluster.core_host import first_cause
from engine.cluster.dispatcher import Dispatcher
from engine.cluster.messages import Asleep
from engine.cluster.remote import RemoteListener
from engine.cluster.replica import Replica
from engine.cluster.router import Router
from engine.config import EngineConfig, ResolvedConfig
from engine.core_client import CoreClient
from engine.errors import EngineDead, EngineSleeping, InvalidRequest
from engine.input.input_processor import InputProcessor
from engine.input.tokenizer import Tokenizer
from engine.messages import Sleep
from engine.metrics import Metrics, ReplicaStats
from engine.model import ModelConfig, read_eos_token_ids, read_model_config
from engine.supervisor import ASLEEP, MAX_SLEEP_LEVEL, EngineState

logger = logging.getLogger("troupe.engine")

DRAIN_POLL_S = 0.02


class Cluster:
    """Has the interface of Supervisor."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: Metrics,
        connectors: Sequence[Connector],
        listener: RemoteListener | None = None,
    ) -> None:
        self.state: EngineState = "new"
        self.error: str | None = None
        self.client: CoreClient | None = None
        self.tokenizer: Tokenizer | None = None
        self.timeline: list[tuple[str, float]] = []
        self.input_processor: InputProcessor
        self.sleep_level = 0
        self.replicas = [
            Replica(
                *(index, connector, config.max_restarts),
                receive=self._receive,
                note_ready=self._note_ready,
                note_down=self._note_down,
            )
            for index, connector in enumerate(connectors)
        ]
        self.listener = listener  # accepts the replicas of other machines
        self._config = config
        self._metrics = metrics
        router = Router(config.router_policy, config.block_size)
        self._dispatcher = Dispatcher(self.replicas, router, metrics)
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # a replica's state, or the state of the cluster, has changed
        self._model_config: ModelConfig
        self._resolved: ResolvedConfig

    async def start(self) -> None:
        """Start all replicas. Returns when each of them accepts requests.

        Raises:
            ConfigError: a core does not accept the config.
            EngineDead: the engine was closed meanwhile.
        """
        if self._task is not None:
            raise RuntimeError("the engine was already started; create a new one")
        self.state = "starting"
        self._task = asyncio.create_task(self._run(), name="troupe cluster")
        try:
            await self._wait(
                lambda: self.state != "starting" or all(r.state == "ready" for r in self.replicas)
            )
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._task.done():
            if self.state == "closed":
                raise EngineDead("the engine was closed while it started")
            self.state = "dead"
            self._task.result()

    async def close(self) -> None:
        """End all replicas, and all requests with EngineDead. Safe to call twice."""
        self.state = "closed"
        self._changed.set()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.client is not None:
            self.client.fail_all(EngineDead("the engine was closed"))
            self.client = None

    @property
    def resolved(self) -> ResolvedConfig:
        """The config that the first replica resolved."""
        return self._resolved

    @property
    def model_config(self) -> ModelConfig:
        return self._model_config

    def describe_runtime(self) -> dict[str, str | int]:
        return self.replicas[0].runtime | {"replicas": sum(each.state == "ready" for each in self.replicas)}

    def describe_replicas(self) -> list[ReplicaStats]:
        return [
            ReplicaStats(
                *(replica.index, replica.state, self._dispatcher.router.count_requests(replica.index)),
                num_running=replica.stats.num_running,
                kv_usage=1 - replica.stats.num_free_blocks / max(1, replica.stats.num_blocks),
                num_queried_tokens=replica.stats.num_queried_tokens,
                num_hit_tokens=replica.stats.num_hit_tokens,
                num_restarts=replica.num_restarts,
                error=replica.error,
                fingerprint=replica.fingerprint,
            )
            for replica in self.replicas
        ]

    def require_client(self) -> CoreClient:
        """Return the client if a replica accepts requests.

        Raises:
            EngineSleeping, EngineDead: none does; the message gives the state and the cause.
        """
        if self.client is not None and self.state == "ready":
            return self.client
        if self.state in ASLEEP:
            raise EngineSleeping(f"the engine is {self.state.replace('_', ' ')} and accepts no requests")
        why = f" ({self.error})" if self.error else ""
        raise EngineDead(f"the engine is {self.state}{why}")

    async def sleep(self, level: int, drain: bool) -> bool:
        """See `Engine.sleep`; all replicas sleep."""
        if isinstance(level, bool) or level not in range(1, MAX_SLEEP_LEVEL + 1):
            raise InvalidRequest(f"level={level!r} must be an integer from 1 to {MAX_SLEEP_LEVEL}", "level")
        if self.state == "sleeping":
            if level == self.sleep_level:
                return True
            raise InvalidRequest(
                f"level={level}: the engine sleeps at level {self.sleep_level}; wake it up first", "level"
            )
        client = self.require_client()
        self._set_state("falling_asleep")
        try:
            if not drain:
                client.abort(list(client.streams))
            while not client.is_idle and self.state == "falling_asleep":  # noqa: ASYNC110
                await asyncio.sleep(DRAIN_POLL_S)
        except asyncio.CancelledError:
            if self.state == "falling_asleep":
                self._set_state("ready")
            raise
        if self.state != "falling_asleep":
            return False
        for replica in self.replicas:
            replica.send(Sleep(level))
        await self._wait(lambda: all(each.state in ("asleep", "dead") for each in self.replicas))
        self.sleep_level = level
        self._set_state("sleeping")
        return True

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
        if self.state == "falling_asleep" and not any(each.state == "asleep" for each in self.replicas):
            self._set_state("ready")
        if self.state == "ready":
            return
        if self.state != "sleeping":
            self.require_client()
        self._set_state("waking_up")
        for replica in self.replicas:
            if replica.state == "asleep":
                replica.wake_up()
        await self._wait(lambda: all(each.state in ("ready", "dead") for each in self.replicas))
        self.sleep_level = 0
        self._set_state("ready")

    async def drain(self, index: int) -> None:
        """Move a replica's requests to the others, and give it no new ones until `undrain`.

        Raises:
            InvalidRequest: there is no such replica, or no other replica is ready.
        """
        replica = self._find_replica(index)
        if not any(each.state == "ready" for each in self.replicas if each is not replica):
            raise InvalidRequest(f"replica {index} cannot be drained: no other replica is ready", "replica")
        if replica.state != "ready":
            return
        replica.state = "draining"
        self._dispatcher.empty(replica)
        await self._dispatcher.settle(replica)
        self._changed.set()

    async def undrain(self, index: int) -> None:
        """Give new requests to a drained replica again."""
        replica = self._find_replica(index)
        if replica.state == "draining":
            replica.state = "ready"
            self._dispatcher.place_waiting()

    async def restart(self, index: int) -> None:
        """Drain a replica, end its process, and return when the next one is ready."""
        replica = self._find_replica(index)
        await self.drain(index)
        num_restarts = replica.num_restarts
        replica.restart()
        await self._wait(lambda: replica.num_restarts > num_restarts and replica.state in ("ready", "dead"))

    def _find_replica(self, index: int) -> Replica:
        if not 0 <= index < len(self.replicas):
            raise InvalidRequest(f"replica={index} must be from 0 to {len(self.replicas) - 1}", "replica")
        return self.replicas[index]

    async def _run(self) -> None:
        start = time.monotonic()
        await asyncio.to_thread(self._load_tokenizer)
        self.timeline.append(("tokenizer", time.monotonic() - start))
        client = CoreClient(self._dispatcher.send, self.tokenizer, self._metrics)
        self._dispatcher.client = client
        try:
            if self.listener is not None:
                await self.listener.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(client.detokenizer.run(), name="detokenizer")
                tasks.create_task(watch_loop_lag(self._metrics.loop_lag), name="lag")
                for replica in self.replicas:
                    tasks.create_task(replica.run(), name=f"replica {replica.index}")
        except ExceptionGroup as group:
            cause = first_cause(group)
            client.fail_all(EngineDead(f"the engine crashed: {cause}"))
            self.error = f"{type(cause).__name__}: {cause}"
            if self.state != "closed":
                self.state = "dead"
            raise cause from None
        finally:
            if self.listener is not None:
                self.listener.close()
            client.fail_all(EngineDead("the engine was closed"))
            self.client = None
            self._changed.set()

    def _load_tokenizer(self) -> None:
        config = self._config
        if config.skip_tokenizer_init:
            self._eos_token_ids = read_eos_token_ids(config.model)
        else:
            self.tokenizer = Tokenizer(
                config.tokenizer or config.model, config.model if config.tokenizer else None
            )
            self._eos_token_ids = self.tokenizer.eos_token_ids
        self._model_config = read_model_config(config.model, config.model_impl)

    async def _wait(self, is_true: Callable[[], bool]) -> None:
        """Wait until the condition holds, or the cluster has ended."""
        assert self._task is not None
        while not is_true() and not self._task.done():
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, self._task], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    def _set_state(self, state: EngineState) -> None:
        if self.state != "closed":
            self.state = state
        self._changed.set()

    def _receive(self, replica: Replica, message: Any) -> None:
        if isinstance(message, Asleep):
            self._changed.set()
        else:
            self._dispatcher.receive(replica, message)

    def _note_ready(self, replica: Replica) -> None:
        assert replica.ready is not None
        if self.state == "starting" and not hasattr(self, "_resolved"):
            self._resolved = replica.ready.resolved
            self.timeline += replica.ready.timeline
            self.input_processor = InputProcessor(
                self.tokenizer,
                self._resolved.max_model_len,
                self._model_config.vocab_size,
                self._eos_token_ids,
            )
            for notice in self._resolved.notices:
                logger.warning("%s", notice)
        if self.state == "starting" and all(each.state == "ready" for each in self.replicas):
            self.client = self._dispatcher.client
            self._set_state("ready")
        elif self.state == "restarting":
            self._set_state("ready")
        self._dispatcher.note_ready(replica)
        self._changed.set()

    def _note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        self._metrics.num_restarts += replica.state != "dead"
        self.error = f"replica {replica.index}: {cause}"
        if not any(each.state in ("ready", "draining") for each in self.replicas) and self.state == "ready":
            self._set_state("restarting")
        self._dispatcher.note_down(replica, cause, is_crash)
        if all(each.state == "dead" for each in self.replicas):
            self._set_state("dead")
            self._dispatcher.client.fail_all(EngineDead(f"the engine crashed: {cause}"))
        self._changed.set()
