"""EngineCore: one life of the engine, from an empty queue to a close or a crash. Its actors share one TaskGroup.

generate ──AddRequest, AbortRequest──▶ Scheduler ──RunStep (at most 2 in flight)──▶ Executor thread
    ▲                                   ▲ │ │                                           │   ▲
    │                                   │ │ └──FillMasks──▶ Grammar thread ──SampleGate─┼───┘
    │                                   └─┼──────────────── StepDone ───────────────────┘
    └── OutputStream ◀── Detokenizer ◀────┘ NewTokens
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from engine.actors.detokenizer import DetokenizerActor
from engine.actors.executor import ExecutorActor
from engine.actors.grammar import GrammarActor
from engine.actors.lag_gauge import watch_loop_lag
from engine.actors.scheduler import SchedulerActor
from engine.actors.turns import take_turns_often
from engine.actors.watchdog import watch_steps
from engine.config import EngineConfig
from engine.core.detokenizer import Detokenizer
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError, EngineDead, EngineError, InvalidRequest
from engine.input.tokenizer import Tokenizer
from engine.messages import AbortRequest, AddRequest, Sleep
from engine.metrics import EngineStats, Metrics
from engine.output_stream import OutputStream
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker
from grammar import CompiledGrammar, GrammarCompiler, Vocabulary


class EngineCore:
    """The wired actors. `open` and `abort` are the only ways in; streams are the only way out."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker | MockWorker,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics,
        report_hang: Callable[[TimeoutError], None],
        report_crash: Callable[[BaseException], None],
    ) -> None:
        self.streams: dict[int, tuple[OutputStream, int]] = {}  # of live completions
        self._requests: dict[str, OutputStream] = {}  # of requests with a reader
        self._config = config
        self._worker = worker
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._report_hang = report_hang
        self._report_crash = report_crash
        self._others: list[asyncio.Task[None]] = []  # all but the executor's

    async def start(self, tasks: asyncio.TaskGroup, watch: asyncio.TaskGroup, is_restart: bool) -> None:
        """Bring all actors up in `tasks`, the watchdog in `watch`; back when requests can come."""
        take_turns_often()
        # The scheduler needs the resolved config, which the executor's thread finds out while it loads.
        self.executor = ExecutorActor(
            self._worker, deliver=lambda done: self.scheduler.tell(done), is_restart=is_restart
        )
        executor = tasks.create_task(self.executor.run(), name="executor")
        await self.executor.ready.wait()
        resolved = self._worker.resolved
        self.kv_cache = await asyncio.to_thread(
            KVCacheManager, resolved.cache
        )  # a second for a million blocks
        self.machine = Scheduler(resolved.scheduler, self.kv_cache, self._eos_token_ids)
        self.grammar = GrammarActor(
            self._make_compiler,
            vocab_size=self._worker.model_config.vocab_size,
            timeout_s=self._config.grammar_timeout_s,
            send_masks=self.executor.tell,
            report_failed=lambda report: self.scheduler.tell(report),
            mask_times=self._metrics.grammar_mask,
        )
        self.detokenizer = DetokenizerActor(
            Detokenizer(self._tokenizer),
            self.streams,
            self._metrics,
            tell_scheduler=lambda abort: self.scheduler.tell(abort),
        )
        self.scheduler = SchedulerActor(
            self.machine,
            self._metrics,
            tell_executor=self.executor.tell,
            tell_grammar=self.grammar.tell,
            tell_detokenizer=self.detokenizer.tell,
        )
        others: dict[str, Coroutine[Any, Any, None]] = {
            "grammar": self.grammar.run(),
            "detokenizer": self.detokenizer.run(),
            "scheduler": self.scheduler.run(),
            "lag gauge": watch_loop_lag(self._metrics.loop_lag),
        }
        self._others = [tasks.create_task(run, name=name) for name, run in others.items()]
        if self._config.step_timeout_s:
            watchdog = watch_steps(self.machine, self._config.step_timeout_s, self._give_up)
            self._others.append(watch.create_task(watchdog, name="watchdog"))
        for task in (executor, *self._others):
            task.add_done_callback(self._note_end)
        executor.add_done_callback(lambda _: self._dismiss())

    @property
    def num_queued(self) -> int:
        """Sequences that are accepted and not running, those that wait for a grammar among them."""
        return self._num_waiting + self.grammar.num_compiling

    @property
    def _num_waiting(self) -> int:
        """A stop string ends a stream before the scheduler hears of it: for a moment more may run than there are."""
        return max(0, len(self.streams) - len(self.machine.state.running))

    @property
    def num_free_seats(self) -> int:
        """Sequences that may run beside those that do."""
        return self.machine.config.max_num_seqs - len(self.machine.state.running)

    @property
    def is_idle(self) -> bool:
        """Whether no request is in it, not even one whose grammar compiles."""
        return not self.streams and not self.grammar.num_compiling

    def open(self, message: AddRequest, stream: OutputStream, compiled: CompiledGrammar | None) -> None:
        """Accept a request: from here on its stream gets exactly one end.

        Raises:
            InvalidRequest: a live request has its name.
        """
        known = self._requests.get(stream.request_id)
        if known is not None and not known.is_finished:
            raise InvalidRequest(
                f"request_id {stream.request_id!r} is in use by a running request", "request_id"
            )
        matchers = [] if compiled is None else [compiled.matcher() for _ in message.completions]
        stream.handles = [completion.handle for completion in message.completions]
        self._requests[stream.request_id] = stream
        self.streams |= {handle: (stream, index) for index, handle in enumerate(stream.handles)}
        for completion, matcher in zip(message.completions, matchers, strict=False):
            self.grammar.open(completion.handle, matcher, completion.generated_token_ids)
        self.detokenizer.tell(message)
        self.scheduler.tell(message)
        self._metrics.prompt_tokens += len(message.prompt_token_ids)

    def leave(self, stream: OutputStream) -> None:
        """The reader of a request is gone: end what is left of it, and free its name."""
        self.abort_stream(stream)
        if self._requests.get(stream.request_id) is stream:
            del self._requests[stream.request_id]

    def abort_request(self, request_id: str) -> None:
        """End the request of that name, if there is one."""
        if request_id in self._requests:
            self.abort_stream(self._requests[request_id])

    def abort_stream(self, stream: OutputStream) -> None:
        """End what is left of a request."""
        self.abort(stream.handles)

    def abort(self, handles: Iterable[int]) -> None:
        """End those of the completions that still live."""
        live = [handle for handle in handles if handle in self.streams]
        if live:
            self.scheduler.tell(AbortRequest(live))

    def sleep(self, level: int) -> None:
        """End this core when the worker has gone to sleep. It must be idle."""
        assert self.is_idle, "requests end before their core does"
        self.executor.tell(Sleep(level))

    def fail_all(self, error: EngineError) -> None:
        """End every open stream with this error."""
        for stream, _ in self.streams.values():
            stream.fail(error)
        self.streams.clear()

    def _dismiss(self) -> None:
        for task in self._others:
            if not task.cancelling():  # a second time would cut off its wait for its thread
                task.cancel()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """The readers are told of a crash at once: the others end only after the step that is under way."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._report_crash(error)
            self.fail_all(EngineDead(f"the engine crashed: {error}"))

    def _give_up(self, error: TimeoutError) -> None:
        """The readers are told of a hang at once; the core itself ends when the thread comes back."""
        self._report_hang(error)
        self.fail_all(EngineDead(f"the engine hangs: {error}"))

    def stats(self) -> EngineStats:
        """The gauges of now, and all counters; those of the machines come on top of earlier companies'."""
        pool = self.kv_cache.pool
        num_running = len(self.machine.state.running)
        stats = self._metrics.make_stats(
            num_running=num_running,
            num_waiting=self._num_waiting,
            num_waiting_for_grammar=self.grammar.num_compiling,
            kv_usage=self.kv_cache.usage,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
        )
        return replace(
            stats,
            prefix_cache_queries=stats.prefix_cache_queries + self.kv_cache.num_queried_tokens,
            prefix_cache_hits=stats.prefix_cache_hits + self.kv_cache.num_hit_tokens,
            num_preemptions=stats.num_preemptions + self.machine.state.num_preemptions,
        )

    def settle(self) -> None:
        """Leave the machines' counters to the metrics, which outlive this core."""
        self._metrics.num_queried_tokens += self.kv_cache.num_queried_tokens
        self._metrics.num_hit_tokens += self.kv_cache.num_hit_tokens
        self._metrics.num_preemptions += self.machine.state.num_preemptions

    def _make_compiler(self) -> GrammarCompiler:
        assert self._tokenizer is not None, "the input_processor refuses grammars without a tokenizer"
        vocab_size = self._worker.model_config.vocab_size
        token_bytes, names = (
            self._tokenizer.token_bytes(vocab_size),
            self._tokenizer.special_tokens(vocab_size),
        )
        ends = [token_id for token_id in self._eos_token_ids if token_id < vocab_size]
        if not ends:
            raise ConfigError(
                f"structured output needs an eos_token_id below vocab_size={vocab_size}, to end a text; "
                f"this model's are {list(self._eos_token_ids)}"
            )
        return GrammarCompiler(Vocabulary(token_bytes, ends, names))
