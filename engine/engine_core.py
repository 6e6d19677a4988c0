"""EngineCore: scheduler, grammar and executor actors. It receives and sends messages only.

send ──AddRequest, AbortRequest──▶ Scheduler ──StepPlan (at most 2 in flight)──▶ Executor thread
  │ (with a grammar)                ▲  ▲  │ │                                  FillMasks ││ ▲
  └▶ Opener (images, grammar) ──────▶┘ │  │ └──DropMatchers──▶ Grammar thread ◀──────────┘│ StepMasks
                                       │  │                       └──────────────────────────┘
                                       └──┼─────────────── StepDone ──────────────────────┘
Scheduler ──▶ threads of adapters and of the store of blocks ──AdapterReady, BlocksAnswer──▶ Scheduler
deliver ◀── Accepted, Refused, NewTokens, CoreStats, KVEvents, Reply
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor as ThreadExecutor
from functools import partial
from typing import Any, assert_never

from engine.actors.adapters import AdapterLane
from engine.actors.executor_actor import ExecutorActor
from engine.actors.grammar_actor import GrammarActor
from engine.actors.opener import Opener
from engine.actors.scheduler_actor import SchedulerActor
from engine.actors.transfer import TransferLane
from engine.config import EngineConfig
from engine.core.block_transfers import BlockTransfers
from engine.core.host_tier import HostTier
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request_table import RequestTable
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError
from engine.host_memory import map_large_blocks
from engine.input.tokenizer import Tokenizer
from engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    CoreInbox,
    CoreOutput,
    DropAdapter,
    LoadAdapter,
    Reply,
    ResetPrefixCache,
    Sleep,
    TakeSnapshot,
)
from engine.resolved_config import CacheConfig
from engine.spec.draft_planner import DraftPlanner
from engine.spec.step_costs import StepCosts
from engine.thread_priority import shorten_switch_interval
from engine.transfer.connector import make_connector
from engine.worker.executor import Executor, Loaded
from grammar import GrammarCompiler, Vocabulary


class EngineCore:
    """The actors and the connections between them; all run in one TaskGroup.

    Args:
        deliver: receives the core's messages, on the event loop.
        report_crash: called with an actor's error at once; the other actors end after the current step.
        publishes_kv_events: deliver KVEvents after each step that changes the prefix cache.
    """

    def __init__(
        self, config: EngineConfig, worker: Executor, tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...], deliver: Callable[[CoreOutput], None],
        report_crash: Callable[[BaseException], None], publishes_kv_events: bool = False,
    ) -> None:
        self._config = config
        self._worker = worker
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._deliver = deliver
        self._report_crash = report_crash
        self._publishes_kv_events = publishes_kv_events
        self._others: list[asyncio.Task[None]] = []  # all but the executor's
        self.adapters: AdapterLane | None = None  # None if they are not enabled

    async def start(self, tasks: asyncio.TaskGroup, loaded: Loaded | None) -> Loaded:
        """Start all actors in `tasks`. Returns when the core accepts messages."""
        shorten_switch_interval()
        map_large_blocks()
        # The scheduler needs the resolved config, which loading determines.
        self.executor = ExecutorActor(self._worker, loaded)
        executor = tasks.create_task(self.executor.run(), name="executor")
        await self.executor.ready.wait()
        loaded = self.executor.loaded
        assert loaded is not None, "an executor that is ready has loaded"
        resolved = loaded.resolved
        # In a thread: a million blocks take a second.
        kv_cache = await asyncio.to_thread(self._make_kv_cache, resolved.cache)
        if self._publishes_kv_events:
            kv_cache.pool.changes = {}
        make_drafts = self._find_planner(loaded)
        self.grammar = GrammarActor(
            partial(self._make_compiler, loaded.model_config.vocab_size),
            vocab_size=loaded.model_config.vocab_size,
            timeout_s=self._config.grammar_timeout_s,
            send_masks=self.executor.tell,
            tell_scheduler=lambda message: self.scheduler.tell(message),
            encode=None if make_drafts is None else self._encode,
        )
        scheduler = Scheduler(resolved.scheduler, kv_cache, self._eos_token_ids, make_drafts=make_drafts)
        transfer = await self._open_transfer(scheduler)
        self.scheduler = SchedulerActor(
            scheduler, tell_executor=self.executor.tell, tell_grammar=self.grammar.tell,
            deliver=self._deliver, count_grammars=self.grammar.count_cached,
        )
        self.executor.deliver, self.executor.tell_grammar = self.scheduler.tell, self.grammar.tell
        self.opener = Opener(
            *(self.grammar, self._worker.encoder, self._config.mm_encoder_cache_gb),
            *(self.scheduler.tell, self._deliver),
        )
        others: dict[str, Coroutine[Any, Any, None]] = {
            "grammar": self.grammar.run(), "opener": self.opener.run(), "scheduler": self.scheduler.run(),
        }
        if self._worker.adapters is not None:
            self.adapters = AdapterLane(self._worker.adapters, self.scheduler.tell)
            if scheduler.state.adapters is not None:
                scheduler.state.adapters.loader = self.adapters
            others["adapters"] = self.adapters.run()
        if transfer is not None:
            others["transfer"] = transfer.run()
        for name, run in others.items():
            self.attach(tasks.create_task(run, name=name))
        executor.add_done_callback(self._note_end)
        return loaded

    def send(self, message: CoreInbox) -> None:
        match message:
            case AddRequest():
                if message.images or message.params.grammar is not None:
                    self.opener.add(message)
                else:
                    self._deliver(Accepted(message.completions[0].handle))
                    self.scheduler.tell(message)
            case AbortRequest(handles=handles):
                self.opener.abort(handles)
                self.scheduler.tell(message)
            case TakeSnapshot() | ResetPrefixCache():
                self.scheduler.tell(message)
            case LoadAdapter(call_id=call_id, ref=ref):
                assert self.adapters is not None, "the front refuses adapters that are not enabled"
                self.adapters.load(ref, lambda error: self._deliver(Reply(call_id, error=error)))
            case DropAdapter():
                self.scheduler.tell(message)
            case Sleep():
                self.executor.tell(message)
            case _:
                assert_never(message)

    def attach(self, task: asyncio.Task[None]) -> None:
        """Tie a task of the front to the core: each of them ends when the other does."""
        self._others.append(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._report_crash(error)
        if task.get_name() == "executor":
            for other in self._others:
                if not other.cancelling():  # a second cancel would interrupt the wait for its thread
                    other.cancel()

    def _make_kv_cache(self, config: CacheConfig) -> KVCacheManager:
        tier = None
        if config.num_host_blocks:
            memory = self._worker.host_memory
            tier = HostTier(config.num_host_blocks, [] if memory is None else memory.list_stored())
        return KVCacheManager(config, tier, self._eos_token_ids)

    async def _open_transfer(self, scheduler: Scheduler) -> TransferLane | None:
        """Let the scheduler use the store of several cores, if there is one. Returns the thread that asks it."""
        config, memory = self._config.read_kv_transfer(), self._worker.host_memory
        if config is None or memory is None:
            return None
        kv_cache = scheduler.kv_cache
        assert kv_cache.tier is not None, "a store has slots in host memory"
        secret = self._config.data_parallel_key
        connector = await asyncio.to_thread(make_connector, config, memory.layout, secret)
        lane = TransferLane(memory, connector, lambda answer: self.scheduler.tell(answer))
        scheduler.state.transfers = BlockTransfers(kv_cache, kv_cache.tier, lane, config.saves)
        return lane

    def _find_planner(self, loaded: Loaded) -> Callable[[RequestTable], DraftPlanner] | None:
        """Return what makes the planner of drafts; None without speculative decoding."""
        config = loaded.resolved.speculative
        return None if config is None else partial(DraftPlanner, config, costs=StepCosts(loaded.step_times))

    def _encode(self, text: str) -> Sequence[int]:
        assert self._tokenizer is not None, "grammars are refused without a tokenizer"
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _make_compiler(self, vocab_size: int, native_pool: ThreadExecutor) -> GrammarCompiler:
        assert self._tokenizer is not None, "grammars are refused without a tokenizer"
        token_bytes, names = (
            self._tokenizer.token_bytes(vocab_size),
            self._tokenizer.special_tokens(vocab_size),
        )
        ends = [token_id for token_id in self._eos_token_ids if token_id < vocab_size]
        if not ends:
            raise ConfigError(
                f"structured output needs an eos_token_id below vocab_size={vocab_size}; "
                f"this model's are {list(self._eos_token_ids)}"
            )
        return GrammarCompiler(Vocabulary(token_bytes, ends, names), native_pool=native_pool)
