"""Ollama's API, over what chat and text completions do: /api/chat, /api/generate, /api/embed, /api/embeddings.

Streams are lines of JSON. Fields that only concern the runner of a model, such as keep_alive, are left out and named
in the header x-troupe-warning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api import chat, completions
from app.api.context import ApiContext, Context, JsonRoute
from app.api.embeddings import finish
from app.api.errors import BadRequest
from app.api.fields import warn
from app.api.messages import read_message
from app.api.ollama import models
from app.api.ollama.messages import make_content, read_messages
from app.api.ollama.request import (
    NAMES,
    EmbedFields,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedPrompt,
    OllamaGenerate,
    own_model,
)
from app.api.ollama.writer import AnswerWriter, make_line, show_time
from app.api.protocol import ChatFields, CompletionRequest
from app.api.sse import JsonLines, unless_gone
from app.api.tools.use import read_tools
from app.json_text import ValueCounter
from engine import Embedding

router = APIRouter(prefix="/api", route_class=JsonRoute)
router.include_router(models.router)
Json = dict[str, Any]

STREAMED: dict[int | str, Json] = {200: {"content": {"application/x-ndjson": {}}}}


@router.post("/chat", responses=STREAMED)
async def answer_chat(body: OllamaChat, request: Request, context: Context) -> Response:
    """Answer a conversation, as lines of JSON or in one piece; without messages, say that the model is loaded."""
    if not body.messages:
        return describe_loaded(body.model, context, {"message": {"role": "assistant", "content": ""}})
    fields, messages = ChatFields.read(body.as_chat(context), NAMES), read_messages(body.messages)
    given = chat.ChatInput(fields, messages, read_tools(body.tools), names=NAMES)
    call = await chat.prepare(given, request.state.info, context)
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
    if is_raw:
        given = body.as_completion(context) | {"prompt": body.prompt}
        if body.logprobs:
            given["logprobs"] = body.top_logprobs or 0
        call = await completions.prepare(CompletionRequest.read(given, NAMES), info, context, NAMES)
        if "max_tokens" not in given:
            call = replace(call, sampling=replace(call.sampling, max_tokens=None))
    else:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": make_content(body.prompt, body.images)})
        names, counter = NAMES | {"messages": "prompt"}, ValueCounter()
        read = [read_message(("prompt",), message, counter) for message in messages]
        fields = ChatFields.read(body.as_chat(context), names)
        call = await chat.prepare(chat.ChatInput(fields, read, names=names | {"prompt": "prompt"}), info, context)
    return await reply(AnswerWriter(call, is_chat=False), request)


async def reply(writer: AnswerWriter, request: Request) -> Response:
    """Return the answer as the request wants it."""
    call = writer.call
    if not call.body.stream:
        return JSONResponse(await unless_gone(request.receive, writer.finish()))
    return JsonLines(
        writer.stream, b"", frame_error=lambda error: make_line(error.ollama_body),
        keep_alive=lambda: make_line(writer.piece("")),
    )


def describe_loaded(name: str, context: ApiContext, answer: Json) -> Response:
    """Return the reply to a request that asks for nothing but the model."""
    model = context.check_model(own_model(name, context))
    context.require_ready()
    head = {"model": model, "created_at": show_time(context.created)}
    return JSONResponse(head | answer | {"done": True, "done_reason": "load"})


@router.post("/embed")
async def embed(body: OllamaEmbed, request: Request, context: Context) -> JSONResponse:
    """Return one vector per text; texts are cut to the model's length unless truncate is false."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    found = await embed_texts(texts, body, request, context)
    vectors = [each.vector.tolist() for each in found]
    num_tokens = sum(each.num_tokens for each in found)
    model = own_model(body.model, context)
    return JSONResponse({"model": model, "embeddings": vectors, "prompt_eval_count": num_tokens})


@router.post("/embeddings")
async def embed_prompt(body: OllamaEmbedPrompt, request: Request, context: Context) -> JSONResponse:
    """Return the vector of one text: the older form of /api/embed."""
    (found,) = await embed_texts([body.prompt], body, request, context)
    return JSONResponse({"embedding": found.vector.tolist()})


async def embed_texts(
    texts: list[str], body: EmbedFields, request: Request, context: ApiContext
) -> list[Embedding]:
    """Return what each text becomes, in order."""
    model = context.check_model(own_model(body.model, context))
    context.require_ready()
    if not texts:
        return []
    most = -1 if body.truncate else None
    adapter = context.select_adapter(model)
    work = context.embedder.embed(texts, body.dimensions, lora_request=adapter, max_tokens=most)
    found = await finish(work, request, model)
    if any(each.is_cut for each in found):
        warn("an input was cut to the tokens that the model reads")
    return found
