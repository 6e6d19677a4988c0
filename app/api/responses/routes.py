"""POST /v1/responses: create, in one reply or as typed events; GET and DELETE of a stored response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api import chat
from app.api.call import Call
from app.api.context import ApiContext, Context
from app.api.errors import BadRequest
from app.api.own_names import own_names
from app.api.responses.request import RENAMED, ResponsesRequest, make_chat_request
from app.api.responses.writer import ResponseWriter
from app.api.sse import STREAMED, EventStream, unless_gone
from app.api.visit import Visit

Json = dict[str, Any]

router = APIRouter()


@router.post("/v1/responses", responses=STREAMED)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    """Answer an input, in one reply or as a stream."""
    visit = request.state.visit
    before: list[Json] = []
    if (last := body.previous_response_id) is not None:
        before = context.responses.get(last, visit.key_number, "previous_response_id").items

    def keep(reply: Json) -> None:
        if body.store is not False:
            context.responses.put(reply, before, body.input, visit.key_number)

    writer = ResponseWriter(await prepare(body, visit, context, before), body, keep)
    if body.stream:
        return EventStream(writer.stream, context.config.keep_alive_s, b"", writer.frame_error, writer.keep_alive)
    return JSONResponse(await unless_gone(request.receive, writer.finish()))


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
    if asked.logprobs and call.make_reader() is not None:
        message = (
            "logprobs beside tools or reasoning are on /v1/chat/completions only: they cover the whole output"
        )
        raise BadRequest(message, "include", "unsupported_field")
    return call
