"""POST /v1/responses: create, in one reply or as typed events; GET and DELETE of a stored response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from app.api import chat, replies
from app.api.call import Call
from app.api.context import ApiContext, context_of
from app.api.own_names import own_names
from app.api.responses.request import RENAMED, ResponsesRequest, make_chat_request
from app.api.responses.writer import ResponseWriter
from app.api.sse import STREAMED, Emit, EventStream, unless_gone
from app.api.visit import Visit
from engine import CompletionOutput, RequestOutput

Json = dict[str, Any]

router = APIRouter()
Context = Annotated[ApiContext, Depends(context_of)]
ECHOED = ("instructions", "max_output_tokens", "reasoning", "previous_response_id")


@router.post("/v1/responses", responses=STREAMED)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    """Answer an input, in one reply or as a stream."""
    visit = request.state.visit
    before: list[Json] = []
    if (last := body.previous_response_id) is not None:
        before = context.responses.get(last, visit.key_number, "previous_response_id").items
    call = await prepare(body, visit, context, before)

    def keep(reply: Json) -> None:
        if body.store is not False:
            context.responses.put(reply, before, body.input, visit.key_number)

    if body.stream:
        writer, keep_alive_s = make_writer(call, body), context.config.keep_alive_s
        return EventStream(
            lambda emit: stream(call, body, writer, emit, keep), keep_alive_s, b"", writer.frame_error
        )
    output = await unless_gone(request.receive, finish(call))
    reply = whole_reply(call, body, output)
    keep(reply)
    return JSONResponse(reply)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(response_id: str, request: Request, context: Context) -> Json:
    """Return a stored response."""
    return context.responses.get(response_id, request.state.visit.key_number).reply


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, request: Request, context: Context) -> Json:
    """List the input of a stored response."""
    items = context.responses.get(response_id, request.state.visit.key_number).input_items
    data = [{"id": f"msg_{number}", **item} for number, item in enumerate(items)]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False}


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, context: Context) -> Json:
    """Delete a stored response."""
    context.responses.drop(response_id, request.state.visit.key_number)
    return {"id": response_id, "object": "response", "deleted": True}


async def prepare(
    body: ResponsesRequest, visit: Visit, context: ApiContext, before: Sequence[Json] = ()
) -> Call:
    """Check the request and render its prompt, as a chat request.

    Raises:
        ApiError, InvalidRequest: the request is not supported; the error has this route's field names.
    """
    with own_names(RENAMED):
        asked, places = make_chat_request(body, before)
    with own_names(RENAMED | places):
        call, _ = await chat.prepare(asked, visit, context, "resp_")
    return call


async def finish(call: Call) -> RequestOutput:
    """Run the request to its end. Errors have this route's field names."""
    with own_names(RENAMED):
        return await call.finish()


def make_writer(call: Call, body: ResponsesRequest) -> ResponseWriter:
    """Return the writer of the response's items."""
    return ResponseWriter(lambda *parts: describe(call, body, *parts), call.make_reader())


def whole_reply(call: Call, body: ResponsesRequest, output: RequestOutput) -> Json:
    """Return the response object of a finished request."""
    writer = make_writer(call, body)
    choice = output.outputs[0]
    writer.feed(choice.text)
    usage, status = usage_of(call, output, len(choice.token_ids)), status_of(choice)
    extras = replies.structured_of(call, output)
    writer.finish(status, usage, extras)
    return describe(call, body, status, writer.items, usage) | extras


async def stream(
    call: Call, body: ResponsesRequest, writer: ResponseWriter, emit: Emit, keep: Callable[[Json], None]
) -> None:
    """Emit the events of a response, and store it at the end."""
    num_tokens = 0
    is_begun = False
    with own_names(RENAMED):
        async with aclosing(call.generate()) as outputs:
            async for output in outputs:
                choice = output.outputs[0]
                num_tokens += len(choice.token_ids)
                # not before the first output, so that a refused request gets a plain reply with its own status
                data = b"" if is_begun else writer.begin()
                is_begun = True
                if choice.text:
                    data += writer.feed(choice.text)
                if choice.is_finished:
                    usage, extras = usage_of(call, output, num_tokens), replies.structured_of(call, output)
                    data += writer.finish(status_of(choice), usage, extras)
                    keep(describe(call, body, status_of(choice), writer.items, usage) | extras)
                if data:
                    await emit(data)


def describe(call: Call, body: ResponsesRequest, status: str, items: list[Json], usage: Json | None) -> Json:
    """Return the response object."""
    is_cut = status == "incomplete"
    return {
        "id": call.reply_id,
        "object": "response",
        "created_at": call.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": call.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False
        if call.tools is None
        else call.tools.is_parallel,
        "store": body.store is not False,
        "temperature": call.sampling.temperature,
        "text": body.text.model_dump(by_alias=True, exclude_none=True),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": call.sampling.top_p,
        "truncation": "disabled",
        "usage": usage,
        "metadata": body.metadata or {},
        **{name: getattr(body, name) for name in ECHOED},
    }


def status_of(choice: CompletionOutput) -> str:
    """Return how a response ended: by itself, at a limit, or aborted."""
    if choice.finish_reason == "abort":
        return "cancelled"
    return "completed" if choice.finish_reason == "stop" else "incomplete"


def usage_of(call: Call, output: RequestOutput, num_output: int) -> Json:
    """Return the usage under this route's names."""
    num_input = len(output.prompt_token_ids)
    return {
        "input_tokens": num_input,
        # cached tokens are billed separately elsewhere; here they are free
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": replies.num_reasoning_tokens(call) or 0},
        "total_tokens": num_input + num_output,
    }
