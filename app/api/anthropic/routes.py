"""POST /v1/messages and /v1/messages/count_tokens: the API of Anthropic's clients."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from app.api import chat, replies
from app.api.anthropic.request import RENAMED, CountRequest, MessagesRequest, make_chat_request
from app.api.anthropic.writer import MessageWriter, frame_error
from app.api.call import Call
from app.api.context import ApiContext, context_of
from app.api.own_names import own_names
from app.api.sse import STREAMED, Emit, EventStream, unless_gone
from engine import CompletionOutput, RequestOutput

Json = dict[str, Any]
Context = Annotated[ApiContext, Depends(context_of)]

router = APIRouter()


@router.post("/v1/messages", responses=STREAMED)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    with own_names(RENAMED):
        call, _ = await chat.prepare(make_chat_request(body), request.state.visit, context, "msg_")
    writer = MessageWriter(call.make_reader())
    if body.stream:
        keep_alive_s = context.config.keep_alive_s
        return EventStream(lambda emit: stream(call, writer, emit), keep_alive_s, b"", frame_error)
    with own_names(RENAMED):
        output = await unless_gone(request.receive, call.finish())
    choice = output.outputs[0]
    writer.feed(choice.text)
    writer.close()
    message = describe(call, writer.blocks, usage_of(output, len(choice.token_ids)))
    return JSONResponse(message | stop_of(choice, writer.has_calls) | replies.structured_of(call, output))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, context: Context) -> dict[str, int]:
    """How long the prompt of a message request is."""
    with own_names(RENAMED):
        call, _ = await chat.prepare(make_chat_request(body), request.state.visit, context, "msg_")
    prompt = call.prompts[0]
    tokens = await context.engine.encode(prompt) if isinstance(prompt, str) else prompt
    return {"input_tokens": len(tokens)}


async def stream(call: Call, writer: MessageWriter, emit: Emit) -> None:
    """Emit the events of a message."""
    num_tokens = 0
    is_begun = False
    with own_names(RENAMED):
        async with aclosing(call.generate()) as outputs:
            async for output in outputs:
                choice = output.outputs[0]
                num_tokens += len(choice.token_ids)
                data = b""
                if not is_begun:  # not before there is an output: a refused request is a plain answer
                    data = writer.begin(describe(call, [], usage_of(output, 0)))
                    is_begun = True
                if choice.text:
                    data += writer.feed(choice.text)
                if choice.is_finished:
                    data += writer.close()
                    stop, extras = stop_of(choice, writer.has_calls), replies.structured_of(call, output)
                    data += writer.end(stop, usage_of(output, num_tokens), extras)
                if data:
                    await emit(data)


def describe(call: Call, blocks: list[Json], usage: Json) -> Json:
    """The message object, before it is known why it ends."""
    return {
        "id": call.reply_id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def stop_of(choice: CompletionOutput, has_calls: bool) -> Json:
    """Why a message ended, in this API's words."""
    sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif choice.finish_reason == "abort":
        reason = "abort"  # this API has no word for it, and "end_turn" would be a lie
    elif sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(output: RequestOutput, num_output: int) -> Json:
    """Usage; tokens found in the prefix cache are counted apart from the input, as this API does."""
    num_cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }
