"""Simulator: the Scheduler, the KV cache and the Router of this engine under a virtual clock.

    arrivals ──Router──▶ Scheduler of replica 0 ──StepPlan──▶ StepTable: when the step ends
                         Scheduler of replica 1 ...

Nothing is computed, so hours of a large cluster take seconds. A step takes what a table of measured steps says.
A crash moves the replica's requests with their tokens to the others, as the Client does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from engine.config import EngineConfig
from engine.config_fields import RouterPolicy
from engine.core.actor_messages import StepDone, StepPlan
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import InvalidRequest
from engine.front.router import Router, Ticket
from engine.kv_cache_spec import KVCacheSpec
from engine.messages import AddRequest, Detail, KVEvents, NewCompletion, NewTokens
from engine.resolved_config import ResolvedConfig, WorkerConfig, resolve_config
from engine.sampling_params import SamplingParams
from engine.simulation.step_table import StepSize, StepTable

NOTICE_S = 0.1  # from a crash until the other replicas have the requests
TOKEN_ID = 0  # of every output token
NEVER = -1.0
DEFAULT_NUM_BLOCKS = 2**16
LONGEST = 2**24

SimulatedPolicy = RouterPolicy | Literal["random"]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of a trace."""

    arrival_s: float
    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Crashes:
    """Replicas that end at random times.

    Attributes:
        rate: crashes per replica and second; 0: none.
        restart_s: how long a replica is away.
    """

    rate: float = 0.0
    restart_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PrefillReplicas:
    """Replicas that compute long prompts for the others, see `kv_transfer_config`.

    Attributes:
        count: how many of the replicas.
        transfer_s: seconds that the blocks of one token take to the other replica. Those of all chunks but the last
            travel while the next one is computed.
        min_tokens: fewest uncached prompt tokens for which they are used.
    """

    count: int = 0
    transfer_s: float = 0.0
    min_tokens: int = 256


@dataclass(slots=True)
class SimulatedRun:
    """Result of a simulation. Arrays with N values are in the order of the trace."""

    ttfts: np.ndarray  # [N] seconds from arrival to first token
    ends: np.ndarray  # [N] seconds from the start of the trace to the last token
    itls: np.ndarray  # [output tokens after the first] seconds between two tokens of a request
    num_output_tokens: int = 0
    num_hit_tokens: int = 0  # of prompts, found in the replicas' prefix caches at the first admission
    num_oracle_tokens: int = 0  # of prompts, that one unlimited cache of all replicas would have found
    load_ratio: float = 1.0  # requests of the fullest replica over the mean, both averaged over time
    num_crashes: int = 0
    num_resumed: int = 0
    num_preemptions: int = 0
    num_prefills: int = 0  # prompts that a prefill replica computed

    @property
    def seconds(self) -> float:
        return float(self.ends.max())


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    message: AddRequest
    ticket: Ticket | None = None  # None: no replica has it
    is_prefilled: bool = False  # a prefill replica has been asked to compute the prompt
    request: Request | None = None  # the scheduler's state of it


