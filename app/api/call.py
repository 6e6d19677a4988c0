"""Call: a validated request, independent of the route that received it, and the stream of its answer.

engine ─▶ outputs ─▶ AnswerParser (reasoning, content, calls) ─▶ deltas ─▶ the writer of a dialect
                                                                     └▶ Choice, the fold of its deltas, validated
"""

from __future__ import annotations

import asyncio
import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from app.api.context import ApiContext
from app.api.errors import BadRequest, make_closing_error, make_failure, to_api_error, use_names
from app.api.gate import RequestInfo
from app.api.protocol import MAX_PROMPTS, GenerationFields
from app.api.sampling import Constraint, Names
from app.api.tools.styled_calls import Piece, join_pieces
from app.api.tools.use import ToolUse, explain
from app.concurrency import merge_streams
from app.reasoning import Thinking, make_splitter
from engine import (
    CompletionOutput,
    EngineDead,
    InvalidRequest,
    Logprob,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from grammar import GrammarError, GrammarSpec, OutputCheck

Prompt = str | list[int]
Json = dict[str, Any]

# JSON has no -Infinity; vLLM writes the same number
MIN_LOGPROB = -9999.0
# above this many characters of text and schema, validate in a thread
MAX_CHARS_ON_LOOP = 16_384


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come: the fold of its deltas.

    Attributes:
        index: its number through all prompts; `prompt` is that of its prompt.
        output: the engine's last output.
        is_valid: whether the answer satisfies its constraint; None if there is none, or no independent validator.
        num_reasoning_tokens: how many of its tokens belong to the reasoning.
    """

    index: int
    prompt: int
    output: RequestOutput
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_valid: bool | None = None
    num_reasoning_tokens: int = 0

    def take(self, output: RequestOutput, gained: CompletionOutput) -> None:
        """Add what an output has, except its text."""
        self.output = output
        self.token_ids += gained.token_ids
        if gained.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += gained.logprobs
        self.finish_reason, self.stop_reason = gained.finish_reason, gained.stop_reason

    def read(self, kind: str) -> str:
        """Return the text of one kind: "content" or "reasoning"."""
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)

    @property
    def calls(self) -> list[Piece]:
        return join_pieces([piece for piece in self.pieces if piece.call >= 0])

    @property
    def is_own_end(self) -> bool:
        """Whether the model ended the choice: neither a limit nor a stop string cut it."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


class Delta(NamedTuple):
    """What a choice has gained: pieces of its text, and in `gained` its tokens and their log probabilities."""

    choice: Choice
    pieces: list[Piece]
    gained: CompletionOutput


class AnswerParser:
    """Splits the text of one choice into pieces of reasoning, content and calls."""

    def __init__(self, thinking: Thinking | None, tools: ToolUse | None) -> None:
        self.splitter = None if thinking is None else make_splitter(thinking)
        self._is_shown = thinking is not None and thinking.is_shown
        self._calls = None if tools is None else tools.make_parser()

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces of more text."""
        return self._read(text) if self.splitter is None else self._split(*self.splitter.feed(text))

    def close(self, is_cut: bool) -> list[Piece]:
        """Return the withheld text, of which the beginning of a call is left out if it was cut."""
        pieces = [] if self.splitter is None else self._split(*self.splitter.close())
        return pieces if self._calls is None else [*pieces, *self._calls.close(is_cut)]

    def _split(self, reasoning: str, content: str) -> list[Piece]:
        shown = [Piece("reasoning", reasoning)] if reasoning and self._is_shown else []
        return [*shown, *self._read(content)] if content else shown

    def _read(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Piece("content", text)] if text else []


@dataclass(frozen=True, slots=True)
class Call:
    """A validated request: prompts, sampling, and the ids and names that its reply carries.

    Attributes:
        given: the prompts as the request has them, for a reply that repeats them.
        names: the fields that have another name on the route, for errors; the prompts are the field "prompt".
        prediction: text that the answer probably contains.
        constraint: what is enforced, after the reasoning.
        answer: what the content is validated against.
        echo: the text that a chat reply begins with.
    """

    context: ApiContext
    info: RequestInfo
    body: GenerationFields
    reply_id: str
    model: str
    prompts: list[Prompt]
    sampling: SamplingParams
    constraint: Constraint | None = None
    answer: GrammarSpec | None = None
    tools: ToolUse | None = None
    thinking: Thinking | None = None
    given: Sequence[Prompt] = ()
    prediction: str | None = None
    names: Names = field(default_factory=dict)
    echo: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_scoring(self) -> bool:
        """Whether a request only asks for the probabilities of its prompt: echo with max_tokens=0."""
        return self.body.max_tokens == 0

    async def stream(self) -> AsyncGenerator[list[Delta]]:
        """Run the prompts side by side, and yield what the choices of one of them gain; closing aborts them.

        Raises:
            ApiError: the request's grammar turned out to be unusable, or the server closes.
            EngineError: as `Engine.generate` does.
        """
        runs = [self._run(number) for number in range(len(self.prompts))]
        async with aclosing(runs[0] if len(runs) == 1 else merge_streams(runs)) as steps:
            async for deltas in steps:
                yield deltas

    async def finish(self) -> list[Choice]:
        """Run the prompts to their ends and return all choices."""
        found: dict[int, Choice] = {}
        async with aclosing(self.stream()) as steps:
            async for deltas in steps:
                found |= {delta.choice.index: delta.choice for delta in deltas}
        return [found[index] for index in sorted(found)]

    async def _run(self, number: int) -> AsyncGenerator[list[Delta]]:
        """Parse the outputs of one prompt."""
        found: dict[int, tuple[Choice, AnswerParser]] = {}
        async with aclosing(self._generate(number)) as outputs:
            async for output in outputs:
                deltas = []
                for each in output.outputs:
                    if each.index not in found:
                        choice = Choice(number * self.sampling.n + each.index, number, output)
                        found[each.index] = (choice, AnswerParser(self.thinking, self.tools))
                    choice, parser = found[each.index]
                    gained = self._without_hidden(each) if self.is_scoring else each
                    choice.take(output, gained)
                    pieces = parser.feed(gained.text)
                    if each.is_finished:
                        pieces = join_pieces([*pieces, *parser.close(not choice.is_own_end)])
                    choice.pieces += pieces
                    if each.is_finished:
                        await self._validate(choice, parser)
                    deltas.append(Delta(choice, pieces, gained))
                if output.finished:
                    for choice, _ in found.values():
                        choice.output = output
                yield deltas

    async def _generate(self, number: int) -> AsyncGenerator[RequestOutput]:
        request_id = self.reply_id if len(self.prompts) == 1 else _number(self.reply_id, number)
        prompt = self.prompts[number]
        if not isinstance(prompt, str):
            self.info.prompts[request_id] = (len(prompt), 0)
        is_finished = False
        self.context.open_requests.add(request_id)
        outputs = self.context.engine.generate(
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}, self.sampling, request_id,
            priority=self.body.priority, cache_salt=self.body.cache_salt, deadline_s=self.body.deadline_s,
            prediction=self.prediction, lora_request=self.context.select_adapter(self.model),
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self.info.note(output)
                    for choice in output.outputs:
                        if choice.finish_reason in ("error", "dead_end"):
                            raise make_failure(choice)
                    is_finished = output.finished
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if not is_finished:
                self.info.finish_reasons.append("abort")
            raise
        except EngineDead as error:
            if self.context.engine.state != "closed":
                raise
            self.info.finish_reasons.append("abort")
            raise make_closing_error() from error
        except GrammarError as error:
            param = None if self.constraint is None else self.constraint.param
            if self.tools is not None and param == "tools":
                raise explain(error, self.tools) from error
            raise to_api_error(error, param) from error
        except InvalidRequest as error:
            if error.param == "prompt":
                place = f"prompt[{number}]: " if len(self.prompts) > 1 else ""
                raise type(error)(f"{place}{error}", self.names.get("prompt", "prompt")) from error
            if error.param != "grammar" or self.constraint is None:
                raise use_names(error, self.names) from error
            # the engine reports a slow compile under its own parameter name; use this API's field
            raise BadRequest(str(error), self.constraint.param, "invalid_grammar") from error
        finally:
            self.context.open_requests.discard(request_id)

    def _without_hidden(self, given: CompletionOutput) -> CompletionOutput:
        """Return an output without the token that a scored prompt must generate."""
        reason = "length" if given.finish_reason == "stop" else given.finish_reason
        logprobs: list[TokenLogprobs] | None = None if given.logprobs is None else []
        return replace(given, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None)

    async def _validate(self, choice: Choice, parser: AnswerParser) -> None:
        """Validate a finished choice independently of the grammar, and count its reasoning tokens."""
        tokenizer, splitter, token_ids = self.context.engine.tokenizer, parser.splitter, choice.token_ids
        if tokenizer is None:
            return
        if self.thinking is not None and splitter is not None and splitter.has_reasoning:
            mark, ends = self.thinking.end, range(len(token_ids) + 1)
            choice.num_reasoning_tokens = len(token_ids) if not splitter.is_closed else bisect_left(
                ends, True, key=lambda end: mark in tokenizer.decode(token_ids[:end], skip_special_tokens=False)
            )
        if self.answer is not None:
            num_chars = len(self.answer.text) + sum(len(piece.text) for piece in choice.pieces)
            is_long = num_chars > MAX_CHARS_ON_LOOP
            is_valid = await asyncio.to_thread(self._check, choice) if is_long else self._check(choice)
            # a truncated text is never valid
            choice.is_valid = False if is_valid and choice.finish_reason != "stop" else is_valid

    def _check(self, choice: Choice) -> bool | None:
        """Return whether calls fit the tools' schemas, or an answer its own; None if neither can be validated."""
        tools, spec = self.tools, self.answer
        calls = choice.calls
        try:
            if tools is not None and (tools.is_forced or (tools.answer and calls)):
                return bool(calls) and all(map(tools.is_valid_call, calls))
            if tools is not None and tools.answer is not None:
                spec = tools.answer.spec
            return None if spec is None else OutputCheck(spec).is_valid(choice.read("content"))
        except GrammarError:
            return None  # a schema that the engines accept and the validator does not

    def describe(self, kind: str) -> Json:
        """Return the first fields of every reply and chunk."""
        return {
            "id": self.reply_id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.context.system_fingerprint,
        }

    def count(self, choices: Iterable[Choice]) -> Json:
        """Return the usage of finished choices."""
        choices = list(choices)
        outputs = {choice.prompt: choice.output for choice in choices}.values()
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(choice.token_ids) for choice in choices)
        found = usage(num_prompt, num_output, sum(output.num_cached_tokens for output in outputs))
        details: Json = {}
        if self.thinking is not None and self.context.engine.tokenizer is not None:
            details["reasoning_tokens"] = sum(choice.num_reasoning_tokens for choice in choices)
        if self.prediction is not None:
            pairs = [output.metrics.drafts.get("prediction", (0, 0)) for output in outputs]
            num_drafted, num_accepted = (sum(counts) for counts in zip(*pairs, strict=True))
            details["accepted_prediction_tokens"] = num_accepted
            details["rejected_prediction_tokens"] = num_drafted - num_accepted
        return found | ({"completion_tokens_details": details} if details else {})

    def describe_extras(self, choices: Sequence[Choice]) -> Json:
        """Return the fields that a reply about these choices has only on request."""
        found = self.describe_grammar(choices)
        if self.sampling.saves_blocks:
            prompts = {choice.prompt: len(choice.output.prompt_token_ids) for choice in choices}
            found["kv_transfer_params"] = self._describe_saved(sum(prompts.values()))
        return found

    def describe_grammar(self, choices: Sequence[Choice]) -> Json:
        """Return the field with the backend of the grammar and the check; empty without one."""
        info = choices[0].output.grammar
        if info is None:
            return {}
        described: Json = {"backend": info.backend, "compile_time_ms": round(info.compile_time_s * 1000, 3)}
        found = [choice.is_valid for choice in choices]
        return {"structured": described | {"valid": False if False in found else None if None in found else True}}

    def _describe_saved(self, num_tokens: int) -> Json:
        """Return what a proxy passes to the decode server; that server needs only the prompt to find the blocks."""
        transfer = self.context.engine.config.read_kv_transfer()
        assert transfer is not None, "the engine has refused the request"
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": transfer.engine_id,
            "remote_request_id": self.reply_id, "remote_block_ids": [], "remote_host": transfer.kv_ip,
            "remote_port": transfer.kv_port, "remote_num_tokens": num_tokens,
            "tp_size": self.context.engine.config.tensor_parallel_size,
        }

    def describe_logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        """Return log probabilities in OpenAI's chat format: one entry a token with its alternatives."""
        if self.sampling.logprobs is None or logprobs is None:
            return None
        content = []
        for position in logprobs:
            top = [self._describe_token(entry) for entry in position.top[: self.sampling.logprobs]]
            content.append({**self._describe_token(position.token), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _describe_token(self, entry: Logprob) -> Json:
        part = entry.decoded_token.encode("utf-8", "replace") if entry.part is None else entry.part
        found: Json = {"token": self.name_token(entry), "logprob": floor(entry.logprob), "bytes": list(part)}
        if entry.masked_logprob is not None:
            found["masked_logprob"] = floor(entry.masked_logprob)
        return found

    def name_token(self, entry: Logprob) -> str:
        """Return the name of a token as the request wants it."""
        return f"token_id:{entry.token_id}" if self.body.return_tokens_as_token_ids else entry.decoded_token

    def describe_prompt(self, output: RequestOutput) -> list[Json | None] | None:
        """Return vLLM's prompt_logprobs: for each token, a map from token id to its probability; None if unwanted."""
        if self.sampling.prompt_logprobs is None or output.prompt_logprobs is None:
            return None
        return [
            None
            if position is None
            else {
                str(entry.token_id): {
                    "logprob": floor(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token
                }
                for entry in (*position.top, position.token)
            }
            for position in output.prompt_logprobs
        ]


def usage(num_prompt: int, num_output: int, num_cached: int) -> Json:
    """Return OpenAI's usage object without the details of a finished request."""
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output, "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def floor(value: float) -> float:
    """Return a log probability that JSON can represent."""
    # written so that NaN becomes the floor too
    return value if value > MIN_LOGPROB else MIN_LOGPROB


def make_reply_id(prefix: str, info: RequestInfo, body: GenerationFields) -> str:
    given = body.request_id or info.request_id
    # Two live requests must not share an id, and a client may send the same header twice.
    return f"{prefix}{given}-{uuid.uuid4().hex[:8]}"


def list_request_ids(reply_id: str) -> list[str]:
    """Return every engine id of a reply's prompts: its own id, or a numbered one for each of several prompts."""
    return [reply_id, *(_number(reply_id, index) for index in range(MAX_PROMPTS))]


def _number(reply_id: str, index: int) -> str:
    return f"{reply_id}-{index}"
