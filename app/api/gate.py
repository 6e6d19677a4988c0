"""Gate: the ASGI layer around every route, the page included. Keys, request ids, body size.

With keys set, everything but /health asks for one. A program sends `Authorization: Bearer KEY` or
`x-api-key: KEY`; a browser asks its user (Basic: any name, a key as password) and then sends it with every
request, so that page and API have one and the same guard.

It is no `BaseHTTPMiddleware`: that would put a queue between a stream and its socket and hide disconnects.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import uuid
from collections.abc import Iterable, MutableMapping
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import ApiError

OPEN_PATHS = frozenset(("/health", "/ping"))
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
Headers = dict[bytes, bytes]


class Gate:
    """Lets a request through when its key and size are right, and names it."""

    def __init__(self, app: ASGIApp, keys: Iterable[str] = (), max_body_bytes: int = 32 * 2**20) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or not self.keys:
                await self.app(scope, receive, send)
            return
        headers: Headers = dict(scope["headers"])
        request_id = _read_request_id(headers)
        _state_of(scope)["request_id"] = request_id
        send = _with_header(send, b"x-request-id", request_id.encode())
        try:
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            self._check_length(headers)
        except ApiError as error:
            await error.answer(scope["path"])(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), send)

    def _check_key(self, headers: Headers) -> None:
        if not self.keys:
            return
        given = headers.get(b"x-api-key") or read_key(headers.get(b"authorization", b""))
        if not is_one_of(given, self.keys):
            what = "the API key is wrong" if given else "an API key is needed: send Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key")

    def _check_length(self, headers: Headers) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise ApiError(400, "Content-Length must be a number", code="invalid_header")
        # int() of a very long text is slow, and such a length is too large anyway
        if len(length) > 18 or int(length) > self.max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """Count the body of a request that does not state its length."""
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self.max_body_bytes:
                    # FastAPI turns any other error into a 400 while it reads the body
                    raise HTTPException(413, str(self._too_large()))
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


def _read_request_id(headers: Headers) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def is_one_of(given: bytes, keys: Iterable[bytes]) -> bool:
    """Compare with every key, in constant time: how long it takes says nothing about any of them."""
    matches = [secrets.compare_digest(given, key) for key in keys]
    return any(matches)


def read_key(authorization: bytes) -> bytes:
    """The key of a Bearer header, or the password of a Basic one, which is what a browser sends."""
    scheme, _, value = authorization.partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _state_of(scope: Scope) -> MutableMapping[str, Any]:
    state: MutableMapping[str, Any] = scope.setdefault("state", {})
    return state


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (name, value)]
        await send(message)

    return send_with_header
