"""FakeEngine: the engine's public interface without a model, for tests of the layers above it.

A token is a character, a prompt is answered by a script, and a test decides when tokens come.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine import (
    CompletionOutput,
    EngineConfig,
    EngineDead,
    EngineStats,
    GrammarInfo,
    Histogram,
    InvalidRequest,
    Logprob,
    ModelReport,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from engine.front.adapter_catalog import AdapterCatalog, LoRARequest
from engine.input.incremental_text import WindowedText

EOS = 0
RECORD = '{"name": "Ada", "age": 36}'
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # a schema that RECORD fits


@dataclass
class FakeTokenizer:
    """One token per character; the token's id is the character's number.

    Attributes:
        knows_tools: whether the chat template writes tools into the prompt.
    """

    vocab_size = 0x110000
    bos_token_id = None
    eos_token_ids = (EOS,)
    has_chat_template = True
    max_token_chars = 1

    def describe(self) -> dict[str, Any]:
        return {"chat_template": None}
    knows_tools: bool = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in token_ids if i != EOS or not skip_special_tokens)

    def token_piece(self, token_id: int) -> str:
        return chr(token_id)

    token_text = token_piece

    def make_text(self, prompt_token_ids: Sequence[int] = (), skips_special: bool = True) -> WindowedText:
        return WindowedText(partial(self.decode, skip_special_tokens=skips_special), prompt_token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        lines = "".join(
            f"<{message['role']}>{_join(message['content'])}{self.write_calls(message.get('tool_calls', ()))}\n"
            for message in messages
        )
        if self.knows_tools:
            lines = "".join(f"<tool>{tool['function']['name']}\n" for tool in tools or ()) + lines
        return lines.rstrip("\n") if continue_final_message else lines + "<assistant>" * add_generation_prompt

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Write calls as Hermes does, if the template knows tools."""
        functions = [call["function"] for call in calls] if self.knows_tools else []
        return "\n".join(
            f'<tool_call>\n{{"name": "{each["name"]}", "arguments": {json.dumps(each["arguments"])}}}\n</tool_call>'
            for each in functions
        )


def _join(content: Any) -> Any:
    """A content as text, with <image> for each of its images."""
    return "".join(part.get("text", "<image>") for part in content) if isinstance(content, list) else content


@dataclass(frozen=True)
class FakeWorkerConfig:
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class FakeSchedulerConfig:
    max_num_seqs: int = 64


@dataclass(frozen=True)
class FakeCacheConfig:
    num_bytes: int = 3 * 2**20


@dataclass(frozen=True)
class FakeResolvedConfig:
    max_model_len: int = 2048
    notices: tuple[str, ...] = ()
    worker: FakeWorkerConfig = FakeWorkerConfig()
    scheduler: FakeSchedulerConfig = FakeSchedulerConfig()
    cache: FakeCacheConfig = FakeCacheConfig()


@dataclass
class FakeRequest:
    """The arguments of one call of `generate`, and how it ended."""

    request_id: str
    prompt: str
    params: SamplingParams
    options: dict[str, Any]
    num_generated: int = 0  # tokens at the end of the prompt that the request generated before
    num_sent: int = 0
    is_finished: bool = False
    is_aborted: bool = False


def _refuse_core() -> Any:
    raise EngineDead("a fake engine has no core")


