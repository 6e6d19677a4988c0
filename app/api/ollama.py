"""Ollama's API, over what chat and text completions do: /api/chat, generate, embed, tags, show, ps, version.

Streams are lines of JSON. Fields that only concern the runner of a model, such as keep_alive, are left out and named
in the header x-troupe-warning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from app import __version__
from app.api import chat, completions, replies
from app.api.call import Call
from app.api.context import ApiContext, Context
from app.api.embeddings import MAX_INPUTS, finish
from app.api.errors import BadRequest
from app.api.fields import VECTOR, warn
from app.api.messages import read_arguments
from app.api.own_names import own_names
from app.api.protocol import MAX_MESSAGES, MAX_TOOLS, ChatRequest, CompletionRequest, Fields, Integer, Strings
from app.api.sse import Emit, JsonLines, unless_gone
from app.api.tokens import require_tokenizer
from app.api.tools.calls import make_message
from app.api.wording import say_value
from app.reasoning import SWITCHES
from engine import CompletionOutput, Embedding, ModelReport, RequestOutput

router = APIRouter(prefix="/api")
Json = dict[str, Any]

SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
# field of a chat or text completion -> its name here, for errors
RENAMED = {
    "max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty", "response_format": "format",
    "reasoning_effort": "think", **{name: f"options.{name}" for name in SAME},
}  # fmt: skip
MAX_SPECIAL = 8  # tokens kept free for those that a tokenizer adds to a text
FOREVER = "9999-12-31T23:59:59Z"  # the model is never unloaded
STREAMED: dict[int | str, Json] = {200: {"content": {"application/x-ndjson": {}}}}


class Options(Fields):
    """The sampling options; those of the runner, such as num_gpu, have no effect."""

    PLACE = "options"

    temperature: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Integer | None = None
    stop: str | Strings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    num_predict: Integer | None = None
    num_ctx: Integer | None = None

    def as_sampling(self, max_model_len: int) -> Json:
        """Return the fields of a chat or text completion."""
        found = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        if found.get("seed", 0) < 0:
            del found["seed"]  # a random one
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict >= 0:  # -1 and -2 set no limit
            found["max_tokens"] = self.num_predict
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            warn(f"options.num_ctx={self.num_ctx} is more than this server's {max_model_len} tokens")
        return found


class AnswerFields(Fields):
    """Common fields of chat and generate."""

    model: str
    stream: bool = True
    format: Any = None
    options: Options = Field(default_factory=Options)
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool = False
    top_logprobs: Integer | None = None

    def as_chat(self, context: ApiContext, messages: list[Json]) -> Json:
        """Return the fields of a chat request."""
        fields = self.as_completion(context) | {"messages": messages, "logprobs": self.logprobs}
        if self.top_logprobs is not None:
            fields["top_logprobs"] = self.top_logprobs
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = dict.fromkeys(SWITCHES, self.think)
        return fields

    def as_completion(self, context: ApiContext) -> Json:
        """Return the fields that chat and text completions have under the same names."""
        fields = {"model": own_model(self.model, context), "stream": self.stream}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            raise BadRequest(f'format={say_value(self.format)} must be "json" or a JSON Schema', "format")
        return fields | self.options.as_sampling(context.engine.resolved.max_model_len)


class OllamaChat(AnswerFields):
    """POST /api/chat."""

    messages: Annotated[list[Json], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Json], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(AnswerFields):
    """POST /api/generate."""

    prompt: str = ""
    system: str = ""
    images: Annotated[list[str], Field(max_length=MAX_MESSAGES)] | None = None
    raw: bool = False


class OllamaEmbed(Fields):
    """POST /api/embed."""

    CONSTRAINTS = VECTOR

    model: str
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    truncate: bool = True
    options: Options = Field(default_factory=Options)


class ModelName(Fields):
    """POST /api/show; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


