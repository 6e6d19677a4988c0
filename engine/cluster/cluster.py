"""Cluster: serves an Engine with several replicas of its core; the counterpart of Supervisor for one core in this process.

    CoreClient ──send──▶ Cluster ──Router──▶ Replica ──Link──▶ core process
        ▲                  │  Journal          │
        └─────deliver──────┴────────receive────┘

The journal holds every unfinished request with its tokens. When a replica ends, its requests are sent to others, or wait
until one is ready, and continue exactly where they were: noise depends on seed, position and token alone.

A request that makes cores crash would take one replica after another with it. So requests that were running in a core
when it crashed run again one per replica until they produce a token; if the core crashes then, that request fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.actors.lag_gauge import watch_loop_lag
from engine.cluster.connection import Connector
from engine.cluster.core_host import first_cause
from engine.cluster.journal import NOWHERE, Entry, Journal
from engine.cluster.messages import Asleep
from engine.cluster.remote import RemoteListener
from engine.cluster.replica import Replica
from engine.cluster.router import Router
from engine.config import EngineConfig, ResolvedConfig
from engine.core_client import CoreClient
from engine.errors import EngineDead, EngineSleeping, InvalidRequest
from engine.input.input_processor import InputProcessor
from engine.input.tokenizer import Tokenizer
from engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    CoreInbox,
    CoreStats,
    Detail,
    KVEvents,
    NewTokens,
    PrefixCacheReset,
    Refused,
    ResetPrefixCache,
    Sleep,
    TakeSnapshot,
)
from engine.metrics import CORE_COUNTERS, Metrics, ReplicaStats
from engine.model import ModelConfig, read_eos_token_ids
from engine.outputs import EngineSnapshot, RequestView
from engine.supervisor import ASLEEP, MAX_SLEEP_LEVEL, EngineState

logger = logging.getLogger("troupe.engine")

DRAIN_POLL_S = 0.02
GAUGES = ("num_running", "num_open_steps", "num_blocks", "num_free_blocks", "num_cached_blocks")


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
        self._journal = Journal()
        self._router = Router(config.router_policy, config.block_size)
        self._waiting: deque[Entry] = deque()  # requests that no replica holds
        self._calls: deque[_Call] = deque()  # calls of the front that replicas have not all answered
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
            await self._wait(lambda: self.state != "starting" or all(r.state == "ready" for r in self.replicas))
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
                *(replica.index, replica.state, self._router.count_requests(replica.index)),
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
        entries = self._journal.list_held(index)
        replica.send(AbortRequest([handle for entry in entries for handle in entry.token_ids]))
        self._move(replica, entries)
        self._changed.set()

    async def undrain(self, index: int) -> None:
        """Give new requests to a drained replica again."""
        replica = self._find_replica(index)
        if replica.state == "draining":
            replica.state = "ready"
            self._place_waiting()

    async def restart(self, index: int) -> None:
        """Drain a replica, end its process, and return when the next one is ready."""
        replica = self._find_replica(index)
        await self.drain(index)
        num_restarts = replica.num_restarts
        replica.restart()
        await self._wait(
            lambda: replica.num_restarts > num_restarts and replica.state in ("ready", "dead")
        )

    def send(self, message: CoreInbox) -> None:
        """Pass a message of the front to the replicas that it concerns."""
        match message:
            case AddRequest():
                self._place(self._journal.add(message))
            case AbortRequest(handles=handles):
                self._abort(message, handles)
            case TakeSnapshot():
                self._call(message, EngineSnapshot)
            case ResetPrefixCache():
                self._call(message, PrefixCacheReset)
            case Sleep():
                raise AssertionError("sleep goes to the replicas directly")

    def _find_replica(self, index: int) -> Replica:
        if not 0 <= index < len(self.replicas):
            raise InvalidRequest(f"replica={index} must be from 0 to {len(self.replicas) - 1}", "replica")
        return self.replicas[index]

    async def _run(self) -> None:
        start = time.monotonic()
        await asyncio.to_thread(self._load_tokenizer)
        self.timeline.append(("tokenizer", time.monotonic() - start))
        client = CoreClient(self.send, self.tokenizer, self._metrics)
        self._client = client
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
        self._model_config = ModelConfig.from_pretrained(config.model)

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
        self._router.reset(replica.index)
        if self.state == "starting" and all(each.state == "ready" for each in self.replicas):
            self.client = self._client
            self._set_state("ready")
        elif self.state == "restarting":
            self._set_state("ready")
        self._place_waiting()
        self._changed.set()

    def _note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        """Move the requests of a core that has ended."""
        self._metrics.note_core_end(replica.stats)
        self._metrics.num_restarts += replica.state != "dead"
        self.error = f"replica {replica.index}: {cause}"
        for call in self._calls:
            call.parts.setdefault(replica.index, None)
        self._answer_calls()
        entries = self._journal.list_held(replica.index)
        if is_crash:
            entries = self._blame(entries, cause)
        if not any(each.state in ("ready", "draining") for each in self.replicas) and self.state == "ready":
            self._set_state("restarting")
        self._move(replica, entries)
        if all(each.state == "dead" for each in self.replicas):
            self._set_state("dead")
            self._client.fail_all(EngineDead(f"the engine crashed: {cause}"))
        self._changed.set()

    def _blame(self, entries: list[Entry], cause: str) -> list[Entry]:
        """Count a crash against the requests of the core. Returns those that may run again."""
        suspects = [entry for entry in entries if entry.num_crashes]
        if not suspects:
            for entry in entries:
                entry.num_crashes = 1
            return entries
        for entry in suspects:
            logger.error("request %s fails: two cores crashed on it", entry.message.request_id)
            error = f"the engine crashed twice while it ran this request: {cause}"
            self._end(list(entry.token_ids), Detail(0, finish_reason="error", error=error), entry)
        return [entry for entry in entries if entry not in suspects]

    def _move(self, replica: Replica, entries: list[Entry]) -> None:
        """Take requests from a replica and give them to others."""
        self._client.detokenizer.forget(replica.index)
        for entry in entries:
            self._release(entry)
            if entry.aborted:
                self._end(list(entry.aborted), Detail(0, finish_reason="abort"), entry)
        self._waiting.extendleft(entry for entry in reversed(entries) if entry.token_ids)
        self._place_waiting()

    def _place_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            entry = self._waiting.popleft()
            if entry.token_ids:
                self._place(entry)

    def _place(self, entry: Entry) -> None:
        """Give a request to a replica; without one it waits."""
        ready = [each.index for each in self.replicas if each.state == "ready"]
        if entry.num_crashes:
            held = {each.replica for each in self._journal.list_suspects()}
            ready = [index for index in ready if index not in held]
        if not ready:
            self._waiting.append(entry)
            return
        message = entry.make_message()
        entry.ticket = self._router.choose(message, ready)
        replica = self.replicas[entry.ticket.replica]
        if entry.fingerprint is not None:
            self._metrics.num_resumed += 1
            self._metrics.num_resumed_inexact += entry.fingerprint != replica.fingerprint
        entry.fingerprint = replica.fingerprint
        self._journal.assign(entry, replica.index)
        replica.send(message)

    def _release(self, entry: Entry) -> None:
        """Take a request from its replica's load."""
        if entry.ticket is not None:
            self._router.end(entry.ticket)
            entry.ticket = None
        if entry.replica != NOWHERE:
            self._journal.assign(entry, NOWHERE)

    def _end(self, handles: list[int], detail: Detail, entry: Entry) -> None:
        """End completions without an answer of a replica."""
        if not entry.is_accepted:
            entry.is_accepted = True
            self._client.deliver(Accepted(entry.message.completions[0].handle))
        ends = [
            Detail(handle, finish_reason=detail.finish_reason, error=detail.error) for handle in handles
        ]
        self._client.deliver(NewTokens(details=ends, source=NOWHERE))
        self._remove(handles)

    def _remove(self, handles: list[int]) -> None:
        is_suspect_gone = False
        for entry in self._journal.remove(handles):
            is_suspect_gone |= entry.num_crashes > 0
            self._release(entry)
        if is_suspect_gone:
            self._place_waiting()

    def _abort(self, message: AbortRequest, handles: Sequence[int]) -> None:
        by_replica: dict[int, list[int]] = {}
        for handle in handles:
            if (entry := self._journal.find(handle)) is not None:
                entry.aborted.add(handle)
                by_replica.setdefault(entry.replica, []).append(handle)
        for handle in by_replica.pop(NOWHERE, []):
            entry = self._journal.find(handle)
            assert entry is not None
            self._end([handle], Detail(0, finish_reason=message.finish_reason, error=message.error), entry)
        for index, held in by_replica.items():
            self.replicas[index].send(AbortRequest(held, message.finish_reason, message.error))

    def _receive(self, replica: Replica, message: Any) -> None:
        """Handle a message of a core."""
        match message:
            case NewTokens():
                self._pass_tokens(replica, message)
            case CoreStats():
                self._client.deliver(self._sum_stats(message))
            case KVEvents():
                self._router.note_events(replica.index, message)
            case Accepted(handle=handle):
                entry = self._journal.find(handle)
                if entry is not None and entry.replica == replica.index and not entry.is_accepted:
                    entry.is_accepted = True
                    self._client.deliver(message)
            case Refused():
                self._refuse(replica, message)
            case EngineSnapshot() | PrefixCacheReset():
                call = next(
                    each
                    for each in self._calls
                    if isinstance(message, each.reply_type) and replica.index not in each.parts
                )
                call.parts[replica.index] = message
                self._answer_calls()
            case Asleep():
                self._changed.set()

    def _pass_tokens(self, replica: Replica, message: NewTokens) -> None:
        message = self._journal.record(message, replica.index)
        self._client.deliver(message)
        if not message.details:
            return
        ended = []
        for detail in message.details:
            if detail.finish_reason is not None:
                ended.append(detail.handle)
            elif detail.queue_time_s is not None:
                entry = self._journal.find(detail.handle)
                assert entry is not None and entry.ticket is not None
                self._router.note_first_token(entry.ticket)
                if entry.num_crashes:
                    entry.num_crashes = 0
                    self._place_waiting()
        self._remove(ended)

    def _refuse(self, replica: Replica, message: Refused) -> None:
        entry = self._journal.find(message.handle)
        if entry is None or entry.replica != replica.index:
            return
        handles = list(entry.token_ids)
        if entry.is_accepted:  # an earlier replica had accepted it
            self._end(handles, Detail(0, finish_reason="error", error=message.message), entry)
        else:
            self._client.deliver(message)
            self._remove(handles)

    def _sum_stats(self, latest: CoreStats) -> CoreStats:
        """Return the sums over the running cores, with what the latest message measured."""
        stats = [replica.stats for replica in self.replicas]
        sums = {name: sum(getattr(each, name) for each in stats) for name in (*CORE_COUNTERS, *GAUGES)}
        return CoreStats(**sums, step_gaps_s=latest.step_gaps_s, mask_times_s=latest.mask_times_s)

    def _call(self, message: TakeSnapshot | ResetPrefixCache, reply_type: type) -> None:
        """Send a call to all running cores; the front gets one answer."""
        running = [each for each in self.replicas if each.state in ("ready", "draining")]
        self._calls.append(_Call(reply_type, [each.index for each in running]))
        for replica in running:
            replica.send(message)
        self._answer_calls()

    def _answer_calls(self) -> None:
        """Answer the calls of the front in their order."""
        while self._calls and self._calls[0].is_complete:
            call = self._calls.popleft()
            parts = [call.parts[index] for index in call.replicas if call.parts[index] is not None]
            if call.reply_type is PrefixCacheReset:
                self._client.deliver(PrefixCacheReset(all(part.is_reset for part in parts)))
            else:
                self._client.deliver(merge_snapshots(parts))


@dataclass(slots=True)
class _Call:
    """A call of the front to several replicas."""

    reply_type: type
    replicas: list[int]
    parts: dict[int, Any] = field(default_factory=dict)  # replies by replica; None if it ended

    @property
    def is_complete(self) -> bool:
        return all(index in self.parts for index in self.replicas)


def merge_snapshots(parts: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Return one snapshot of several caches; block ids are numbered through, cache after cache."""
    requests: list[RequestView] = []
    cached: list[int] = []
    num_blocks = 0
    for part in parts:
        offset = num_blocks
        requests += [
            replace(view, block_ids=tuple(block_id + offset for block_id in view.block_ids))
            for view in part.requests
        ]
        cached += [block_id + offset for block_id in part.cached_block_ids]
        num_blocks += part.num_blocks
    running_first = sorted(requests, key=lambda view: view.phase not in ("prefill", "decode"))
    return EngineSnapshot(
        tuple(running_first),
        num_blocks,
        parts[0].block_size if parts else 0,
        tuple(cached),
        sum(part.max_num_seqs for part in parts),
        sum(part.max_num_batched_tokens for part in parts),
    )
