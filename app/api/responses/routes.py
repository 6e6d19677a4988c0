"""POST /v1/responses: create, in one reply or as typed events; the other routes read, cancel or delete a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from app.api import chat
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest
from app.api.fields import warn
from app.api.gate import RequestInfo
from app.api.model_pool import Pool
from app.api.responses.events import frame_event, list_events
from app.api.responses.request import CountRequest, ResponsesRequest, read_request
from app.api.responses.store import pick_page
from app.api.responses.tools import read_tools
from app.api.responses.writer import ResponseWriter
from app.api.sse import STREAMED, Emit, EventStream, unless_gone

Json = dict[str, Any]

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=STREAMED)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    """Answer an input, in one reply or as a stream."""
    info = request.state.info
    responses, owner = context.responses, info.owner
    before = await _read_stored(body, info, context)
    if body.store is not False:
        await responses.make_room(owner)

    def keep(reply: Json) -> None:
        if body.store is not False:
            responses.put(reply, before, body.input, owner)

    writer = await make_writer(body, info, context, before, keep)
    response_id = writer.call.reply_id

    async def stream(emit: Emit) -> Json:
        return await responses.run(response_id, owner, writer.stream(emit))

    if body.stream:
        return EventStream(stream, b"", writer.frame_error, writer.keep_alive)
    work = responses.run(response_id, owner, writer.finish())
    return JSONResponse(await unless_gone(request.receive, work))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: CountRequest, request: Request, context: Context) -> Json:
    """Return the length of the prompt of a request."""
    info = request.state.info
    writer = await make_writer(body, info, context, await _read_stored(body, info, context))
    return {"object": "response.input_tokens", "input_tokens": len(writer.call.prompts[0])}


@router.get("/v1/responses/{response_id}", responses=STREAMED, response_model=None)
async def retrieve_response(
    response_id: str, request: Request, context: Context, stream: bool = False, starting_after: int = -1
) -> Json | Response:
    """Return a stored response, or its events after a number."""
    reply = (await context.responses.get(response_id, request.state.info.owner)).reply
    if not stream:
        return reply
    frames = [frame_event(*event, number) for number, event in enumerate(list_events(reply))]

    async def send(emit: Emit) -> None:
        await emit(b"".join(frames[starting_after + 1 :]))

    return EventStream(send, b"")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str, request: Request, context: Context, limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None, order: Literal["asc", "desc"] = "desc",
) -> Json:
    """List the input of a stored response."""
    items = (await context.responses.get(response_id, request.state.info.owner)).input_items
    return pick_page(items, limit, after, order)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request, context: Context, pool: Pool) -> Json:
    """End a response that is being written, and return it."""
    running = context.responses.find_running(response_id, request.state.info.owner)
    if running is not None:
        await pool.abort(response_id)
        await running.ended.wait()
        if running.reply is not None:
            return running.reply
    reply = (await context.responses.get(response_id, request.state.info.owner)).reply
    if reply["status"] == "cancelled":
        return reply
    message = f"the response {response_id[:80]!r} is {reply['status']}: only one that is being written can be cancelled"
    raise BadRequest(message, "response_id")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, context: Context) -> Json:
    """Delete a stored response."""
    await context.responses.drop(response_id, request.state.info.owner)
    return {"id": response_id, "object": "response", "deleted": True}


async def make_writer(
    body: ResponsesRequest, info: RequestInfo, context: ApiContext, before: Sequence[Json] = (),
    keep: Callable[[Json], None] = lambda reply: None,
) -> ResponseWriter:
    """Check the request and render its prompt, as a chat request.

    Args:
        before: the items of the conversation that the input continues.
        keep: stores the response.

    Raises ApiError, InvalidRequest: the request is not supported; the error has this route's field names.
    """
    tools = read_tools(body.tools or ())
    asked = read_request(body, tools, before)
    call = await chat.prepare(asked, info, context, "resp_")
    has_logprobs = not call.tools and not call.thinking
    if asked.fields.logprobs and not has_logprobs:
        warn("include: logprobs were left out beside tools or reasoning: they cover the whole output, not its message")
    return ResponseWriter(call, body, tools.names, keep, has_logprobs)


async def _read_stored(body: ResponsesRequest, info: RequestInfo, context: ApiContext) -> list[Json]:
    """Put stored items in place of references to them, and return the items of the response before."""
    if isinstance(body.input, list):
        body.input = await context.responses.resolve(body.input, info.owner)
    if (last := body.previous_response_id) is None:
        return []
    return await context.responses.read_items(last, info.owner)