@dataclass(eq=False)
class FakeEngine:
    """Answers with `reply(prompt)`; a request with a grammar gets `record`.

    Attributes:
        reject: raised before the first output.
        fail_after: (number of tokens, error) raised in the middle.
        hold: when set to an Event, nothing comes before it is set.
        step_s: time between two tokens.
    """

    reply: Callable[[str], str] = lambda prompt: (
        f"You said {prompt.splitlines()[-2 if '<' in prompt else -1]}"
    )
    record: str = RECORD
    reject: Exception | None = None
    fail_after: tuple[int, Exception] | None = None
    hold: asyncio.Event | None = None
    step_s: float = 0.0
    config: EngineConfig = field(default_factory=lambda: EngineConfig(served_model_name="fake"))
    state: str = "ready"
    sees_images: bool = False
    refusal: str = ""
    error: str | None = None
    requests: list[FakeRequest] = field(default_factory=list)
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    timeline: list[tuple[str, float]] = field(default_factory=lambda: [("weights", 0.01), ("warm-up", 0.02)])

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def adapters(self) -> AdapterCatalog:
        return AdapterCatalog(False, self.model_name, _refuse_core)

    @property
    def resolved(self) -> FakeResolvedConfig:
        return FakeResolvedConfig()

    @property
    def sleep_level(self) -> int:
        return 0

    def describe_model(self) -> ModelReport:
        return ModelReport(
            "FakeForCausalLM", "troupe", 10**9, 1, 100, "float32", "float32", 4, 4, 4, 1, "none", "none"
        )

    def describe_runtime(self) -> dict[str, str | int]:
        return {"ops": "none"}

    async def start(self) -> None:
        self.state = "ready"

    async def close(self) -> None:
        self.state = "closed"

    async def __aenter__(self) -> "FakeEngine":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def check_capacity(self, count: int = 1) -> None:
        """Do nothing: there is always room."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._need_tokenizer().encode(text, add_special_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **kwargs: Any) -> list[int]:
        tokenizer = self._need_tokenizer()
        return tokenizer.encode(tokenizer.apply_chat_template(messages, **kwargs))

    async def abort(self, request_id: str) -> None:
        for request in self.requests:
            if request.request_id == request_id:
                request.is_aborted = True

    async def reset_prefix_cache(self) -> bool:
        return True

    def replica_stats(self) -> dict[int, Any]:
        return {}

    def describe_replicas(self) -> list[Any]:
        return []

    def stats(self) -> EngineStats:
        running = [r for r in self.requests if not r.is_finished and not r.is_aborted]
        return EngineStats(
            num_running=len(running),
            num_blocks=100,
            num_free_blocks=100 - len(running),
            kv_usage=len(running) / 100,
            generation_tokens=sum(r.num_sent for r in self.requests),
            finished={"stop": sum(r.is_finished for r in self.requests)},
        )

    @staticmethod
    def make_histogram(buckets: tuple[float, ...], values: Sequence[float]) -> Histogram:
        histogram = Histogram(buckets)
        for value in values:
            histogram.observe(value)
        return histogram

    async def generate(
        self,
        prompt: str | list[int] | Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
        generated_token_ids: Sequence[Sequence[int]] = (),
        prediction: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        generated = "".join(chr(each) for ids in generated_token_ids for each in ids)
        text = self._read(prompt) + generated
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "deadline_s": deadline_s}
        if prediction is not None:
            options["prediction"] = prediction
        if lora_request is not None:
            options["lora_request"] = lora_request
        request_id = request_id or f"fake-{len(self.requests)}"
        request = FakeRequest(request_id, text, sampling_params, options, len(generated))
        self.requests.append(request)
        if self.reject is not None:
            raise self.reject
        try:
            async for output in self._play(request):
                yield output
            request.is_finished = True
        finally:
            request.is_aborted = not request.is_finished

    async def _play(self, request: FakeRequest) -> AsyncGenerator[RequestOutput]:
        if self.hold is not None:
            await self.hold.wait()
        params = request.params
        answer, reason, stop_reason = self._cut(request)
        ends = range(1, len(answer) + 1)
        if params.output_kind == "final":
            ends = range(len(answer), len(answer) + 1)
        start = 0
        for end in ends or [0]:
            if self.fail_after is not None and end > self.fail_after[0]:
                raise self.fail_after[1]
            await asyncio.sleep(self.step_s)
            if self.state == "closed":
                raise EngineDead("the engine was closed")
            first = start if params.output_kind == "delta" else 0
            if request.is_aborted:
                answer, reason = answer[:end], "abort"
            is_last = end == len(answer)
            request.num_sent = end
            outputs = [
                make_completion(index, answer[first:end], params, (reason, stop_reason) if is_last else None)
                for index in range(params.n)
            ]
            yield self._output(request, outputs, is_last)
            start = end
            if is_last:
                return

    def _cut(self, request: FakeRequest) -> tuple[str, str, str | None]:
        params = request.params
        answer = self.record if params.grammar is not None else self.reply(request.prompt)
        for stop in params.stop:
            if stop in answer:
                return answer.split(stop)[0], "stop", stop
        if params.max_tokens is not None and len(answer) > params.max_tokens:
            return answer[: params.max_tokens], "length", None
        return answer, "stop", None

    def _output(self, request: FakeRequest, outputs: list[CompletionOutput], is_last: bool) -> RequestOutput:
        ids = [ord(char) for char in request.prompt[: len(request.prompt) - request.num_generated]]
        grammar = request.params.grammar
        wants_prompt = request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=ids,
            outputs=outputs,
            finished=is_last,
            num_cached_tokens=3,
            prompt_logprobs=[None, *map(make_logprob, ids[1:])] if wants_prompt else None,
            metrics=RequestMetrics(1.0, 1.5, 2.0, 3.0),
            grammar=None
            if grammar is None
            else GrammarInfo("fakegrammar", 0.004),
        )

    def _read(self, prompt: str | list[int] | Mapping[str, Any]) -> str:
        if isinstance(prompt, str):
            return prompt
        ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        return "".join(map(chr, ids))

    def _need_tokenizer(self) -> FakeTokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer", "messages")
        return self.tokenizer


def make_logprob(token_id: int) -> TokenLogprobs:
    """A token that was quite likely, and one that was less so."""
    token = Logprob(token_id, -0.25, 1, chr(token_id))
    return TokenLogprobs(token, (token, Logprob(ord("~"), float("-inf"), 2, "~")))


def make_completion(
    index: int, text: str, params: SamplingParams, end: tuple[Any, str | None] | None
) -> CompletionOutput:
    """One choice, cumulative or delta as its text is."""
    ids = [ord(char) for char in text]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=ids,
        logprobs=[make_logprob(i) for i in ids] if params.logprobs is not None else None,
        finish_reason=None if end is None else end[0],
        stop_reason=None if end is None else end[1],
    )
