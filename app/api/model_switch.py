"""ModelSwitch: the ASGI layer that gives a request the context of the model that it names.

It is there only if the server has several models. The body is read here, and given to the route as it came.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.context import ApiContext
from app.api.errors import ApiError, to_api_error
from app.api.gate import WORK_PATHS, read_body
from app.api.model_pool import ModelPool, Role
from app.api.sse import DONE, KEEP_ALIVE, KEEP_ALIVE_S
from app.concurrency import cancel_all
from engine import EngineError

# Routes beside those that generate whose answer depends on the model.
PATHS = WORK_PATHS | {
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens",
}
FORM_MODEL = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,1000})\r\n')


class Named(msgspec.Struct):
    """The fields of a body that are read before its route reads it."""

    model: str | None = None
    stream: bool | None = None


class ModelSwitch:
    """Passes each request on with `state.context` set, once its model is loaded."""

    def __init__(self, app: ASGIApp, pool: ModelPool) -> None:
        self.app = app
        self.pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        body = await read_body(receive)
        receive, named = replay(body, receive), read_named(body, scope)
        role: Role = "extract" if scope["path"] == "/v1/extract" else "chat"
        entry = await self.pool.find(named.model, role)
        async with AsyncExitStack() as held:
            entering = asyncio.ensure_future(held.enter_async_context(self.pool.hold(entry)))
            held.push_async_callback(cancel_all, [entering])
            if named.stream and scope["path"].startswith("/v1/"):
                send = await keep_alive(entering, scope, send)
            try:
                context = await entering
                if scope["path"] in WORK_PATHS:
                    context.engine.check_capacity()
            except (ApiError, EngineError) as error:
                await to_api_error(error).answer(scope["path"])(scope, receive, send)
                return
            scope["state"]["context"] = context
            await self.app(scope, receive, send)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that was read once more."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def read_named(body: bytes, scope: Scope) -> Named:
    """Return the model that a body names; none if it cannot be read, which its route then reports."""
    if b"multipart/form-data" in dict(scope["headers"]).get(b"content-type", b""):
        found = FORM_MODEL.search(body)
        return Named(found[1].decode("utf-8", "replace") if found else None)
    try:
        return msgspec.json.decode(body, type=Named)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return Named()


async def keep_alive(entering: asyncio.Task[ApiContext], scope: Scope, send: Send) -> Send:
    """Open an event stream with comments while a model takes long to load; return what sends the rest of the answer."""
    is_open = False
    while not (await asyncio.wait([entering], timeout=KEEP_ALIVE_S))[0]:
        if not is_open:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_open = True
        await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
    if not is_open:
        return send
    is_error, is_named = False, scope["path"].startswith(("/v1/messages", "/v1/responses"))

    async def send_rest(message: Message) -> None:
        nonlocal is_error
        if message["type"] == "http.response.start":
            is_error = message["status"] >= 400
        elif is_error and is_named:
            await send({**message, "body": b"event: error\ndata: " + message["body"] + b"\n\n"})
        elif is_error:
            await send({**message, "body": b"data: " + message["body"] + b"\n\n" + DONE})
        else:
            await send(message)

    return send_rest