@router.post("/chat", responses=STREAMED)
async def answer_chat(body: OllamaChat, request: Request, context: Context) -> Response:
    """Answer a conversation, as lines of JSON or in one piece; without messages, say that the model is loaded."""
    if not body.messages:
        return describe_loaded(body.model, context, {"message": {"role": "assistant", "content": ""}})
    fields = body.as_chat(context, read_messages(body.messages)) | {"tools": body.tools}
    with own_names(RENAMED):
        call, _ = await chat.prepare(ChatRequest.read(fields), request.state.info, context)
    return await reply(AnswerWriter(call, is_chat=True), request)


@router.post("/generate", responses=STREAMED)
async def answer_prompt(body: OllamaGenerate, request: Request, context: Context) -> Response:
    """Answer a prompt under the model's chat template, or continue it as it is: raw, or without a template."""
    if not body.prompt and not body.images:
        return describe_loaded(body.model, context, {"response": ""})
    context.require_ready()
    tokenizer = context.engine.tokenizer
    is_raw = body.raw or tokenizer is None or not tokenizer.has_chat_template
    if is_raw and (body.system or body.images):
        name = "system" if body.system else "images"
        raise BadRequest(f"{name} needs a chat template, and raw=true or this model has none", name)
    info = request.state.info
    with own_names(RENAMED | {"messages": "prompt"}):
        if is_raw:
            fields = body.as_completion(context) | {"prompt": body.prompt}
            if body.logprobs:
                fields["logprobs"] = body.top_logprobs or 0
            call = await completions.prepare(CompletionRequest.read(fields), info, context)
            if "max_tokens" not in fields:
                call = replace(call, sampling=replace(call.sampling, max_tokens=None))
        else:
            messages = [{"role": "system", "content": body.system}] if body.system else []
            messages.append({"role": "user", "content": make_content(body.prompt, body.images)})
            call, _ = await chat.prepare(ChatRequest.read(body.as_chat(context, messages)), info, context)
    return await reply(AnswerWriter(call, is_chat=False), request)


async def reply(writer: AnswerWriter, request: Request) -> Response:
    """Return the answer as the request wants it."""
    call = writer.call
    if not call.body.stream:
        return JSONResponse(writer.whole(await unless_gone(request.receive, call.finish())))
    return JsonLines(
        writer.stream, b"", frame_error=lambda error: make_line(error.ollama_body),
        keep_alive=lambda: make_line(writer.piece({"content": ""})),
    )  # fmt: skip


