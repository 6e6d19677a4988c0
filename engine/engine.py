"""Engine: the asyncio interface. Every request enters here.

    generate ─▶ InputProcessor (tokenise, check) ─▶ Client.open (accepted or refused) ─▶ OutputStream ─▶ caller

`engine/engine_core.py` shows the path of a request through the core; `engine/front/supervisor.py`, the base class,
starts and restarts cores.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from engine.cluster.placement import Placement
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead, EngineOverloaded, InvalidRequest, RequestTimeout
from engine.front.adapter_catalog import AdapterCatalog, LoRARequest
from engine.front.streams import OutputStream
from engine.front.supervisor import Supervisor
from engine.input.input_processor import InputProcessor, Options, Prompt
from engine.metrics import EngineStats
from engine.model.report import ModelReport, make_report
from engine.outputs import EngineSnapshot, RequestOutput
from engine.sampling_params import SamplingParams
from engine.stats_log import log_stats
from engine.tracing import make_tracer


@dataclass(eq=False, slots=True)
class Arrival:
    """A request that the core has not accepted yet, in any phase: adapter, images, tokens, grammar."""

    request_id: str
    time: float
    is_aborted: bool = False


class Engine(Supervisor):
    """Serves one model to concurrent requests on one event loop.

    `async with Engine(config) as engine:` calls `start` and `close`. A process may run several engines, each with
    its own weights, cache and threads.

    Attributes:
        state: one of new, starting, ready, restarting, falling_asleep, sleeping, waking_up, dead, closed.
        error: cause of the last crash.
    """

    def __init__(self, config: EngineConfig | None = None, placement: Placement | None = None) -> None:
        super().__init__(config, placement)
        self._arrivals: set[Arrival] = set()
        self._log: asyncio.Task[None] | None = None
        self._tracer = make_tracer(self.config)
        self.adapters = AdapterCatalog(self.config.enable_lora, self.config.model_name, self._require_client)

    async def start(self) -> None:
        """Load the model and start the actors. Returns when the engine accepts requests.

        Raises:
            ConfigError: the config, the checkpoint, an adapter or the available memory does not allow it.
        """
        await super().start()
        if not self.config.disable_log_stats:
            self._log = asyncio.create_task(log_stats(self.stats), name="troupe stats log")
        for name, path in self.config.read_lora_modules().items():
            try:
                await self.adapters.load(name, path)
            except InvalidRequest as error:
                await self.close()
                raise ConfigError(f"lora_modules: {name}={path}: {error}") from error

    async def close(self) -> None:
        """End all requests with EngineDead, and every task and thread but that of a hung step. Safe to call twice."""
        if self._log is not None:
            self._log.cancel()
        await super().close()
        if self._tracer is not None:
            self._tracer.close()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
        generated_token_ids: Sequence[Sequence[int]] = (),
        prediction: str | Sequence[int] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; the last one has `finished=True`.

        Closing the generator, or cancelling the task that reads it, aborts the request. A slow reader gets
        merged outputs and never delays the engine.

        Args:
            prompt: text, token ids, or {"prompt_token_ids": ids}.
            priority: lower runs first, under the priority policy.
            cache_salt: requests share prefix-cache blocks only with those of the same salt.
            deadline_s: seconds from now until the request is aborted with RequestTimeout.
            generated_token_ids: for each completion, the tokens that it generated before, here or in another engine.
                It continues after them, and only new tokens are returned. The seed must be the same.
            prediction: text or token ids that the output probably contains. With a `speculative_config` they are
                proposed as drafts; they never change the output.
            lora_request: the adapter that answers; None: the base model.

        Raises:
            InvalidRequest, GrammarError: the request is invalid.
            EngineOverloaded: the waiting queue is full.
            EngineSleeping: the engine is asleep.
            RequestTimeout: the deadline passed.
            EngineDead: the engine is not running, or it crashed meanwhile.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        options = Options(priority, cache_salt, deadline_s, generated_token_ids, prediction)
        options.check(params)
        arrival = Arrival(request_id or f"req-{secrets.token_hex(8)}", time.monotonic())
        with ExitStack() as held:
            self._arrivals.add(arrival)
            try:
                async with asyncio.timeout(deadline_s) as deadline:
                    if lora_request is not None:
                        options.adapter = await self.adapters.resolve(lora_request)
                        held.enter_context(self.adapters.hold(options.adapter))
                    stream = await self._admit(prompt, params, arrival, options)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise make_timeout(deadline_s) from error
            finally:
                self._arrivals.discard(arrival)
            timer = None if deadline_s is None else self._start_timer(stream, deadline_s)
            try:
                is_finished = False
                while not is_finished:
                    output = await stream.get()
                    is_finished = output.finished
                    if is_finished and self._tracer is not None:
                        self._tracer.report(output, params, stream.count_tokens())
                    yield output
            finally:
                if timer is not None:
                    timer.cancel()
                self._client.close_stream(stream)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        for arrival in self._arrivals:
            arrival.is_aborted |= arrival.request_id == request_id
        self._client.abort(request_id)

    def check_capacity(self, count: int = 1) -> None:
        """Reject a request early if batch and waiting queue cannot take its completions.

        Raises:
            InvalidRequest: `count` exceeds the whole capacity.
            EngineOverloaded: `count` exceeds the free capacity; counted as a rejection.
        """
        max_running = self.resolved.scheduler.max_num_seqs * self.count_serving()
        max_waiting = self.config.max_num_waiting
        if count > max_running + max_waiting:
            raise InvalidRequest(
                f"n={count} must be at most {max_running + max_waiting}: the engine runs max_num_seqs={max_running} "
                f"at a time, and max_num_waiting={max_waiting} may wait",
                "n",
            )
        num_live = self._client.num_unfinished
        if num_live + count > max_running + max_waiting:
            self._metrics.num_rejected += 1
            raise EngineOverloaded(
                f"{max(0, num_live - max_running)} requests are waiting and at most {max_waiting} may, beside "
                f"{max_running} running ones; try again later"
            )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Long texts are tokenised in a thread.

        Raises:
            InvalidRequest: the text is not valid Unicode, or the engine has no tokenizer.
        """
        return await self._find_input_processor().encode_text(text, add_special_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Return the token ids of a conversation under the model's chat template.

        Messages, options and errors are those of `Tokenizer.encode_chat`.
        """
        return await self._find_input_processor().encode_chat(messages, options)

    @property
    def model_name(self) -> str:
        return self.config.model_name

    def describe_model(self) -> ModelReport:
        """Return what is known about the served model; available once the engine has started."""
        return make_report(self.config.model, self.model_config)

    def stats(self) -> EngineStats:
        """Return the counters, and the gauges while the core runs."""
        return self._client.make_stats()

    async def snapshot(self, with_blocks: bool = True) -> EngineSnapshot | None:
        """Return the current requests and, `with_blocks`, the ids of their KV blocks; None while the core is down."""
        try:
            return await self._client.calls.take_snapshot(with_blocks)
        except EngineDead:  # no core runs, or it ended meanwhile
            return None

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while requests own blocks."""
        return await self._require_client().calls.reset_prefix_cache()

    def _find_input_processor(self) -> InputProcessor:
        self._require_client()
        return self._input_processor

    async def _admit(
        self, prompt: Prompt, params: SamplingParams, arrival: Arrival, options: Options
    ) -> OutputStream:
        self._require_client()
        text, request = await self._input_processor.read(
            arrival.request_id, prompt, params, options, arrival.time
        )
        self.check_capacity(params.n)
        stream = OutputStream(request, text, arrival.time, self.tokenizer, self._metrics)
        client = self._require_client()  # the core may have ended meanwhile
        if arrival.is_aborted:  # `open` sends the request before it first waits
            asyncio.get_running_loop().call_soon(client.abort, arrival.request_id)
        stream.grammar = await client.open(request, stream)
        return stream

    def _start_timer(self, stream: OutputStream, deadline_s: float) -> asyncio.TimerHandle:
        delay = stream.times.arrival_time + deadline_s - time.monotonic()
        return asyncio.get_running_loop().call_later(
            delay, self._client.expire, stream, make_timeout(deadline_s)
        )


def make_timeout(deadline_s: float | None) -> RequestTimeout:
    return RequestTimeout(f"the request was not finished within its deadline of {deadline_s:g} s")
