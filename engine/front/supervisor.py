"""Supervisor: loads the tokenizer, starts and watches the replicas; sleep, wake-up and drain.

    Client ──▶ Replica ──▶ core in this process, in one of its own, or on another machine

    start ─▶ "starting" ─▶ "ready" ──no replica runs──▶ "restarting" ─▶ "ready" ... ─▶ "dead" after too many crashes
                              ├──close──▶ "closed"
                              └──sleep──▶ "falling_asleep" ─▶ "sleeping" ──wake_up──▶ "waking_up" ─▶ "ready"

The Client holds every unfinished request with its tokens. When a core ends, its requests are sent to another one and
continue exactly: noise depends on seed, position and token alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from engine.cluster.core_host import describe_error, first_cause
from engine.cluster.placement import Placement, place_cores
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineSleeping, InvalidRequest
from engine.front.client import Client
from engine.front.journal_file import JournalFile
from engine.front.replica import Replica
from engine.front.router import Router
from engine.input.images.intake import ImageIntake, make_intake
from engine.input.input_processor import InputProcessor
from engine.input.tokenizer import Tokenizer
from engine.kv_transfer_config import DEFAULT_MIN_PREFILL
from engine.messages import CoreStats, Sleep
from engine.metrics import Histogram, Metrics, ReplicaStats
from engine.model import ModelConfig, read_model_config
from engine.model.implementation import EncoderConfig
from engine.resolved_config import ResolvedConfig
from engine.wire.link_messages import Asleep, CoreFailed

logger = logging.getLogger("troupe.engine")

EngineState = Literal[
    "new", "starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed"
]
ASLEEP: tuple[EngineState, ...] = ("falling_asleep", "sleeping", "waking_up")
MAX_SLEEP_LEVEL = 2
LAG_PERIOD_S = 0.1
DRAIN_POLL_S = 0.02  # interval at which a sleep checks whether the requests have ended


class Supervisor:
    """The cores of an engine, from start to close. `Engine` adds requests."""

    def __init__(self, config: EngineConfig | None = None, placement: Placement | None = None) -> None:
        self.config = config = config or EngineConfig()
        self.state: EngineState = "new"
        self.error: str | None = None  # cause of the last crash
        self.tokenizer: Tokenizer | None = None
        self.eos_token_ids: tuple[int, ...]
        self.model_config: ModelConfig  # available once the engine has started
        self.timeline: list[tuple[str, float]] = []  # start-up phases and their durations in seconds
        self.sleep_level = 0  # the level passed to `sleep`; 0 while the engine is awake
        connectors, self._load_tokenizer, self.listener, self._store = placement or place_cores(config)
        self.replicas: list[Replica] = []
        self._metrics = Metrics()
        transfer = config.read_kv_transfer()
        self._client = Client(
            self.replicas, Router(config.router_policy, config.block_size), self._metrics,
            DEFAULT_MIN_PREFILL if transfer is None else transfer.min_prefill_tokens,
        )
        self.replicas += [
            Replica(
                *(index, connector, config.max_restarts), receive=self._client.receive,
                note_state=self._note_state, note_ready=self._note_ready, note_down=self._note_down,
            )
            for index, connector in enumerate(connectors)
        ]
        self._input_processor: InputProcessor
        self._images: ImageIntake | None = None  # None: the model does not see images
        self._resolved: ResolvedConfig | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # the state of the engine or of a replica has changed
        self._draining: object | None = None  # identifies the sleep that waits for the requests to end
        self._target_level = 0  # of sleep; replicas that become ready must reach it

    async def start(self) -> None:
        """Load the model and start the actors. Returns when the engine accepts requests.

        Raises:
            ConfigError: the config, the checkpoint, an adapter or the available memory does not allow it.
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
        """End all requests with EngineDead, and every task and thread but that of a hung step. Safe to call twice."""
        self._set_state("closed")
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def resolved(self) -> ResolvedConfig:
        """The config with every "auto" filled in; available once the engine has started."""
        assert self._resolved is not None, "the engine has not started"
        return self._resolved

    @property
    def refusal(self) -> str:
        """Why the model generates no text, as encoders do not; "": it does, or it is not read yet."""
        config = getattr(self, "model_config", None)
        return config.refusal if isinstance(config, EncoderConfig) else ""

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images; False until the engine has started."""
        return self._images is not None

    def describe_runtime(self) -> dict[str, str | int]:
        """Return which ops steps use now, and the progress of native ops and recorded graphs."""
        runtime = self.replicas[0].runtime
        if len(self.replicas) > 1:
            runtime = runtime | {"replicas": sum(each.state == "ready" for each in self.replicas)}
        return runtime

    def count_serving(self) -> int:
        """Return how many replicas compute answers, at least 1: those that restart count, dead ones do not."""
        return max(1, sum(each.state != "dead" and not each.is_prefill_only for each in self.replicas))

    def replica_stats(self) -> dict[int, CoreStats]:
        return {each.index: self._metrics.add_ended(each.stats, each.index) for each in self.replicas}

    def describe_replicas(self) -> list[ReplicaStats]:
        return [
            ReplicaStats(
                *(replica.index, replica.state, self._client.router.count_requests(replica.index)),
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

    def _require_client(self) -> Client:
        """Return the client if a replica accepts requests."""
        if self.state == "ready":
            return self._client
        if self.state in ASLEEP:
            raise EngineSleeping(f"the engine is {self.state.replace('_', ' ')} and accepts no requests")
        why = f" ({self.error})" if self.error else ""
        raise EngineDead(f"the engine is {self.state}{why}")

    async def sleep(self, level: int = 1, *, drain: bool = True) -> bool:
        """Free the memory of the KV cache and of the weights until `wake_up`. New requests raise EngineSleeping.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, and `wake_up` reads them again.
            drain: wait until the running requests have ended; otherwise abort them.

        Returns False if `wake_up` was called while the requests drained.

        Raises:
            InvalidRequest: the level is not 1 or 2, or the engine sleeps at the other level.
            EngineSleeping: the engine is falling asleep or waking up.
            EngineDead: the engine is not running, or it crashed meanwhile.
        """
        if isinstance(level, bool) or level not in range(1, MAX_SLEEP_LEVEL + 1):
            raise InvalidRequest(f"level={level!r} must be an integer from 1 to {MAX_SLEEP_LEVEL}", "level")
        if self.state == "sleeping":
            if level == self.sleep_level:
                return True
            raise InvalidRequest(
                f"level={level}: the engine sleeps at level {self.sleep_level}; wake it up first", "level"
            )
        client = self._require_client()
        self._set_state("falling_asleep")
        if not drain:
            client.abort_all()
        if not await self._drain():
            return False
        self._target_level = level
        for replica in self.replicas:
            replica.send(Sleep(level))
        await self._wait(lambda: self.state != "falling_asleep")
        self._require_running("could sleep")
        return True

    async def wake_up(self) -> None:
        """End a sleep. Returns when the engine accepts requests, at once if it is awake. Cancels a sleep that drains.

        Raises:
            EngineSleeping: another call is waking the engine up.
            EngineDead: the engine is not running, or it failed to wake up and is still asleep.
        """
        if self._draining is not None:
            self._draining = None
            self._set_state("ready")
        if self.state == "ready":
            return
        if self.state != "sleeping":
            self._require_client()
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

    async def drain_replica(self, index: int) -> None:
        """Move a replica's requests to the others, where they continue, and give it no new ones.

        Raises:
            InvalidRequest: there is no such replica, or no other replica is ready.
        """
        replica = self._find_replica(index)
        if not any(each.state == "ready" for each in self.replicas if each is not replica):
            raise InvalidRequest(f"replica {index} cannot be drained: no other replica is ready", "replica")
        if replica.state != "ready":
            return
        replica.state = "draining"
        self._client.empty(replica)
        with suppress(EngineDead):
            await self._client.calls.settle(replica)
        self._changed.set()

    async def undrain_replica(self, index: int) -> None:
        """Give new requests to a drained replica again."""
        replica = self._find_replica(index)
        if replica.state == "draining":
            replica.state = "ready"
            self._client.waiting.place_all()

    async def restart_replica(self, index: int) -> None:
        """Drain a replica, end its core, and return when the next one is ready. A dead replica starts again.

        Raises:
            InvalidRequest: there is no such replica, or no other one is ready.
        """
        replica = self._find_replica(index)
        await self.drain_replica(index)
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
        if self.listener is not None:
            await self.listener.start()
        if self.config.journal is not None:
            self._client.journal_file = await asyncio.to_thread(JournalFile, self.config)
        end = EngineDead("the engine was closed")
        try:
            async with asyncio.TaskGroup() as tasks:
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
            if self._images is not None:
                self._images.close()
            self._client.fail_all(end)
            if self._client.journal_file is not None:
                self._client.journal_file.close()
            self._changed.set()

    def _read_model(self) -> None:
        self.tokenizer, self.eos_token_ids = self._load_tokenizer()
        self.model_config = read_model_config(
            self.config.model, self.config.model_impl, self.config.read_hf_overrides()
        )
        self._images = make_intake(self.config, self.model_config, self.tokenizer)

    async def _drain(self) -> bool:
        """Wait until the requests have ended. Returns False if `wake_up` was called meanwhile."""
        this = self._draining = object()
        try:
            # Polled, because requests end in many places and sleeps are rare.
            while self._draining is this and self._client.num_unfinished and self.state == "falling_asleep":  # noqa: ASYNC110
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

    def _note_state(self, replica: Replica, message: Asleep | CoreFailed) -> None:
        match message:
            case Asleep():
                self._client.note_end(replica)
                self._note_change()
            case CoreFailed(message=cause):
                self.error = cause
                if not any(each.is_up for each in self.replicas):
                    self._client.fail_all(EngineDead(f"the engine hangs: {cause}"))

    def _note_ready(self, replica: Replica) -> None:
        assert replica.ready is not None
        if self._resolved is None:
            self._resolved = replica.ready.resolved
            if self._client.journal_file is not None:
                self._client.journal_file.begin(replica.fingerprint)
            self.timeline += replica.ready.timeline
            transfer = self.config.read_kv_transfer()
            self._input_processor = InputProcessor(
                self.tokenizer, self._resolved.max_model_len, self.model_config.vocab_size,
                self.eos_token_ids, self._images, self.config.max_logprobs,
                uses_predictions=self._resolved.speculative is not None,
                saves_blocks=transfer is not None and transfer.saves,
                refusal=self.refusal,
            )
            for notice in self._resolved.notices:
                logger.warning("%s", notice)
        elif replica.ready.resolved.max_model_len != self._resolved.max_model_len:
            logger.warning("replica %d: its max_model_len differs from the first one's", replica.index)
        self._metrics.num_restarts = sum(each.num_restarts for each in self.replicas)
        if self._target_level:
            replica.send(Sleep(self._target_level))
        elif self.state == "restarting" or (
            self.state == "starting" and all(each.state == "ready" for each in self.replicas)
        ):
            self._set_state("ready")
        self._client.note_ready(replica)
        self._note_change()

    def _note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        self.error = cause if len(self.replicas) == 1 else f"replica {replica.index}: {cause}"
        if self.state == "ready" and not any(each.is_up for each in self.replicas):
            self._set_state("restarting")
        self._client.note_down(replica, cause, is_crash)
        if all(each.state == "dead" for each in self.replicas):
            self._set_state("dead")
            self._client.fail_all(EngineDead(f"the engine crashed: {cause}"))
        self._note_change()


async def watch_loop_lag(lag: Histogram) -> None:
    """Sleep repeatedly and record in `lag` by how many seconds each wake-up was late, until cancelled."""
    while True:
        due = time.monotonic() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag.observe(max(0.0, time.monotonic() - due))