class _Replica:
    """A scheduler, and when its executor will have done all planned steps."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_up = False
        self.busy_until = 0.0
        self.handles: set[int] = set()
        self.kv_cache: KVCacheManager
        self.scheduler: Scheduler

    def start(self, resolved: ResolvedConfig, clock: Callable[[], float]) -> None:
        self.is_up = True
        self.kv_cache = KVCacheManager(resolved.cache)
        self.kv_cache.pool.changes = {}
        self.scheduler = Scheduler(resolved.scheduler, self.kv_cache, (), clock)


class Simulator:
    """Runs one trace.

    Args:
        config: of each replica; its model is not read, so `num_blocks` and `max_model_len` should be given.
        policy: of the router; "random" serves for comparisons.
    """

    def __init__(
        self, config: EngineConfig, table: StepTable, num_replicas: int,
        policy: SimulatedPolicy = "prefix_aware", crashes: Crashes | None = None, seed: int = 0,
        prefills: PrefillReplicas | None = None,
    ) -> None:
        self._prefills = prefills or PrefillReplicas()
        self._prefill_tickets: dict[int, Ticket] = {}  # by handle of the prefill, which is negative
        self._now = 0.0
        self._resolved = _resolve(config)
        self._router = Router("round_robin" if policy == "random" else policy, config.block_size)
        self._table = table
        self._is_random = policy == "random"
        self._crashes = crashes or Crashes()
        self._chance = random.Random(seed)
        self._replicas = [_Replica(index) for index in range(num_replicas)]
        self._live: dict[int, _Live] = {}
        self._waiting: list[int] = []  # handles of requests without a replica
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # of events at the same time
        self._known_hashes: set[bytes] = set()  # of blocks that any replica has computed
        self._gaps: list[np.ndarray] = []
        self._max_load_area = self._sum_load_area = 0.0  # requests x seconds

    def run(self, requests: Sequence[SimulatedRequest]) -> SimulatedRun:
        """Simulate until the last request has ended. The requests are in the order of their arrivals.

        Raises:
            InvalidRequest: a request is longer than the model or the cache.
        """
        longest = self._resolved.max_model_len
        for index, each in enumerate(requests):
            if len(each.prompt_token_ids) + each.max_tokens > longest:
                raise InvalidRequest(
                    f"request {index + 1} has {len(each.prompt_token_ids)} + {each.max_tokens} tokens, and "
                    f"max_model_len={longest}, which num_blocks limits"
                )
        self._requests = requests
        num = self._num_left = len(requests)
        self._result = SimulatedRun(np.zeros(num), np.zeros(num), np.zeros(0))
        self._arrivals = np.array([each.arrival_s for each in requests])
        self._last_tokens = np.full(num, NEVER)  # time of each request's last token
        for replica in self._replicas:
            self._start(replica)
        if num:
            self._plan(requests[0].arrival_s, partial(self._arrive, 0))
        while self._num_left:
            time, _, act = heapq.heappop(self._events)
            self._move_clock(time)
            act()
        return self._summarise()

    def _summarise(self) -> SimulatedRun:
        result = self._result
        for replica in self._replicas:
            self._count(replica)
        result.itls = np.concatenate(self._gaps) if self._gaps else np.zeros(0)
        result.ttfts += self._table.front_s
        if self._sum_load_area:
            result.load_ratio = self._max_load_area * len(self._replicas) / self._sum_load_area
        return result

    def _count(self, replica: _Replica) -> None:
        if replica.is_up:
            self._result.num_preemptions += replica.scheduler.state.num_preemptions

    def _plan(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def _move_clock(self, time: float) -> None:
        passed = time - self._now
        if passed > 0:
            loads = [len(each.handles) for each in self._replicas]
            self._max_load_area += max(loads) * passed
            self._sum_load_area += sum(loads) * passed
        self._now = time

    def _start(self, replica: _Replica) -> None:
        replica.start(self._resolved, lambda: self._now)
        replica.busy_until = self._now
        self._router.reset(replica.index)
        if self._crashes.rate:
            self._plan(
                self._now + self._chance.expovariate(self._crashes.rate), partial(self._crash, replica)
            )
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            self._place(handle)

    def _crash(self, replica: _Replica) -> None:
        """End a replica. Its requests continue elsewhere after the tokens that they have."""
        self._count(replica)
        replica.is_up = False
        self._result.num_crashes += 1
        handles, replica.handles = sorted(replica.handles), set()
        for handle in handles:
            if handle < 0:
                self._router.end(self._prefill_tickets.pop(handle))
                self._plan(self._now + NOTICE_S, partial(self._place, -1 - handle))
                continue
            live = self._live[handle]
            assert live.ticket is not None and live.request is not None
            self._router.end(live.ticket)
            tokens = [TOKEN_ID] * live.request.num_output_tokens
            live.message = _make_message(handle, live.message.prompt_token_ids, live.message.params, tokens)
            live.ticket = live.request = None
            self._plan(self._now + NOTICE_S, partial(self._place, handle))
        self._result.num_resumed += len(handles)
        self._plan(self._now + self._crashes.restart_s, partial(self._start, replica))

    def _arrive(self, handle: int) -> None:
        request = self._requests[handle]
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
        self._live[handle] = _Live(_make_message(handle, request.prompt_token_ids, params, []))
        self._place(handle)
        if handle + 1 < len(self._requests):
            self._plan(self._requests[handle + 1].arrival_s, partial(self._arrive, handle + 1))

    def _place(self, handle: int) -> None:
        """Give a request to a replica; without one it waits."""
        ready = [each.index for each in self._replicas if each.is_up]
        if not ready:
            self._waiting.append(handle)
            return
        live = self._live[handle]
        if self._start_prefill(handle, live, ready):
            return
        ready = [index for index in ready if index >= self._prefills.count] or ready
        live.ticket = self._router.choose(
            live.message, [self._chance.choice(ready)] if self._is_random else ready
        )
        replica = self._replicas[live.ticket.replica]
        replica.handles.add(handle)
        if live.is_prefilled:
            _add_blocks(replica.kv_cache, live.ticket.hashes)
        replica.scheduler.add(live.message)
        live.request = replica.scheduler.state.requests[handle]
        # The scheduler need not compute what the router has computed.
        live.request.block_hashes = list(live.ticket.hashes)
        self._plan_steps(replica)

    def _start_prefill(self, handle: int, live: _Live, ready: Sequence[int]) -> bool:
        """Give a long prompt to a prefill replica first."""
        able = [index for index in ready if index < self._prefills.count]
        others = [index for index in ready if index >= self._prefills.count]
        if live.is_prefilled or not able or not others:
            return False
        if self._router.count_uncached(live.message, others) < self._prefills.min_tokens:
            return False
        live.is_prefilled = True
        self._result.num_prefills += 1
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        message = _make_message(-1 - handle, live.message.prompt_token_ids, params, [])
        ticket = self._prefill_tickets[-1 - handle] = self._router.choose(message, able)
        replica = self._replicas[ticket.replica]
        replica.handles.add(-1 - handle)
        replica.scheduler.add(message)
        self._plan_steps(replica)
        return True

    def _end_prefill(self, replica: _Replica, handle: int) -> None:
        """Place the request when the blocks of the last chunk have come."""
        replica.handles.remove(handle)
        self._router.end(self._prefill_tickets.pop(handle))
        num_prompt = len(self._requests[-1 - handle].prompt_token_ids)
        num_last = min(num_prompt, self._resolved.scheduler.max_num_batched_tokens)
        self._plan(self._now + num_last * self._prefills.transfer_s, partial(self._place, -1 - handle))

    def _plan_steps(self, replica: _Replica) -> None:
        """Plan steps as the SchedulerActor does, and when each ends."""
        while (plan := replica.scheduler.schedule()) is not None:
            start = max(replica.busy_until, self._now)
            replica.busy_until = start + self._table.estimate(StepSize.of(plan))
            self._plan(replica.busy_until, partial(self._end_step, replica, replica.scheduler, plan))
        if changes := replica.kv_cache.pool.changes:
            stored = [block_hash for block_hash, is_cached in changes.items() if is_cached]
            removed = [block_hash for block_hash, is_cached in changes.items() if not is_cached]
            self._router.note_events(replica.index, KVEvents(stored, removed))
            changes.clear()

    def _end_step(self, replica: _Replica, scheduler: Scheduler, plan: StepPlan) -> None:
        if replica.scheduler is not scheduler or not replica.is_up:
            return  # the replica has crashed meanwhile
        indices = np.flatnonzero(plan.num_samples)
        token_ids = np.full(len(indices), TOKEN_ID, dtype=np.int64)
        self._note_tokens(
            replica, scheduler.update(StepDone(plan.step_id, indices, plan.num_samples[indices], token_ids))
        )
        self._plan_steps(replica)

    def _note_tokens(self, replica: _Replica, news: NewTokens) -> None:
        """Take the times of one new token per handle, then what the details say."""
        if self._prefill_tickets:
            for handle in news.handles:
                if handle < 0:
                    self._end_prefill(replica, handle)
            details = [detail for detail in news.details if detail.handle >= 0]
            news = NewTokens([handle for handle in news.handles if handle >= 0], details=details)
        handles = np.array(news.handles, dtype=np.int64)
        last = self._last_tokens[handles]
        is_first = last == NEVER
        first = handles[is_first]
        self._result.ttfts[first] = self._now - self._arrivals[first]
        self._gaps.append(self._now - last[~is_first])
        self._last_tokens[handles] = self._now
        self._result.num_output_tokens += len(handles)
        for detail in news.details:
            self._note_detail(replica, detail)

    def _note_detail(self, replica: _Replica, detail: Detail) -> None:
        live = self._live[detail.handle]
        assert live.ticket is not None and live.request is not None
        if live.ticket.num_uncached:  # the first token in this replica
            if not live.message.completions[0].generated_token_ids:
                self._note_hits(live.request)
            self._router.note_first_token(live.ticket)
        if detail.finish_reason is not None:
            self._result.ends[detail.handle] = self._now
            self._router.end(live.ticket)
            replica.handles.remove(detail.handle)
            del self._live[detail.handle]
            self._num_left -= 1

    def _note_hits(self, request: Request) -> None:
        """Compare the cached tokens of a prompt with those that one cache for all would contain."""
        size = self._resolved.cache.block_size
        hashes = request.block_hashes[: (request.num_prompt_tokens - 1) // size]
        known = self._known_hashes
        num_known = next((at for at, each in enumerate(hashes) if each not in known), len(hashes))
        known.update(hashes)
        self._result.num_hit_tokens += request.num_cached_tokens
        self._result.num_oracle_tokens += num_known * size


def _make_message(handle: int, prompt: list[int], params: SamplingParams, generated: list[int]) -> AddRequest:
    return AddRequest(str(handle), prompt, params, [NewCompletion(handle, 0, generated)])


def _add_blocks(kv_cache: KVCacheManager, hashes: Sequence[bytes]) -> None:
    """Put blocks that another replica has computed into the prefix cache, if they have room."""
    pool = kv_cache.pool
    missing = hashes[len(pool.find(hashes)) :]
    block_ids = pool.allocate(len(missing))
    if block_ids is not None:
        for block_id, block_hash in zip(block_ids, missing, strict=True):
            pool.commit(block_id, block_hash)
        pool.free(block_ids)


def _resolve(config: EngineConfig) -> ResolvedConfig:
    return resolve_config(
        config, WorkerConfig(config.model, "dummy", "float32", "cpu", num_threads=1, seed=0),
        model_max_len=LONGEST, free_bytes=DEFAULT_NUM_BLOCKS, bytes_per_block=1,
        kv_specs=[KVCacheSpec(num_kv_heads=1, head_size=1, window=None)],
    )
