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
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from engine.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from engine.cluster.core_host import first_cause
from engine.config import EngineConfig
from engine.config_fields import DEMO_MODEL
from engine.embedder import Classification, Embedder, Embedding, Score
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.front.adapter_catalog import LoRARequest
from engine.input.input_processor import Prompt
from engine.input.tokenizer import Tokenizer
from engine.llm_inputs import Messages, list_conversations, list_each, list_params, list_prompts
from engine.metrics import EngineStats
from engine.model.sampling_defaults import read_sampling_defaults
from engine.outputs import RequestOutput
from engine.resolved_config import ResolvedConfig
from engine.sampling_params import SamplingParams

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]
Render = Callable[[], Coroutine[Any, Any, list[int]]]
# Prompt, parameters, prediction, adapter and priority.
Row = tuple[Prompt | Render, SamplingParams, str | Sequence[int] | None, LoRARequest | None, int]
Item = TypeVar("Item")


class LLM:
    """Offline generation: `LLM(model=...).generate(prompts, sampling_params)`.

    Args:
        model: folder or hub name of a checkpoint; default: the demo model in this repository.
        settings: fields of EngineConfig.

    Raises:
        ConfigError: an unknown setting, or settings or a checkpoint that do not work.
    """

    def __init__(self, model: str = DEMO_MODEL, **settings: Any) -> None:
        # Offline prompts are submitted all at once, so the waiting queue must hold them.
        settings = {"max_num_waiting": 2**20, "disable_log_stats": True} | settings
        self._engine = Engine(EngineConfig(model=str(model), **settings))
        self._embedder = Embedder(self._engine)
        self._default_params: SamplingParams | None = None
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
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        predictions: Sequence[str | Sequence[int] | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, or {"prompt_token_ids": ids}. Returns one output per prompt, in order.

        Args:
            sampling_params: of all prompts, or of each; default: `get_default_sampling_params`.
            priority: of all prompts, or of each; lower runs first.
            predictions: for each prompt, text or token ids that the output probably contains; see `Engine.generate`.
            lora_request: the adapter of all prompts, or that of each; None: the base model.

        Raises:
            InvalidRequest, GrammarError: a prompt or its parameters cannot be served; all others are aborted.
        """
        listed = list_prompts(prompts)
        params = self._list_params(sampling_params, len(listed))
        expected = [None] * len(listed) if predictions is None else list(predictions)
        if len(expected) != len(listed):
            raise InvalidRequest(
                f"predictions has {len(expected)} entries for {len(listed)} prompts", "predictions"
            )
        rows = zip(
            listed, params, expected, list_each("lora_request", lora_request, len(listed)),
            list_each("priority", priority, len(listed)), strict=True,
        )  # fmt: skip
        return self._run(partial(self._generate_all, list(rows), use_tqdm, cache_salt))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, with the model's chat template.

        Args:
            messages, add_generation_prompt, continue_final_message, tools: as for Tokenizer.apply_chat_template.
            chat_template_kwargs: template variables.
            sampling_params, priority, lora_request: as for `generate`.

        Raises:
            InvalidRequest, GrammarError: as for `generate`, or the template rejects the messages.
        """
        given = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(given, Mapping):
            raise InvalidRequest(
                f"chat_template_kwargs must be a mapping, not {type(given).__name__}", "chat_template_kwargs"
            )
        options = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message, "tools": tools, **given,
        }
        # Rendered with the requests: images of all conversations would not fit into memory together.
        prompts: list[Prompt | Render] = [
            partial(self._engine.render_chat, each, **options) for each in list_conversations(messages)
        ]
        count = len(prompts)
        rows = zip(
            prompts, self._list_params(sampling_params, count), [None] * count,
            list_each("lora_request", lora_request, count),
            list_each("priority", priority, count), strict=True,
        )  # fmt: skip
        return self._run(partial(self._generate_all, list(rows), use_tqdm, cache_salt))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that the model recommends, see the setting `generation_config`."""
        if self._default_params is None:
            config = self._engine.config
            found = read_sampling_defaults(config.model, config.generation_config)
            self._default_params = SamplingParams(**found)
        return self._default_params

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers.

        Raises:
            InvalidRequest: the engine was started without a tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequest("this engine was started without a tokenizer", "tokenizer")
        return self.tokenizer.source

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations of each prompt, as far as `beam_width` beams find them."""
        return self._run(partial(self._search_all, list_prompts(prompts), params, use_tqdm))

    def embed(self, inputs: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[Embedding]:
        """Return the embedding of each text; see `Embedder.embed`."""
        return self._run(partial(self._embedder.embed, list_prompts(inputs), dimensions))

    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[Score]:
        """Return how well each document answers the query; see `Embedder.score`."""
        queries, listed = ([each] if isinstance(each, str) else list(each) for each in (query, documents))
        return self._run(partial(self._embedder.score, queries, listed, instruction))

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_task: Literal["embed", "classify"] = "embed"
    ) -> list[Embedding] | list[Classification]:
        """Return vectors: the same as `embed`, or as `classify`.

        Raises:
            InvalidRequest: there is no such task, or as for `embed` and `classify`.
        """
        if pooling_task not in ("embed", "classify"):
            raise InvalidRequest(f"pooling_task={pooling_task!r} must be one of embed, classify", "pooling_task")
        return self.embed(prompts) if pooling_task == "embed" else self.classify(prompts)

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> list[Classification]:
        """Return the probabilities of a reranker's answers for each prompt; see `Embedder.classify`."""
        return self._run(partial(self._embedder.classify, list_prompts(prompts)))

    def sleep(self, level: int = 1) -> None:
        """Free the memory of cache and weights until `wake_up`; see `Engine.sleep`."""
        self._run(partial(self._engine.sleep, level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End a sleep.

        Args:
            tags: both of weights and kv_cache, if any: they wake up together.
        """
        if tags is not None and set(tags) != {"weights", "kv_cache"}:
            raise InvalidRequest(f"tags={tags!r} must be None or both of weights and kv_cache", "tags")
        self._run(self._engine.wake_up)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; see `Engine.reset_prefix_cache`."""
        return self._run(self._engine.reset_prefix_cache)

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

    def _list_params(self, given: Any, count: int) -> list[SamplingParams]:
        return list_params(self.get_default_sampling_params() if given is None else given, count)

    async def _generate_all(
        self, rows: Sequence[Row], use_tqdm: bool, cache_salt: str | None
    ) -> list[RequestOutput]:
        async def run_one(row: Row) -> RequestOutput:
            prompt, params, prediction, adapter, priority = row
            outputs = self._engine.generate(
                await prompt() if callable(prompt) else prompt, replace(params, output_kind="final"),
                priority=priority, cache_salt=cache_salt, prediction=prediction, lora_request=adapter,
            )
            return [output async for output in outputs][-1]

        return await _run_all(run_one, rows, use_tqdm)

    async def _search_all(
        self, prompts: Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool
    ) -> list[BeamSearchOutput]:
        return await _run_all(lambda prompt: search_beams(self._engine, prompt, params), prompts, use_tqdm)

    def _run(self, work: Work[Result]) -> Result:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM was closed; create a new one")
        future = self._loop.submit(work)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise first_cause(group) from None
        except BaseException:
            future.cancel()  # on Ctrl-C: abort the requests, keep the engine
            raise


async def _run_all(
    work: Callable[[Item], Coroutine[Any, Any, Result]], items: Sequence[Item], use_tqdm: bool
) -> list[Result]:
    """Run the work for all items at a time; the first error ends all."""
    with tqdm(total=len(items), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(work(item)) for item in items]
            for job in jobs:
                job.add_done_callback(lambda _: bar.update())
    return [job.result() for job in jobs]


class LoopThread:
    """An event loop in its own thread.

    Signals are delivered to the main thread only, so a Ctrl-C cannot interrupt code that runs here.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._live, name="troupe-llm", daemon=True)
        self._is_started = False

    def start(self) -> None:
        self._is_started = True
        self._thread.start()

    def submit(self, work: Work[Result]) -> Future[Result]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def stop(self, last_work: Work[None]) -> None:
        """Run one last coroutine and end the thread. If it was never started, there is only the loop to close."""
        if not self._is_started:
            self._loop.close()
            return
        self.submit(last_work).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
