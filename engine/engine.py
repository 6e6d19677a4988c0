"""Engine: the asyncio facade. It starts a Company of actors, supervises it, and is the door for requests.

    start ─▶ "starting" ─▶ "ready" ──crash──▶ "restarting" ─▶ "ready" ... ─▶ "dead" after too many
                              └──close──▶ "closed"

A crash fails the requests in flight with EngineDead, is logged once, and a new Company takes over the loaded
weights. All tasks live in one TaskGroup, inside one supervisor task.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

from engine.company import Company
from engine.config import EngineConfig, ResolvedConfig
from engine.errors import EngineDead, EngineOverloaded, InvalidRequest, RequestTimeout
from engine.intake import Intake, Prompt
from engine.metrics import EngineStats, Metrics
from engine.model import ModelConfig
from engine.output_stream import OutputStream
from engine.outputs import GrammarInfo, RequestOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker
from grammar import CompiledGrammar

logger = logging.getLogger("troupe.engine")

EngineState = Literal["new", "starting", "ready", "restarting", "dead", "closed"]
RESTART_WINDOW_S = 600.0


class Engine:
    """One model, served to any number of concurrent requests of one event loop.

    `async with Engine(config) as engine:` starts and closes it; `start` and `close` do the same by hand.
    Several engines may live in one process, each with its own weights, cache and threads.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.state: EngineState = "new"
        self.error: str | None = None  # cause of the last crash
        self.tokenizer: Tokenizer | None = None
        self.timeline: list[tuple[str, float]] = []  # start-up phases, seconds
        self._metrics = Metrics()
        self._company: Company | None = None
        self._supervisor: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and start the actors; back when the engine answers.

        Raises:
            ConfigError: the config, the checkpoint or the memory does not allow it.
        """
        if self._supervisor is not None:
            raise RuntimeError("this engine was started already; make a new one")
        self.state = "starting"
        self._is_up = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(), name="troupe supervisor")
        up = asyncio.ensure_future(self._is_up.wait())
        try:
            await asyncio.wait([up, self._supervisor], return_when=asyncio.FIRST_COMPLETED)
            if self._supervisor.done():
                self.state = "dead"
                self._supervisor.result()
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            up.cancel()

    async def close(self) -> None:
        """End all requests with EngineDead and stop every task and thread. Safe to call twice."""
        self.state = "closed"
        supervisor = self._supervisor
        if supervisor is not None and not supervisor.done():
            supervisor.cancel()
            await asyncio.wait([supervisor])

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; the last one has `finished=True`.

        Closing the generator, or cancelling the task that reads it, aborts the request. A slow reader gets
        merged outputs and never holds up the engine.

        Args:
            prompt: text, token ids, or {"prompt_token_ids": ids}.
            priority: lower runs first, under the priority policy.
            cache_salt: requests share prefix-cache blocks only with those of the same salt.
            deadline_s: seconds from now until the request is aborted with RequestTimeout.

        Raises:
            InvalidRequest, GrammarError: the request's own fault.
            EngineOverloaded: the waiting queue is full.
            RequestTimeout: the deadline passed.
            EngineDead: the engine is not up, or crashed meanwhile.
        """
        params = sampling_params or SamplingParams()
        arrival_time = time.monotonic()
        stream, request_ids = await self._submit(
            prompt,
            params,
            request_id or f"req-{secrets.token_hex(8)}",
            priority,
            cache_salt,
            arrival_time,
            deadline_s,
        )
        timer = self._start_timer(stream, request_ids, arrival_time, deadline_s)
        try:
            is_finished = False
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            if timer is not None:
                timer.cancel()
            self._abort(request_ids)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        company = self._company
        if company is not None:
            self._abort(
                [name for name in company.streams if name == request_id or name.startswith(f"{request_id}#")]
            )

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, tokenised off the loop when it is long."""
        return (await self._intake.encode(text))[1]

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template; `options` as Tokenizer.apply_chat_template."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                "this engine was started without a tokenizer: it cannot render messages", "messages"
            )
        text = await asyncio.to_thread(tokenizer.apply_chat_template, messages, **options)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)

    # ------------------------------------------------------------------ facts

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def resolved(self) -> ResolvedConfig:
        """What became of the config; there once the engine has started."""
        return self._worker.resolved

    @property
    def model_config(self) -> ModelConfig:
        return self._worker.model_config

    def stats(self) -> EngineStats:
        """Counters and gauges as they are now."""
        return (
            EngineStats(num_restarts=self._metrics.num_restarts)
            if self._company is None
            else self._company.stats()
        )

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests own blocks."""
        return self._company is not None and self._company.kv_cache.pool.reset_cache()

    # ------------------------------------------------------------------ inside

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        arrival_time: float,
        deadline_s: float | None,
    ) -> tuple[OutputStream, list[str]]:
        self._require_ready()
        _check_request(priority, cache_salt, deadline_s)
        text, token_ids = await self._intake.encode(prompt)
        self._intake.check(token_ids, params)
        self._check_room(params.n)
        compiled, info = await self._compile(params)
        company = self._require_ready()  # it may have crashed while the grammar compiled
        messages = self._intake.split(request_id, token_ids, params, priority, cache_salt, arrival_time)
        request_ids = [message.request_id for message in messages]
        if any(name in company.streams for name in request_ids):
            raise InvalidRequest(f"request_id {request_id!r} is in use by a running request", "request_id")
        stream = OutputStream(request_id, text, token_ids, params, arrival_time, info, self._metrics)
        company.open(messages, stream, compiled)
        return stream, request_ids

    async def _compile(self, params: SamplingParams) -> tuple[CompiledGrammar | None, GrammarInfo | None]:
        if params.grammar is None:
            return None, None
        compiled, info = await self._require_ready().grammar.compile(params.grammar)
        self._metrics.grammar_compile.observe(info.compile_time_s)
        return compiled, info

    def _check_room(self, count: int) -> None:
        num_queued = self._require_ready().num_queued
        if num_queued + count > self.config.max_num_waiting:
            self._metrics.num_rejected += 1
            raise EngineOverloaded(
                f"{num_queued} requests are waiting and at most {self.config.max_num_waiting} may; try again later"
            )

    def _require_ready(self) -> Company:
        if self.state == "ready" and self._company is not None:
            return self._company
        why = f" ({self.error})" if self.error else ""
        raise EngineDead(f"the engine is {self.state}{why}")

    def _start_timer(
        self, stream: OutputStream, request_ids: list[str], arrival_time: float, deadline_s: float | None
    ) -> asyncio.TimerHandle | None:
        if deadline_s is None:
            return None

        def expire() -> None:
            stream.fail(
                RequestTimeout(f"the request was not finished within its deadline of {deadline_s:g} s")
            )
            self._abort(request_ids)

        delay = arrival_time + deadline_s - time.monotonic()
        return asyncio.get_running_loop().call_later(delay, expire)

    def _abort(self, request_ids: list[str]) -> None:
        if self._company is not None:
            self._company.abort(request_ids)

    async def _supervise(self) -> None:
        """Run one company after another until the engine is closed or crashes too often."""
        await self._load_tokenizer()
        crashes: deque[float] = deque()
        while True:
            try:
                await self._run_company(is_restart=bool(crashes))
            except ExceptionGroup as group:
                cause = _first_cause(group)
                if not self._is_up.is_set():
                    raise cause from None
                self.error = f"{type(cause).__name__}: {cause}"
                crashes.append(time.monotonic())
                while crashes[0] < crashes[-1] - RESTART_WINDOW_S:
                    crashes.popleft()
                logger.error("the engine crashed: %s", self.error, exc_info=cause)
            if len(crashes) > self.config.max_restarts:
                self.state = "dead"
                logger.error("the engine crashed %d times; it stays down", len(crashes))
                return
            self._metrics.num_restarts += 1

    async def _run_company(self, is_restart: bool) -> None:
        company = Company(self.config, self._worker, self.tokenizer, self._eos_token_ids, self._metrics)
        try:
            async with asyncio.TaskGroup() as tasks:
                await company.start(tasks, is_restart)
                if not is_restart:
                    self.timeline += self._worker.timeline
                    self._intake = Intake(self.tokenizer, self.resolved, self.model_config.vocab_size)
                    for notice in self.resolved.notices:
                        logger.warning("%s", notice)
                self._company, self.state = company, "ready"
                self._is_up.set()
        except ExceptionGroup as group:
            self.state = "restarting"
            company.fail_all(EngineDead(f"the engine crashed: {_first_cause(group)}"))
            raise
        finally:
            self._company = None
            company.fail_all(EngineDead("the engine was closed"))

    async def _load_tokenizer(self) -> None:
        start = time.monotonic()
        config = self.config
        if not config.skip_tokenizer_init:
            self.tokenizer = await asyncio.to_thread(Tokenizer, config.tokenizer or config.model)
            self._eos_token_ids: tuple[int, ...] = self.tokenizer.eos_token_ids
        else:
            self._eos_token_ids = (
                await asyncio.to_thread(ModelConfig.from_pretrained, config.model)
            ).eos_token_ids
        self._worker: Worker | MockWorker = (
            Worker(config, self._eos_token_ids) if config.mock_step_ms is None else MockWorker(config)
        )
        self.timeline.append(("tokenizer", time.monotonic() - start))


def _check_request(priority: int, cache_salt: str | None, deadline_s: float | None) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(
            f"priority={priority!r} must be an integer from {-(2**31)} to {2**31 - 1}", "priority"
        )
    if cache_salt is not None and not 1 <= len(cache_salt) <= 1024:
        raise InvalidRequest(
            f"cache_salt must have 1 to 1024 characters, not {len(cache_salt)}", "cache_salt"
        )
    if deadline_s is not None and not 0 < deadline_s <= 86400:
        raise InvalidRequest(
            f"deadline_s={deadline_s!r} must be above 0 and at most 86400 seconds", "deadline_s"
        )


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
