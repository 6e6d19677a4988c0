"""POST /v1/messages and /v1/messages/count_tokens: the API of Anthropic's clients."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api import chat
from app.api.anthropic.request import CountRequest, MessagesRequest, read_request
from app.api.anthropic.writer import MessageWriter
from app.api.call import Call
from app.api.context import ApiContext, Context, JsonRoute
from app.api.sse import STREAMED, EventStream, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages", responses=STREAMED)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation, in one reply or as a stream."""
    writer = MessageWriter(await prepare(body, request, context))
    if body.stream:
        return EventStream(writer.stream, b"", writer.frame_error, writer.keep_alive)
    return JSONResponse(await unless_gone(request.receive, writer.finish()))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, context: Context) -> dict[str, int]:
    """Return the length of the prompt of a message request."""
    prompt = (await prepare(body, request, context)).prompts[0]
    tokens = await context.engine.encode(prompt) if isinstance(prompt, str) else prompt
    return {"input_tokens": len(tokens)}


async def prepare(body: MessagesRequest, request: Request, context: ApiContext) -> Call:
    """Validate the request and render its prompt."""
    return await chat.prepare(read_request(body), request.state.info, context, "msg_")
