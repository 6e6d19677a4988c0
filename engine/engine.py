"""Engine: the asyncio interface. Every request enters here.

    generate ─▶ InputProcessor (tokenise, check) ─▶ CoreClient.open (accepted or refused) ─▶ OutputStream ─▶ caller

`engine/engine_core.py` shows the path of a request through the core; `engine/supervisor.py` starts and restarts it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from engine.adapter_catalog import AdapterCatalog, LoRARequest
from engine.cluster.placement import make_supervisor
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead, EngineOverloaded, InvalidRequest, RequestTimeout
from engine.input.input_processor import InputProcessor, Prompt, check_options
from engine.input.tokenizer import Tokenizer
from engine.messages import AdapterRef
from engine.metrics import EngineStats, Metrics, ReplicaStats
from engine.model import ModelConfig
from engine.model.report import ModelReport, make_report
from engine.output_stream import OutputStream
from engine.outputs import EngineSnapshot, RequestOutput
from engine.resolved_config import ResolvedConfig
from engine.sampling_params import SamplingParams
from engine.supervisor import EngineState


@dataclass(eq=False, slots=True)
class Arrival:
    """A request that the core has not accepted yet, in any phase: adapter, images, tokens, grammar."""

    request_id: str
    is_aborted: bool = False


class Engine:
    """Serves one model to concurrent requests on one event loop.

    `async with Engine(config) as engine:` calls `start` and `close`. A process may run several engines, each with
    its own weights, cache and threads.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self._metrics = Metrics()
        self._supervisor = make_supervisor(self.config, self._metrics)
        transfer = self.config.read_kv_transfer()
        self._saves_blocks = transfer is not None and transfer.saves
        self._arrivals: set[Arrival] = set()
        self.adapters = AdapterCatalog(
            self.config.enable_lora, self.config.model_name, self._supervisor.require_client
        )

    async def start(self) -> None:
        """Load the model and start the actors. Returns when the engine accepts requests.

        Raises:
            ConfigError: the config, the checkpoint, an adapter or the available memory does not allow it.
        """
        await self._supervisor.start()
        for name, path in self.config.read_lora_modules().items():
            try:
                await self.adapters.load(name, path)
            except InvalidRequest as error:
                await self.close()
                raise ConfigError(f"lora_modules: {name}={path}: {error}") from error

    async def close(self) -> None:
        """End all requests with EngineDead and stop every task and thread. Safe to call twice."""
        await self._supervisor.close()

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
        arrival_time = time.monotonic()
        params = SamplingParams() if sampling_params is None else sampling_params
        check_options(params, priority, cache_salt, deadline_s)
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        arrival = Arrival(request_id)
        with ExitStack() as held:
            self._arrivals.add(arrival)
            try:
                async with asyncio.timeout(deadline_s) as deadline:
                    adapter = None if lora_request is None else await self.adapters.resolve(lora_request)
                    held.enter_context(self.adapters.hold(adapter))
                    stream = await self._admit(
                        prompt,
                        params,
                        arrival,
                        priority,
                        cache_salt,
                        arrival_time,
                        generated_token_ids,
                        prediction,
                        adapter,
                    )
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise make_timeout(deadline_s) from error
            finally:
                self._arrivals.discard(arrival)
            timer = self._start_timer(stream, arrival_time, deadline_s)
            try:
                is_finished = False
                while not is_finished:
                    output = await stream.get()
                    is_finished = output.finished
                    yield output
            finally:
                if timer is not None:
                    timer.cancel()
                if (client := self._supervisor.client) is not None:
                    client.close_stream(stream)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        for arrival in self._arrivals:
            arrival.is_aborted |= arrival.request_id == request_id
        client = self._supervisor.client
        if client is not None:
            client.abort_request(request_id)

    def check_capacity(self, count: int = 1) -> None:
        """Reject a request early if batch and waiting queue cannot take its completions.

        Args:
            count: completions of the request.

        Raises:
            InvalidRequest: `count` exceeds the whole capacity.
            EngineOverloaded: `count` exceeds the free capacity; counted as a rejection.
        """
        client = self._supervisor.client
        if client is None:
            return
        max_running = self.resolved.scheduler.max_num_seqs * self._supervisor.count_serving()
        max_waiting = self.config.max_num_waiting
        if count > max_running + max_waiting:
            raise InvalidRequest(
                f"n={count} must be at most {max_running + max_waiting}: the engine runs max_num_seqs={max_running} "
                f"at a time, and max_num_waiting={max_waiting} may wait",
                "n",
            )
        num_live = len(client.streams)
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
        return await self._input_processor.encode_text(text, add_special_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Return the token ids of a conversation under the model's chat template.

        Messages, options and errors are those of `Tokenizer.encode_chat`.
        """
        return await self._input_processor.encode_chat(messages, options)

    @property
    def state(self) -> EngineState:
        """One of new, starting, ready, restarting, falling_asleep, sleeping, waking_up, dead, closed."""
        return self._supervisor.state

    @property
    def error(self) -> str | None:
        """Cause of the last crash."""
        return self._supervisor.error

    @property
    def timeline(self) -> list[tuple[str, float]]:
        """Start-up phases and their durations in seconds."""
        return self._supervisor.timeline

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._supervisor.tokenizer

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def resolved(self) -> ResolvedConfig:
        """The config with every "auto" filled in; available once the engine has started."""
        return self._supervisor.resolved

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images; False until the engine has started."""
        return self._supervisor.images is not None

    @property
    def model_config(self) -> ModelConfig:
        return self._supervisor.model_config

    def describe_model(self) -> ModelReport:
        """Return what is known about the served model; available once the engine has started."""
        return make_report(self.config.model, self.model_config)

    def describe_runtime(self) -> dict[str, str | int]:
        """Return which ops steps use now, and the progress of native ops and recorded graphs."""
        return self._supervisor.describe_runtime()

    def stats(self) -> EngineStats:
        """Return the counters, and the gauges while the core runs."""
        client = self._supervisor.client
        return self._metrics.make_stats() if client is None else client.make_stats()

    async def snapshot(self, with_blocks: bool = True) -> EngineSnapshot | None:
        """Return the current requests and, `with_blocks`, the ids of their KV blocks; None while the core is down."""
        client = self._supervisor.client
        try:
            return None if client is None else await client.take_snapshot(with_blocks)
        except EngineDead:  # no core runs, or it ended meanwhile
            return None

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while requests own blocks."""
        return await self._supervisor.require_client().reset_prefix_cache()

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
        return await self._supervisor.sleep(level, drain)

    async def wake_up(self) -> None:
        """End a sleep. Returns when the engine accepts requests, at once if it is awake.

        Raises:
            EngineSleeping: another call is waking the engine up.
            EngineDead: the engine is not running, or it failed to wake up and is still asleep.
        """
        await self._supervisor.wake_up()

    def describe_replicas(self) -> list[ReplicaStats]:
        """Return state and load of each replica; empty for a core in this process."""
        return self._supervisor.describe_replicas()

    async def drain_replica(self, index: int) -> None:
        """Move a replica's requests to the others, where they continue, and give it no new ones.

        Raises:
            InvalidRequest: there is no such replica, or no other one is ready.
        """
        await self._supervisor.drain(index)

    async def undrain_replica(self, index: int) -> None:
        """Give new requests to a drained replica again."""
        await self._supervisor.undrain(index)

    async def restart_replica(self, index: int) -> None:
        """Drain a replica and start its process anew. Returns when it is ready; no request is lost."""
        await self._supervisor.restart(index)

    @property
    def sleep_level(self) -> int:
        """The level passed to `sleep`; 0 while the engine is awake."""
        return self._supervisor.sleep_level

    @property
    def _input_processor(self) -> InputProcessor:
        self._supervisor.require_client()
        return self._supervisor.input_processor

    async def _admit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        arrival: Arrival,
        priority: int,
        cache_salt: str | None,
        arrival_time: float,
        generated_token_ids: Sequence[Sequence[int]],
        prediction: str | Sequence[int] | None,
        adapter: AdapterRef | None,
    ) -> OutputStream:
        input_processor, request_id = self._input_processor, arrival.request_id
        text, token_ids = await input_processor.encode(prompt, params)
        input_processor.check(token_ids, params)
        if params.saves_blocks and not self._saves_blocks:
            raise InvalidRequest(
                "kv_transfer_params.do_remote_decode needs a server whose kv_transfer_config saves blocks",
                "kv_transfer_params",
            )
        input_processor.check_generated(generated_token_ids, token_ids, params)
        bad_word_ids = await input_processor.encode_bad_words(params)
        input_processor.check_choice(params, bad_word_ids)
        prediction_ids = []
        if prediction is not None and self.config.speculative_config is not None:
            prediction_ids = await input_processor.encode_prediction(prediction)
        self.check_capacity(params.n)
        age_s = time.monotonic() - arrival_time
        message = input_processor.make_request(
            request_id, token_ids, params, priority, cache_salt, age_s, bad_word_ids, generated_token_ids,
            prediction_ids, adapter,
        )  # fmt: skip
        stream = OutputStream(request_id, text, token_ids, params, arrival_time, self._metrics)
        client = self._supervisor.require_client()  # the core may have ended meanwhile
        if arrival.is_aborted:  # `open` sends the request before it first waits
            asyncio.get_running_loop().call_soon(lambda: client.abort(stream.handles))
        stream.grammar = await client.open(message, stream)
        return stream

    def _start_timer(
        self, stream: OutputStream, arrival_time: float, deadline_s: float | None
    ) -> asyncio.TimerHandle | None:
        if deadline_s is None:
            return None

        def expire() -> None:
            stream.fail(make_timeout(deadline_s))
            if (client := self._supervisor.client) is not None:
                client.abort(stream.handles)

        delay = arrival_time + deadline_s - time.monotonic()
        return asyncio.get_running_loop().call_later(delay, expire)


def make_timeout(deadline_s: float | None) -> RequestTimeout:
    return RequestTimeout(f"the request was not finished within its deadline of {deadline_s:g} s")
