"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api.call import Call, Choice, Delta, make_reply_id, usage
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest, use_names
from app.api.gate import RequestInfo
from app.api.messages import (
    has_files,
    has_tool_messages,
    read_messages,
    read_reasoning,
    read_template_kwargs,
    show_messages,
    write_as_text,
)
from app.api.protocol import ChatFields, ChatRequest
from app.api.sampling import Constraint, Names, chat_sampling, read_constraint
from app.api.sse import STREAMED, Emit, EventStream, frame, unless_gone
from app.api.tools.styled_calls import Piece
from app.api.tools.use import (
    AUTO,
    Tool,
    ToolChoice,
    read_choice,
    read_functions,
    read_tools,
    use_tools,
)
from app.reasoning import Thinking, gate_grammar, prepare_prompt
from engine import InvalidRequest, RequestOutput

Json = dict[str, Any]

router = APIRouter(route_class=JsonRoute)
# kind of a call -> the field of its text
CALL_TEXTS = {"function": "arguments", "custom": "input"}
UNSET = ("annotations", "audio", "function_call", "reasoning", "reasoning_content")  # null in a message, as in vLLM


@router.post("/v1/chat/completions", responses=STREAMED)
async def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Response:
    """Answer a conversation, in one reply or as a stream."""
    writer = ChatWriter(await prepare(read_chat(body), request.state.info, context))
    if body.stream:
        return EventStream(writer.stream)
    return JSONResponse(await unless_gone(request.receive, writer.finish()))


class ReplyWriter(ABC):
    """Writes the reply of a chat or text completion with all its choices, whole or as chunks.

    A chunk of plain text costs one JSON string and two joins. Chunks that carry more (log probabilities, token ids,
    running usage, an end) are built as dicts: they are rare, or their reader asked for the work.

    Attributes:
        NAMES: `object` of a reply and of a chunk, and the field of the text in a choice of a chunk.
    """

    NAMES: ClassVar[tuple[str, str, str]]

    def __init__(self, call: Call) -> None:
        self.call = call
        self._header = call.describe(self.NAMES[1])
        if call.body.include_usage:
            self._header["usage"] = None  # OpenAI's chunks before the one with the usage have it as null
        self._is_plain = not (
            call.sampling.logprobs is not None or call.body.return_token_ids or call.body.continuous_usage
        )
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._begun: set[int] = set()  # the prompts that have chunks
        self._choices: dict[int, Choice] = {}

    @abstractmethod
    def write_content(self, pieces: Iterable[Piece], is_whole: bool = False) -> Any:
        """Return pieces of an answer, or all of them, as the field of the text has them."""

    @abstractmethod
    def write_first(self, index: int, output: RequestOutput) -> Json | None:
        """Return the entry of a choice before its own text; None if there is nothing to write."""

    @abstractmethod
    def write_logprobs(self, delta: Delta) -> Json | None:
        """Return the log probabilities of a delta."""

    @abstractmethod
    def write_choice(self, choice: Choice) -> Json:
        """Return the entry of a finished choice in a whole reply."""

    def write_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    async def finish(self) -> Json:
        """Run the request to its end and return the reply."""
        choices = await self.call.finish()
        return {
            **self.call.describe(self.NAMES[0]),
            "choices": [self.write_choice(choice) for choice in choices], "usage": self.call.count(choices),
            **self.write_more(choices[0].output), **dict.fromkeys(("service_tier", "kv_transfer_params")),
            **self.call.describe_extras(choices),
        }

    def write_more(self, output: RequestOutput) -> Json:
        """Return further fields of a whole reply."""
        return {}

    async def stream(self, emit: Emit) -> None:
        """Emit the chunks as they come, then the usage."""
        async with aclosing(self.call.stream()) as steps:
            async for deltas in steps:
                if data := b"".join(self._write(deltas)):
                    await emit(data)
        if self.call.body.include_usage:
            total = self.call.count(self._choices.values())
            await emit(frame({**self._header, "choices": [], "usage": total}))

    def _write(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        prompt, n = deltas[0].choice.prompt, self.call.sampling.n
        if prompt not in self._begun:
            self._begun.add(prompt)
            yield from (self._first(index, deltas[0].choice.output) for index in range(prompt * n, (prompt + 1) * n))
        for delta in deltas:
            self._choices[delta.choice.index] = delta.choice
            yield self._delta(delta)
            if delta.gained.is_finished:
                yield self._last(delta.choice)

    def _first(self, index: int, output: RequestOutput) -> bytes:
        entry, more = self.write_first(index, output), self._count(output, 0)
        if self.call.body.return_token_ids:
            more = {"prompt_token_ids": output.prompt_token_ids} | more
        if entry is None and not more:
            return b""
        return frame({**self._header, "choices": [entry or self._entry(index, self.write_content([]))], **more})

    def _delta(self, delta: Delta) -> bytes:
        pieces, index = delta.pieces, delta.choice.index
        if not pieces and (self._is_plain or not delta.gained.token_ids):
            return b""
        if self._is_plain and len(pieces) == 1 and pieces[0].kind == "content":
            head, tail = self._templates.get(index) or self._make_template(index)
            return head + encode_basestring_ascii(pieces[0].text).encode("ascii") + tail
        entry = self._entry(index, self.write_content(pieces))
        entry["logprobs"] = self.write_logprobs(delta)
        if self.call.body.return_token_ids:
            entry["token_ids"] = list(delta.gained.token_ids)
        more = self._count(delta.choice.output, len(delta.choice.token_ids))
        return frame({**self._header, "choices": [entry], **more})

    def _last(self, choice: Choice) -> bytes:
        """Return the chunk of an end, and nothing else: clients stop there."""
        entry = self._entry(choice.index, "" if self.NAMES[2] == "text" else {})
        entry |= {"finish_reason": self.write_reason(choice), "stop_reason": choice.stop_reason}
        extras, more = self.call.describe_extras([choice]), self._count(choice.output, len(choice.token_ids))
        return frame({**self._header, "choices": [entry], **extras, **more})

    def _entry(self, index: int, content: Any) -> Json:
        return {"index": index, self.NAMES[2]: content, "logprobs": None, "finish_reason": None}

    def _make_template(self, index: int) -> tuple[bytes, bytes]:
        mark = "\x00"
        content = self.write_content([Piece("content", mark)])
        whole = frame({**self._header, "choices": [self._entry(index, content)]})
        head, tail = whole.split(encode_basestring_ascii(mark).encode("ascii"))
        self._templates[index] = (head, tail)
        return head, tail

    def _count(self, output: RequestOutput, num_tokens: int) -> Json:
        """Return the running usage of a choice, if it is wanted."""
        if not self.call.body.continuous_usage:
            return {}
        return {"usage": usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens)}