class AnswerWriter:
    """Writes the answer of /api/chat, or of /api/generate."""

    def __init__(self, call: Call, is_chat: bool) -> None:
        self.call = call
        self._is_chat = is_chat
        self._num_tokens = 0
        self._calls: list[Json] = []

    def whole(self, output: RequestOutput) -> Json:
        """Return the answer of a finished request."""
        choice, reader = output.outputs[0], self.call.make_reader()
        self._num_tokens = len(choice.token_ids)
        message: Json = {"content": choice.text}
        if reader is not None:
            message = make_message(reader, choice.text, not replies.is_own_end(choice))
        return self.piece(message, choice) | self._end(output, choice)

    async def stream(self, emit: Emit) -> None:
        """Emit a piece for each output, the calls when they are whole, and the figures."""
        reader = self.call.make_reader()
        async with aclosing(self.call.generate()) as outputs:
            async for output in outputs:
                choice = output.outputs[0]
                self._num_tokens += len(choice.token_ids)
                deltas = [{"content": choice.text}] if reader is None else [reader.feed(choice.text)]
                if reader is not None and choice.is_finished:
                    deltas.append(reader.close(not replies.is_own_end(choice)))
                for delta in deltas:
                    self._take_calls(delta)
                    if delta.get("content") or delta.get("reasoning"):
                        await emit(make_line(self.piece(delta, choice)))
                if choice.is_finished:
                    if self._calls:
                        await emit(make_line(self.piece({"content": "", "tool_calls": self._calls})))
                    await emit(make_line(self.piece({"content": ""}) | self._end(output, choice)))

    def _take_calls(self, delta: Json) -> None:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self._calls.append({"id": part["id"], "function": dict(part["function"])})
            else:
                self._calls[-1]["function"]["arguments"] += part["function"]["arguments"]

    def piece(self, message: Mapping[str, Any], choice: CompletionOutput | None = None) -> Json:
        """Return a part of the answer, with the log probabilities of its tokens if they are wanted."""
        content, thought = message.get("content") or "", message.get("reasoning")
        answer: Json = {"role": "assistant", "content": content} if self._is_chat else {"response": content}
        if thought:
            answer["thinking"] = thought
        if calls := message.get("tool_calls"):
            answer["tool_calls"] = [
                {"id": call["id"], "function": {
                    "index": index, "name": call["function"]["name"],
                    "arguments": read_arguments(call["function"]["arguments"] or "{}") or {},
                }}
                for index, call in enumerate(calls)
            ]  # fmt: skip
        found = None if choice is None else replies.chat_logprobs(self.call, choice)
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self.call.model, "created_at": created}
        body = {"message": answer} if self._is_chat else answer
        return head | body | ({} if found is None else {"logprobs": found["content"]}) | {"done": False}

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> Json:
        """Return the fields of the last part; durations in nanoseconds."""
        times = output.metrics
        first_s, last_s = (
            times.arrival_time if each is None else each for each in (times.first_token_time, times.last_token_time)
        )
        return {
            "done": True,
            "done_reason": choice.finish_reason,
            "total_duration": to_ns(last_s - times.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": to_ns(first_s - times.arrival_time),
            "eval_count": self._num_tokens,
            "eval_duration": to_ns(last_s - first_s),
        }


@router.post("/embed")
async def embed(body: OllamaEmbed, request: Request, context: Context) -> JSONResponse:
    """Return one vector per text; texts are cut to the model's length unless truncate is false."""
    model = context.check_model(own_model(body.model, context))
    context.require_ready()
    texts = [body.input] if isinstance(body.input, str) else body.input
    if body.truncate:
        texts = [await cut(text, context) for text in texts]
    adapter = context.select_adapter(model)
    found: list[Embedding] = []
    if texts:
        work = context.embedder.embed(texts, body.dimensions, lora_request=adapter)
        found = await finish(work, request, model)
    vectors = [each.vector.tolist() for each in found]
    num_tokens = sum(each.num_tokens for each in found)
    return JSONResponse({"model": model, "embeddings": vectors, "prompt_eval_count": num_tokens})


async def cut(text: str, context: ApiContext) -> str:
    """Return as much of a text as the model reads."""
    limit, tokenizer = context.engine.resolved.max_model_len, require_tokenizer(context)
    ids = await context.engine.encode(text[: limit * tokenizer.max_token_chars], add_special_tokens=False)
    room = limit - MAX_SPECIAL
    if len(ids) <= room:
        return text
    warn(f"an input was cut to {room} tokens, which the model reads")
    return tokenizer.decode(ids[:room]).rstrip("\ufffd")


@router.get("/tags")
async def list_models(context: Context) -> Json:
    """List the model under each of its names, and its adapters."""
    context.require_ready()
    report = await context.read_report()
    return {"models": [describe_model(name, context, report) for name in context.model_names]}


@router.get("/ps")
async def list_running(context: Context) -> Json:
    """List the models whose weights are loaded."""
    if context.engine.state != "ready":
        return {"models": []}
    more: Json = {"expires_at": FOREVER, "context_length": context.engine.resolved.max_model_len}
    report = await context.read_report()
    more["size_vram"] = report.weight_bytes
    return {"models": [describe_model(name, context, report) | more for name in context.served_names]}


@router.post("/show")
async def show_model(body: ModelName, context: Context) -> Json:
    """Return what the model is and can do."""
    name = body.model or body.name
    if name is None:
        raise BadRequest("model is required", "model", "missing_field")
    context.check_model(own_model(name, context))
    context.require_ready()
    tokenizer, facts = context.engine.tokenizer, await context.read_template()
    can = {
        "completion": True, "tools": facts.knows_tools, "vision": context.engine.sees_images,
        "thinking": facts.supports_reasoning,
        "embedding": (Path(context.engine.config.model) / "modules.json").is_file(),
    }  # fmt: skip
    report = await context.read_report()
    details = describe_details(context, report)
    return {
        "modelfile": "", "parameters": "", "license": "",
        "template": "" if tokenizer is None else tokenizer.describe()["chat_template"] or "",
        "details": details,
        "model_info": {
            "general.architecture": details["family"],
            "general.parameter_count": report.num_parameters,
            f"{details['family']}.context_length": context.engine.resolved.max_model_len,
        },
        "capabilities": [name for name, is_there in can.items() if is_there],
        "modified_at": show_time(context.created),
    }  # fmt: skip


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": __version__}


def read_messages(given: list[Json]) -> list[Json]:
    """Return messages of chat completions: images as parts, calls and their results with ids."""
    result: list[Json] = []
    waiting: list[tuple[str, Any]] = []  # calls without a result: id, name
    for number, message in enumerate(given):
        content = make_content(message.get("content") or "", message.get("images"))
        read: Json = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            read["reasoning_content"] = message["thinking"]
        if isinstance(calls := message.get("tool_calls"), list):
            read["tool_calls"] = [read_call(call, f"call_{number}_{at}") for at, call in enumerate(calls)]
            waiting += [(call["id"], call["function"].get("name")) for call in read["tool_calls"]]
        elif calls:
            raise BadRequest(f"messages[{number}].tool_calls must be a list", "messages")
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            fitting = [each for each in waiting if each[1] == name] or waiting or [(f"call_{number}", name)]
            read["tool_call_id"] = fitting[0][0]
            waiting = [each for each in waiting if each is not fitting[0]]
        result.append(read)
    return result


def read_call(call: Any, call_id: str) -> Json:
    """Return a call of chat completions, whose arguments are a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest('tool_calls must be {"function": {"name": ..., "arguments": {...}}}', "messages")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": function.get("name"), "arguments": text}}


def make_content(text: Any, images: Any) -> Any:
    """Return the content of a message: the text, after its images if there are any."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise BadRequest("images must be a list of base64 texts", "images")
    parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{each}"}} for each in images]
    return [*parts, {"type": "text", "text": text}]


def own_model(name: str, context: ApiContext) -> str:
    """Return the served name that is meant: Ollama's clients add a tag to names that have none."""
    return name if name in context.model_names else name.removesuffix(":latest")


def describe_loaded(name: str, context: ApiContext, answer: Json) -> Response:
    """Return the reply to a request that asks for nothing but the model."""
    model = context.check_model(own_model(name, context))
    context.require_ready()
    head = {"model": model, "created_at": show_time(context.created)}
    return JSONResponse(head | answer | {"done": True, "done_reason": "load"})


def describe_model(name: str, context: ApiContext, report: ModelReport) -> Json:
    """Return an entry of the lists of models."""
    digest = hashlib.sha256(f"{name} {context.system_fingerprint}".encode()).hexdigest()
    return {
        "name": name, "model": name, "modified_at": show_time(context.created), "digest": digest,
        "size": report.weight_bytes, "details": describe_details(context, report),
    }  # fmt: skip


def describe_details(context: ApiContext, report: ModelReport) -> Json:
    """Return what a list of models says of each."""
    config, num = context.engine.config, report.num_parameters
    return {
        "parent_model": "", "format": "gguf" if config.model.endswith(".gguf") else "safetensors",
        "family": report.architecture, "families": [report.architecture],
        "parameter_size": f"{num / 1e9:.1f}B" if num >= 1e9 else f"{num / 1e6:.1f}M",
        "quantization_level": report.dtype if config.quantization == "none" else config.quantization,
    }  # fmt: skip


def show_time(seconds: float) -> str:
    """Return a time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def make_line(value: Json) -> bytes:
    """Return one line of a stream."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
