"""LLM: the synchronous interface. It runs an Engine on its own event loop in its own thread.

It therefore works in a script, from any thread, and inside a running event loop such as a notebook's.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from tqdm import tqdm

from engine.adapter_catalog import LoRARequest
from engine.config import EngineConfig
from engine.config_fields import DEMO_MODEL
from engine.embedder import Embedder, Embedding, Score
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.input.input_processor import Prompt
from engine.input.tokenizer import Tokenizer
from engine.llm_inputs import (
    Messages,
    list_adapters,
    list_conversations,
    list_params,
    list_prompts,
    read_settings,
)
from engine.metrics import EngineStats
from engine.outputs import RequestOutput
from engine.resolved_config import ResolvedConfig
from engine.sampling_params import SamplingParams

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]
Render = Callable[[], Coroutine[Any, Any, list[int]]]


class LLM:
    """Offline generation: `LLM(model=...).generate(prompts, sampling_params)`.

    Args:
        model: folder or hub name of a checkpoint; default: the demo model in this repository.
        settings: fields of EngineConfig.

    Raises:
        ConfigError: an unknown setting, or settings or a checkpoint that do not work.
    """

    def __init__(self, model: str = DEMO_MODEL, **settings: Any) -> None:
        settings = read_settings(settings)
        # Offline prompts are submitted all at once, so the waiting queue must hold them.
        settings.setdefault("max_num_waiting", 2**20)
        self._engine = Engine(EngineConfig(model=str(model), **settings))
        self._embedder = Embedder(self._engine)
        self._loop = LoopThread()
        # Runs once: at close, when the object is collected, or at the interpreter's exit.
        # Created before the thread starts, because a Ctrl-C may arrive between any two lines.
        self._finalizer = weakref.finalize(self, self._loop.stop, self._engine.close)
        try:
            self._loop.start()
            self._run(self._engine.start)
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def resolved(self) -> ResolvedConfig:
        """The settings with every "auto" filled in."""
        return self._engine.resolved

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        predictions: Sequence[str | Sequence[int] | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, or {"prompt_token_ids": ids}. Returns one output per prompt, in order.

        Args:
            predictions: for each prompt, text or token ids that the output probably contains; see `Engine.generate`.
            lora_request: the adapter of all prompts, or that of each; None: the base model.

        Raises:
            InvalidRequest, GrammarError: a prompt or its parameters cannot be served; all others are aborted.
        """
        listed = list_prompts(prompts)
        params = list_params(sampling_params, len(listed))
        expected = [None] * len(listed) if predictions is None else list(predictions)
        if len(expected) != len(listed):
            raise InvalidRequest(
                f"predictions has {len(expected)} entries for {len(listed)} prompts", "predictions"
            )
        adapters = list_adapters(lora_request, len(listed))
        return self._run(
            partial(self._generate_all, listed, params, use_tqdm, priority, cache_salt, expected, adapters)
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, with the model's chat template.

        Args:
            messages: as for Tokenizer.apply_chat_template.
            chat_template_kwargs: template variables, and options of Tokenizer.apply_chat_template.
            lora_request: as for `generate`.

        Raises:
            InvalidRequest, GrammarError: as for `generate`, or the template rejects the messages.
        """
        options = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(options, Mapping):
            raise InvalidRequest(
                f"chat_template_kwargs must be a mapping, not {type(options).__name__}",
                "chat_template_kwargs",
            )
        # Rendered with the requests: images of all conversations would not fit into memory together.
        prompts: list[Prompt | Render] = [
            partial(self._engine.render_chat, each, **options) for each in list_conversations(messages)
        ]
        params, adapters = (
            list_params(sampling_params, len(prompts)),
            list_adapters(lora_request, len(prompts)),
        )
        expected = [None] * len(prompts)
        return self._run(
            partial(self._generate_all, prompts, params, use_tqdm, priority, cache_salt, expected, adapters)
        )

    def embed(self, inputs: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[Embedding]:
        """Return the embedding of each text; see `Embedder.embed`."""
        return self._run(partial(self._embedder.embed, list_prompts(inputs), dimensions))

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[Score]:
        """Return how well each document answers the query; see `Embedder.score`."""
        queries, listed = ([each] if isinstance(each, str) else list(each) for each in (query, documents))
        return self._run(partial(self._embedder.score, queries, listed, instruction))

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine function on the engine, in the engine's own event loop, and return its result."""
        return self._run(partial(work, self._engine))

    def stats(self) -> EngineStats:
        """Return the counters and gauges of the engine."""
        return self._engine.stats()

    def describe_runtime(self) -> dict[str, str | int]:
        """Describe what steps run on now; see `Engine.describe_runtime`."""
        return self._engine.describe_runtime()

    def close(self) -> None:
        """Stop the engine, its threads and the loop. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _generate_all(
        self,
        prompts: Sequence[Prompt | Render],
        params: list[SamplingParams],
        use_tqdm: bool,
        priority: int,
        cache_salt: str | None,
        predictions: Sequence[str | Sequence[int] | None],
        adapters: Sequence[LoRARequest | None],
    ) -> list[RequestOutput]:
        with tqdm(total=len(prompts), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:

            async def run_one(
                prompt: Prompt | Render,
                each: SamplingParams,
                prediction: str | Sequence[int] | None,
                adapter: LoRARequest | None,
            ) -> RequestOutput:
                final = replace(each, output_kind="final")
                outputs = self._engine.generate(
                    await prompt() if callable(prompt) else prompt,
                    final,
                    priority=priority,
                    cache_salt=cache_salt,
                    prediction=prediction,
                    lora_request=adapter,
                )
                last = [output async for output in outputs][-1]
                bar.update()
                return last

            async with asyncio.TaskGroup() as tasks:
                jobs = [
                    tasks.create_task(run_one(*pair))
                    for pair in zip(prompts, params, predictions, adapters, strict=True)
                ]
        return [job.result() for job in jobs]

    def _run(self, work: Work[Result]) -> Result:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM was closed; create a new one")
        future = self._loop.submit(work)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise _first_error(group) from None
        except BaseException:
            future.cancel()  # on Ctrl-C: abort the requests, keep the engine
            raise


def _first_error(group: ExceptionGroup) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class LoopThread:
    """An event loop in its own thread.

    Signals are delivered to the main thread only, so a Ctrl-C cannot interrupt code that runs here.
    """

    def __init__(self) -> None:
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = Thread(target=self._live, name="troupe-llm", daemon=True)
        self._is_started = False

    def start(self) -> None:
        self._is_started = True
        self._thread.start()

    def submit(self, work: Work[Result]) -> Future[Result]:
        """Run a coroutine on the loop. It is created there too, so it is always awaited."""
        outer: Future[Result] = Future()
        loop = self._loop.result()
        loop.call_soon_threadsafe(_start, loop, work, outer)
        return outer

    def stop(self, last_work: Work[None]) -> None:
        """Run one last coroutine and end the thread; do nothing if the thread was never started."""
        if self._is_started:
            self.submit(last_work).result()
            loop = self._loop.result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()

    def _live(self) -> None:
        with asyncio.Runner() as runner:
            self._loop.set_result(runner.get_loop())
            runner.get_loop().run_forever()


def _start(loop: asyncio.AbstractEventLoop, work: Work[Result], outer: Future[Result]) -> None:
    task = loop.create_task(work())
    outer.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel) if outer.cancelled() else None)
    task.add_done_callback(lambda _: _hand_over(task, outer))


def _hand_over(task: asyncio.Task[Result], outer: Future[Result]) -> None:
    if task.cancelled():
        outer.cancel()
        return
    error = task.exception()
    if not outer.set_running_or_notify_cancel():
        return  # the caller cancelled
    if error is None:
        outer.set_result(task.result())
    else:
        outer.set_exception(error)
