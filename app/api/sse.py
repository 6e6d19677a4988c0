"""EventStream: server-sent events whose errors, silences and vanished clients are all handled.

before the first frame    an error still becomes a plain answer with its own status
a long wait for it        the stream opens, with a comment every few seconds, or with the dialect's own events: some
                          clients count only those (they have the first after a second)
after the first frame     an error becomes a last event that holds the error object
the client goes away      the producer is cancelled wherever it waits, which aborts its request
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.errors import CLOSING, ApiError, to_api_error
from engine import EngineError

logger = logging.getLogger("troupe.api")

Emit = Callable[[bytes], Awaitable[None]]
Producer = Callable[[Emit], Awaitable[object]]
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 5.0  # between comments, or events, while nothing else is sent
FIRST_EVENT_S = 1.0
CLIENT_CLOSED_REQUEST = 499
# the entry of a route in the OpenAPI document
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def frame(value: Any) -> bytes:
    """Return one event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def frame_named(kind: str, fields: dict[str, Any]) -> bytes:
    """Return one event of a dialect that names its events after their types."""
    return f"event: {kind}\n".encode() + frame({"type": kind, **fields})


class EventStream(Response):
    """A response whose frames come from `produce(emit)`.

    Args:
        end: what follows the last frame.
        frame_error: how an error after the first frame is written.
        keep_alive: makes the events of a silence; None for comments, before the first frame only.
        keep_alive_s: seconds between them; default: KEEP_ALIVE_S.
    """

    media_type = "text/event-stream"

    def __init__(
        self, produce: Producer, end: bytes = DONE,
        frame_error: Callable[[ApiError], bytes] = lambda error: frame(error.body),
        keep_alive: Callable[[], bytes] | None = None, keep_alive_s: float | None = None,
    ) -> None:
        self.produce = produce
        self.end = end
        self.frame_error = frame_error
        self.keep_alive = keep_alive
        self.keep_alive_s = KEEP_ALIVE_S if keep_alive_s is None else keep_alive_s
        self.status_code = 200
        self.background: BackgroundTask | None = None
        # no proxy may collect the stream before it passes it on
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._is_open = False
        self._num_frames = 0
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive, group.cancel_scope)
            try:
                await self.produce(self.emit)
                await self._write(self.end, more_body=False)
            except Exception as error:
                # the border of the process: whatever it was, the client gets one answer
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            await self._fail(failure, scope, receive)

    async def emit(self, frame: bytes) -> None:
        """Send one or more events."""
        self._num_frames += 1
        await self._write(frame)

    async def _watch(self, receive: Receive, cancel_scope: anyio.CancelScope) -> None:
        """Cancel the producer when the client is gone; show that we live while it is silent."""
        wait_s = self.keep_alive_s if self.keep_alive is None else min(self.keep_alive_s, FIRST_EVENT_S)
        while True:
            num_frames = self._num_frames
            with anyio.move_on_after(None if num_frames and self.keep_alive is None else wait_s):
                await wait_for_disconnect(receive)
                cancel_scope.cancel()
                return
            wait_s = self.keep_alive_s
            if num_frames == self._num_frames:
                await self._write(KEEP_ALIVE if self.keep_alive is None else self.keep_alive())

    async def _write(self, frame: bytes, more_body: bool = True) -> None:
        if not self._is_open:
            self._is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send({"type": "http.response.body", "body": frame, "more_body": more_body})

    async def _fail(self, error: Exception, scope: Scope, receive: Receive) -> None:
        known = to_api_error(error)
        if known.code == CLOSING:
            logger.info("a stream was cut off: %s", known)
        elif known.status == 500:
            # The engine has logged its own traceback; do not repeat it for every open stream.
            is_told = isinstance(error, EngineError | ApiError)
            logger.error("a stream failed: %s", error, exc_info=None if is_told else error)
        if self._is_open:
            await self._write(self.frame_error(known) + self.end, more_body=False)
        else:
            await known.answer(scope["path"])(scope, receive, self._send)


class JsonLines(EventStream):
    """A stream of JSON lines."""

    media_type = "application/x-ndjson"


async def drop(frame: bytes) -> None:
    """Emit nothing: for an answer in one piece that is made as a stream."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await the work of an answer in one piece."""
    results: list[Result] = []
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await wait_for_disconnect(receive)
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            results.append(await work)
        except Exception as error:
            # raised again below: the task group would wrap it, and its handler would not know it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not results:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the request")
    return results[0]