class ChatWriter(ReplyWriter):
    """Writes a chat completion."""

    NAMES = ("chat.completion", "chat.completion.chunk", "delta")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._is_parsed = call.tools is not None or call.thinking is not None
        self._has_older_calls = isinstance(call.body, ChatRequest) and call.body.has_functions

    def write_content(self, pieces: Iterable[Piece], is_whole: bool = False) -> Json:
        found: Json = {} if self._is_parsed else {"content": ""}
        calls: list[Json] = []
        for piece in pieces:
            if piece.call >= 0:
                text = {CALL_TEXTS[piece.kind]: piece.text}
                call: Json = {} if is_whole else {"index": piece.call}
                if piece.call_id:
                    call |= {"id": piece.call_id, "type": piece.kind, piece.kind: {"name": piece.name} | text}
                else:
                    call[piece.kind] = text
                calls.append(call)
                continue
            # newer clients read the second name of the reasoning
            for name in ("reasoning_content", "reasoning") if piece.kind == "reasoning" else ("content",):
                found[name] = found.get(name, "") + piece.text
        if calls and self._has_older_calls:
            return found | {"function_call": calls[0]["function"]}
        return found | ({"tool_calls": calls} if calls else {})

    def write_first(self, index: int, output: RequestOutput) -> Json:
        is_wordless = self.call.tools is not None and self.call.tools.is_forced
        return self._entry(index, {"role": "assistant", "content": None if is_wordless else self.call.echo})

    def write_logprobs(self, delta: Delta) -> Json | None:
        return self.call.describe_logprobs(delta.gained.logprobs)

    def write_choice(self, choice: Choice) -> Json:
        whole = [Piece(kind, text) for kind in ("reasoning", "content") if (text := choice.read(kind))]
        message = {"role": "assistant", "content": None, "refusal": None}
        message |= self.write_content([*whole, *choice.calls], is_whole=True)
        if self.call.echo:
            message["content"] = self.call.echo + (message["content"] or "")
        return {
            "index": choice.index, "message": dict.fromkeys(UNSET) | message,
            "logprobs": self.call.describe_logprobs(choice.logprobs),
            "finish_reason": self.write_reason(choice), "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self.call.body.return_token_ids else None,
        }

    def write_reason(self, choice: Choice) -> str | None:
        """Return the field of the calls, if there are any and the model ended the choice.

        A stop string may have cut a call short. Clients must not execute it, so the reason stays "stop".
        """
        tools = self.call.tools
        if tools is None or not choice.is_own_end or not choice.calls:
            return choice.finish_reason
        return "function_call" if self._has_older_calls else "tool_calls"

    def write_more(self, output: RequestOutput) -> Json:
        has_ids = self.call.body.return_token_ids
        return {
            "prompt_logprobs": self.call.describe_prompt(output),
            "prompt_token_ids": output.prompt_token_ids if has_ids else None,
        }


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat request of any API: what has been read of it, with errors in the names of its API.

    Attributes:
        messages: as `read_message` returns them.
        names: the fields that have another name in its API.
    """

    fields: ChatFields
    messages: Sequence[Json]
    tools: Sequence[Tool] = ()
    choice: ToolChoice = AUTO
    names: Names = field(default_factory=dict)


def read_chat(body: ChatRequest) -> ChatInput:
    """Return the input of a chat completion.

    Raises ApiError: 400 for messages or tools that are malformed or not supported.
    """
    body = read_reasoning(read_functions(body) if body.has_functions else body)
    choice = read_choice(body.tool_choice, bool(body.tools))
    return ChatInput(body, read_messages(body.messages), read_tools(body.tools), choice)


async def prepare(given: ChatInput, info: RequestInfo, context: ApiContext, id_prefix: str = "chatcmpl-") -> Call:
    """Check everything that costs nothing, then render and tokenise off the loop.

    Raises ApiError, InvalidRequest: the request cannot be served as asked.
    """
    body, names, engine = given.fields, given.names, context.engine
    model = info.model = context.check_model(body.model)
    context.require_ready()
    template = context.template
    answer = read_constraint(body, names)
    tools = None
    if given.tools:
        # The grammar of many tools takes milliseconds.
        tools = await asyncio.to_thread(use_tools, given.tools, given.choice, body, template, answer)
    constraint = answer if tools is None else Constraint("tools", tools.spec)
    if body.add_special_tokens:
        message = "add_special_tokens is not supported here: the chat template writes them"
        raise BadRequest(message, "add_special_tokens", "unsupported_field")
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest("continue_final_message needs add_generation_prompt=false", "continue_final_message")
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        **read_template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
    }
    messages = [
        await context.documents.read(each, engine.sees_images, info.owner) if has_files(each) else each
        for each in given.messages
    ]
    messages = show_messages(messages, engine.sees_images)
    if not template.knows_tools and has_tool_messages(messages):
        messages = write_as_text(messages)
    if tools is not None and template.knows_tools:
        options["tools"] = tools.definitions
    try:
        prompt, thinking = await prepare_prompt(engine, template.supports_reasoning, messages, **options)
    except InvalidRequest as error:
        raise use_names(error, names) from error
    if thinking is not None and thinking.has_channels and tools is not None and not tools.is_bare:
        thinking = None  # the parser of the calls reads the channels
    spec = None if constraint is None else constraint.spec
    # The text shows the special tokens that begin a call; the grammar allows no others.
    shows_special = tools is not None and not tools.is_bare
    if thinking is not None:
        thinking = replace(thinking, is_shown=body.include_reasoning is not False)
        shows_special |= template.hides_reasoning or thinking.has_channels
        if constraint is not None:
            constraint, thinking = think_first(constraint, thinking)
    sampling = chat_sampling(body, constraint, context.sampling_defaults, names, shows_special)
    return Call(
        context, info, body, make_reply_id(id_prefix, info, body), model, [prompt], sampling, constraint, spec, tools,
        thinking, prediction=None if body.prediction is None else body.prediction.text,
        names={"prompt": "messages", **names},
        echo=messages[-1]["content"] if body.echo and messages[-1]["role"] == "assistant" else "",
    )


def think_first(constraint: Constraint, thinking: Thinking) -> tuple[Constraint, Thinking]:
    """Return the constraint of an answer after its reasoning."""
    spec = constraint.spec
    # These texts never begin with a line break, so one belongs to the reasoning.
    allows_breaks = spec.kind in ("json_schema", "json_object", "xml") or constraint.param == "tools"
    gated = Constraint(constraint.param, gate_grammar(spec, thinking, allows_breaks))
    return gated, replace(thinking, keeps_breaks=not allows_breaks)
