"""Supervisor: loads the tokenizer, starts the replicas, and implements sleep, wake-up and drain.

    CoreClient ──▶ Dispatcher ──▶ Replica ──▶ core in this process, in one of its own, or on another machine

    start ─▶ "starting" ─▶ "ready" ──no replica runs──▶ "restarting" ─▶ "ready" ... ─▶ "dead" after too many crashes
                              ├──close──▶ "closed"
                              └──sleep──▶ "falling_asleep" ─▶ "sleeping" ──wake_up──▶ "waking_up" ─▶ "ready"

The dispatcher's journal holds every unfinished request with its tokens. When a core ends, its requests are sent to
another one and continue exactly: noise depends on seed, position and token alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from engine.actors.lag_gauge import watch_loop_lag
from engine.cluster.connection import Connector
from engine.cluster.core_host import LoadTokenizer, describe_error, first_cause
from engine.cluster.dispatcher import Dispatcher
from engine.cluster.journal_file import JournalFile
from engine.cluster.messages import Asleep, StepHangs
from engine.cluster.prefills import Prefills
from engine.cluster.ray_placement import RayPlacement
from engine.cluster.remote import RemoteListener
from engine.cluster.replica import Replica
from engine.cluster.router import Router
from engine.config import EngineConfig
from engine.core_client import CoreClient
from engine.errors import EngineDead, EngineSleeping, InvalidRequest
from engine.input.images.intake import ImageIntake, make_intake
from engine.input.input_processor import InputProcessor
from engine.input.tokenizer import Tokenizer
from engine.messages import Sleep
from engine.metrics import Metrics, ReplicaStats
from engine.model import ModelConfig, read_model_config
from engine.resolved_config import ResolvedConfig
from engine.transfer.config import DEFAULT_MIN_PREFILL

logger = logging.getLogger("troupe.engine")

EngineState = Literal[
    "new", "starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed"
]
ASLEEP: tuple[EngineState, ...] = ("falling_asleep", "sleeping", "waking_up")
MAX_SLEEP_LEVEL = 2
DRAIN_POLL_S = 0.02  # interval at which a sleep checks whether the requests have ended


class SharedStore(Protocol):
    """A store of KV blocks that the front has opened for its cores."""

    def close(self) -> None:
        """Free it; called when the cores have ended."""


class Supervisor:
    """`client` is set from the first start to the end."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: Metrics,
        connectors: Sequence[Connector],
        load_tokenizer: LoadTokenizer,
        listener: RemoteListener | RayPlacement | None = None,
        store: SharedStore | None = None,
    ) -> None:
        self.state: EngineState = "new"
        self.error: str | None = None  # cause of the last crash
        self.client: CoreClient | None = None
        self.tokenizer: Tokenizer | None = None
        self.eos_token_ids: tuple[int, ...]
        self.timeline: list[tuple[str, float]] = []  # start-up phases, seconds
        self.input_processor: InputProcessor
        self.sleep_level = 0  # 0 while the engine is awake
        self.replicas = [
            Replica(
                *(index, connector, config.max_restarts),
                receive=self._receive,
                note_ready=self._note_ready,
                note_down=self._note_down,
            )
            for index, connector in enumerate(connectors)
        ]
        self._store = store  # of KV blocks; closed at the end
        self.listener = listener  # accepts what runs on other machines, or starts it
        router, transfer = Router(config.router_policy, config.block_size), config.read_kv_transfer()
        prefills = Prefills(router, DEFAULT_MIN_PREFILL if transfer is None else transfer.min_prefill_tokens)
        self.dispatcher = Dispatcher(self.replicas, router, metrics, prefills)
        self._config = config
        self._metrics = metrics
        self._load_tokenizer = load_tokenizer
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # the state of the engine or of a replica has changed
        self._draining: object | None = None  # identifies the sleep that waits for the requests to end
        self._target_level = 0  # of sleep; replicas that become ready must reach it
        self._model_config: ModelConfig
        self.images: ImageIntake | None = None  # None: the model does not see images
        self._resolved: ResolvedConfig | None = None

    async def start(self) -> None:
        """Start all replicas. Returns when each of them accepts requests.

        Raises:
            ConfigError: see `Engine.start`.
            EngineDead: the engine was closed meanwhile, or a replica could not start.
        """
        if self._task is not None:
            raise RuntimeError("the engine was already started; create a new one")
        self.state = "starting"
        self._task = asyncio.create_task(self._run(), name="troupe supervisor")
        if (store := self._store) is not None:
            self._task.add_done_callback(lambda _: store.close())
        try:
            await self._wait(
                lambda: self.state != "starting" or all(each.state == "ready" for each in self.replicas)
            )
        except asyncio.CancelledError:
            await self.close()
            raise
        if self.state == "closed":
            raise EngineDead("the engine was closed while it started")
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """End all requests with EngineDead, and all replicas. Safe to call twice.

        Every task and thread ends, except the daemon thread of a hung step.
        """
        self._set_state("closed")
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def resolved(self) -> ResolvedConfig:
        """The config that the first replica resolved; available once the engine has started."""
        assert self._resolved is not None, "the engine has not started"
        return self._resolved

    @property
    def model_config(self) -> ModelConfig:
        return self._model_config

    def describe_runtime(self) -> dict[str, str | int]:
        runtime = self.replicas[0].runtime
        if len(self.replicas) > 1:
            runtime = runtime | {"replicas": sum(each.state == "ready" for each in self.replicas)}
        return runtime

    def count_serving(self) -> int:
        """Return how many replicas compute answers, at least 1: those that restart count, dead ones do not."""
        return max(1, sum(each.state != "dead" and not each.is_prefill_only for each in self.replicas))

    def describe_replicas(self) -> list[ReplicaStats]:
        return [
            ReplicaStats(
                *(replica.index, replica.state, self.dispatcher.router.count_requests(replica.index)),
                num_running=replica.stats.num_running,
                kv_usage=1 - replica.stats.num_free_blocks / max(1, replica.stats.num_blocks),
                num_queried_tokens=replica.stats.prefix_cache_queries,
                num_hit_tokens=replica.stats.prefix_cache_hits,
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
        """See `Engine.sleep`. Returns False if `wake_up` was called meanwhile."""
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
        if not drain:
            client.abort(list(client.streams))
        if not await self._drain(client):
            return False
        self._target_level = level
        for replica in self.replicas:
            replica.send(Sleep(level))
        await self._wait(lambda: self.state != "falling_asleep")
        self._require_running("could sleep")
        return True

    async def wake_up(self) -> None:
        """See `Engine.wake_up`. A sleep that still drains is cancelled."""
        if self._draining is not None:
            self._draining = None
            self._set_state("ready")
        if self.state == "ready":
            return
        if self.state != "sleeping":
            self.require_client()
        self.error = None
        self._target_level = 0
        self._set_state("waking_up")
        for replica in self.replicas:
            if replica.state == "asleep":
                replica.wake_up()
        await self._wait(lambda: self.state != "waking_up")
        self._require_running("could wake up")
        if self.state == "sleeping":
            raise EngineDead(f"the engine failed to wake up and is still asleep: {self.error}")

    def _note_change(self) -> None:
        """End a sleep or a wake-up that all replicas have reached, whether or not its caller still waits for it."""
        asleep = [each for each in self.replicas if each.state == "asleep"]
        is_quiet = all(each.state in ("asleep", "dead") for each in self.replicas)
        if self.state == "falling_asleep" and self._target_level and is_quiet:
            self.sleep_level, self.state = self._target_level, "sleeping"
        elif self.state == "waking_up" and all(each.state != "starting" for each in self.replicas):
            if is_quiet and asleep:
                self.error, self._target_level, self.state = asleep[0].error, self.sleep_level, "sleeping"
            else:
                for replica in asleep:
                    replica.restart()
                self.sleep_level, self.state = 0, "ready"
        self._changed.set()

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
        self.dispatcher.empty(replica)
        await self.dispatcher.settle(replica)
        self._changed.set()

    async def undrain(self, index: int) -> None:
        """Give new requests to a drained replica again."""
        replica = self._find_replica(index)
        if replica.state == "draining":
            replica.state = "ready"
            self.dispatcher.place_waiting()

    async def restart(self, index: int) -> None:
        """Drain a replica, end its core, and return when the next one is ready. A dead replica starts again.

        Raises:
            InvalidRequest: there is no such replica, or no other one is ready.
        """
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
        await asyncio.to_thread(self._read_model)
        self.timeline.append(("tokenizer", time.monotonic() - start))
        self._make_client()
        if self.listener is not None:
            await self.listener.start()
        if self._config.journal is not None:
            self.dispatcher.journal_file = await asyncio.to_thread(JournalFile, self._config)
        end = EngineDead("the engine was closed")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._run_front(), name="front")
                tasks.create_task(watch_loop_lag(self._metrics.loop_lag), name="lag")
                for replica in self.replicas:
                    tasks.create_task(replica.run(), name=f"replica {replica.index}")
        except ExceptionGroup as group:
            cause = first_cause(group)
            self.error, end = describe_error(cause), EngineDead(f"the engine crashed: {cause}")
            self._set_state("dead")
            raise cause from None
        finally:
            if self.listener is not None:
                self.listener.close()
            if self.images is not None:
                self.images.close()
            self.dispatcher.fail_all(end)
            if self.dispatcher.journal_file is not None:
                self.dispatcher.journal_file.close()
            self.client = None
            self._changed.set()

    def _read_model(self) -> None:
        self.tokenizer, self.eos_token_ids = self._load_tokenizer()
        self._model_config = read_model_config(
            self._config.model, self._config.model_impl, self._config.read_hf_overrides()
        )
        self.images = make_intake(self._config, self._model_config, self.tokenizer)

    async def _run_front(self) -> None:
        """Run the detokenizer. If it crashes, all requests fail, and the next one serves the same cores."""
        while True:
            try:
                await self.dispatcher.client.detokenizer.run()
            except Exception as error:  # the border of an actor: logged, and sent on to the streams
                logger.error("the detokenizer crashed: %r", error, exc_info=error)
                self.dispatcher.fail_all(EngineDead(f"the engine crashed: {error}"))
                self._make_client()

    def _make_client(self) -> None:
        client = CoreClient(self.dispatcher.send, self.dispatcher.call, self.tokenizer, self._metrics)
        self.dispatcher.client = client
        if self.client is not None:
            self.client = client

    async def _drain(self, client: CoreClient) -> bool:
        """Wait until the requests have ended. Returns False if `wake_up` was called meanwhile."""
        this = self._draining = object()
        try:
            # Polled, because requests end in many places and sleeps are rare.
            while self._draining is this and not client.is_idle and self.state == "falling_asleep":  # noqa: ASYNC110
                await asyncio.sleep(DRAIN_POLL_S)
        except asyncio.CancelledError:
            if self._draining is this:
                self._draining = None
                self._set_state("ready")
            raise
        if self._draining is not this:
            return False
        self._draining = None
        self._require_running("could sleep")
        return True

    def _require_running(self, what: str) -> None:
        """Raise EngineDead if the engine ended before it could do this."""
        if self.state == "closed":
            raise EngineDead(f"the engine was closed before it {what}")
        if self.state == "dead":
            raise EngineDead(f"the engine crashed before it {what}: {self.error}")

    async def _wait(self, is_true: Callable[[], bool]) -> None:
        """Wait until the condition holds, or the engine has ended."""
        assert self._task is not None
        while not is_true() and not self._task.done() and self.state not in ("closed", "dead"):
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, self._task], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    def _set_state(self, state: EngineState) -> None:
        if self.state != "closed":
            self.state = state
        self._changed.set()

    def _receive(self, replica: Replica, message: Any) -> None:
        match message:
            case Asleep():
                self.dispatcher.note_end(replica)
                self._note_change()
            case StepHangs(message=cause):
                self.error = cause
                if not any(each.is_up for each in self.replicas):
                    self.dispatcher.fail_all(EngineDead(f"the engine hangs: {cause}"))
            case _:
                self.dispatcher.receive(replica, message)

    def _note_ready(self, replica: Replica) -> None:
        assert replica.ready is not None
        if self._resolved is None:
            self._resolved = replica.ready.resolved
            if self.dispatcher.journal_file is not None:
                self.dispatcher.journal_file.begin(replica.fingerprint)
            self.timeline += replica.ready.timeline
            self.input_processor = InputProcessor(
                self.tokenizer,
                self._resolved.max_model_len,
                self._model_config.vocab_size,
                self.eos_token_ids,
                self.images,
                self._config.max_logprobs,
            )
            for notice in self._resolved.notices:
                logger.warning("%s", notice)
        elif replica.ready.resolved.max_model_len != self._resolved.max_model_len:
            logger.warning("replica %d: its max_model_len differs from the first one's", replica.index)
        self._metrics.num_restarts = sum(each.num_restarts for each in self.replicas)
        if self._target_level:
            replica.send(Sleep(self._target_level))
        elif self.state == "starting" and all(each.state == "ready" for each in self.replicas):
            self.client = self.dispatcher.client
            self._set_state("ready")
        elif self.state == "restarting":
            self._set_state("ready")
        self.dispatcher.note_ready(replica)
        self._note_change()

    def _note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        self.error = cause if len(self.replicas) == 1 else f"replica {replica.index}: {cause}"
        if self.state == "ready" and not any(each.is_up for each in self.replicas):
            self._set_state("restarting")
        self.dispatcher.note_down(replica, cause, is_crash)
        if all(each.state == "dead" for each in self.replicas):
            self._set_state("dead")
            self.dispatcher.fail_all(EngineDead(f"the engine crashed: {cause}"))
        self._note_change()
