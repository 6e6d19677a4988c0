"""Gate: the ASGI layer around every route, the page included. Origins, keys, request ids, body size, the log.

With keys set, everything but the health of the server asks for one. A program sends `Authorization: Bearer KEY` or
`x-api-key: KEY`. A browser asks its user (key_page.py) and keeps the key in a cookie. It adds that to requests by
itself, so a cookie opens the page and what only reads, and no POST of the API.

It is not a `BaseHTTPMiddleware`, which would put a queue between a stream and its socket and hide disconnects.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.body_decoder import BodyDecoder, make_decoder
from app.api.errors import (
    API_PREFIXES,
    FOR_ANTHROPIC,
    HEALTH_PATHS,
    REQUEST_ID,
    ApiError,
    BadRequest,
    to_api_error,
)
from app.api.fields import WARNINGS
from app.api.key_page import KEY_PATH, ask_for_key, let_in, read_cookie, read_form, wants_page
from app.api.origins import SAFE_METHODS, AllowedOrigins
from app.json_text import TOO_MANY_VALUES, ValueCounter
from engine import EngineOverloaded, RequestOutput

logger = logging.getLogger("troupe.requests")

OPEN_PATHS = frozenset(HEALTH_PATHS)
WORK_PATHS = frozenset((
    "/v1/chat/completions", "/v1/completions", "/v1/extract", "/v1/messages", "/v1/responses", "/v1/embeddings",
    "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/api/chat",
    "/api/generate", "/api/embed",
))
VALID_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# a browser's name for its objects in the store
COOKIE = re.compile(rb"(?:^|;\s*)troupe=([\w-]{20,128})(?:;|$)")
COOKIE_AGE_S = 365 * 86400
CLIENT_HEADER = b"x-troupe-client"
MAX_LOGGED_PATH = 200
MAX_WARNING_BYTES = 2000
# Parsers disagree about which of two duplicate headers counts: some use the first, some the last.
SINGLE_HEADERS = frozenset((
    b"authorization", b"content-encoding", b"content-length", b"content-type", b"host", b"origin", b"sec-fetch-site",
    b"x-api-key",
))
Headers = dict[bytes, bytes]


@dataclass(slots=True)
class RequestInfo:
    """The facts of one request; the gate opens it, a Call fills it in.

    Attributes:
        key_number: which of the configured keys it came with, counted from 1; 0 without keys.
        counts_output: whether what is drawn is in the reply; a prompt that is only scored draws one token for nothing.
        owner: whose objects of the store it sees.
        prompts: id of a request of the engine -> tokens of its prompt, and how many of them were found in the cache.
        warnings: the parts of the request that the answer leaves out, for a header of the response.
        ttft_s: time to the first token of whichever of them had one first.
    """

    request_id: str
    key_number: int = 0
    owner: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str = ""
    warnings: list[str] = field(default_factory=list)
    counts_output: bool = True
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_output_tokens: int = 0
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def note(self, output: RequestOutput) -> None:
        """Take in an output of the engine: a delta, or a whole one."""
        self.prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if self.ttft_s is None:
            self.ttft_s = output.metrics.ttft
        for choice in output.outputs:
            self.num_output_tokens += len(choice.token_ids) if self.counts_output else 0
            if choice.finish_reason is not None:
                self.finish_reasons.append(choice.finish_reason)

    def count(self, num_prompt: int, num_output: int, num_cached: int) -> None:
        """Add the tokens of requests whose outputs are not seen here."""
        self.prompts[str(len(self.prompts))] = (num_prompt, num_cached)
        self.num_output_tokens += num_output

    def describe(self, method: str, path: str) -> str:
        """Return the line: text for people and `name=value` pairs for programs, never a prompt or a key."""
        parts = [f"{method} {path} {self.status or 'closed'}", f"id={self.request_id}"]
        if self.key_number:
            parts.append(f"key={self.key_number}")
        if self.model:
            parts.append(f"model={self.model}")
            num_tokens, num_cached = (sum(counts) for counts in zip((0, 0), *self.prompts.values(), strict=True))
            parts.append(f"prompt_tokens={num_tokens} cached_tokens={num_cached}")
            parts.append(f"output_tokens={self.num_output_tokens}")
            parts.append(f"finish={','.join(self.finish_reasons) or 'none'}")
        if self.ttft_s is not None:
            parts.append(f"ttft_ms={self.ttft_s * 1000:.1f}")
        parts.append(f"total_ms={(time.monotonic() - self.started) * 1000:.1f}")
        return " ".join(parts)


class Gate:
    """Admits a request if its key and size are valid, gives it an id, and logs its end.

    Args:
        keys: accepted API keys; empty: no key is required.
        max_requests_per_key: requests to /v1 that one key may have open at a time; None: any number.
        origins: which pages may send requests, and under which names.
        check_room: raises EngineOverloaded when the engine is full; asked before a body is read, so that a crowd
            of refused clients costs those who were admitted next to nothing.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str] = (), max_body_bytes: int = 32 * 2**20,
        max_requests_per_key: int | None = None, origins: AllowedOrigins | None = None,
        check_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)
        self.max_body_bytes = max_body_bytes
        self.max_requests_per_key = max_requests_per_key
        self.origins = origins or AllowedOrigins(checks_host=False)
        self.check_room = check_room
        self._num_open: Counter[int] = Counter()  # by the number of the key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or not self.keys:
                await self.app(scope, receive, send)
            return
        scope = _plain(scope)
        headers: Headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        info = RequestInfo(given if VALID_ID.fullmatch(given) else uuid.uuid4().hex)
        scope.setdefault("state", {})["info"] = info
        WARNINGS.set(info.warnings)
        REQUEST_ID.set(info.request_id)
        FOR_ANTHROPIC.set(b"anthropic-version" in headers)
        is_api = scope["path"].startswith(API_PREFIXES + HEALTH_PATHS)
        more = self.origins.make_cors_headers(headers) if is_api else {"set-cookie": _make_cookie(scope, headers)}
        send = _watched(send, info, more)
        is_work = scope["method"] == "POST" and scope["path"].startswith(("/v1/", "/v2/", "/rerank", "/score", "/api/"))
        try:
            _check_single(scope["headers"])
            if is_api and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await self.origins.answer_preflight(headers)(scope, receive, send)
                return
            if scope["path"] not in OPEN_PATHS:
                self.origins.check(scope["method"], headers, scope["scheme"])
                if self.keys and (scope["method"], scope["path"]) == ("POST", KEY_PATH):
                    key = await read_form(receive)
                    page = let_in(key, scope["scheme"] == "https") if find_key(key, self.keys) else ask_for_key(True)
                    await page(scope, receive, send)
                    return
                takes_cookie = scope["method"] in SAFE_METHODS or not scope["path"].startswith(API_PREFIXES)
                info.key_number = self._find_key(headers, takes_cookie)
                info.owner = make_owner(self.keys[info.key_number - 1] if info.key_number else b"", headers)
            self._check_length(headers)
            if is_work and scope["path"] in WORK_PATHS:
                self.check_room()
            encoding = headers.get(b"content-encoding", b"").decode("latin-1")
            if (decoder := make_decoder(encoding)) is not None:
                receive = self._decoded(receive, decoder)
                # the router passes headers on
                scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-encoding"]
            if scope["path"].startswith("/api/"):
                # Ollama asks for no header: its documentation has curl -d, and LiteLLM sends none.
                headers[b"content-type"] = b"application/json"
                scope["headers"] = list(headers.items())
            is_json = b"json" in headers.get(b"content-type", b"").lower()
            with self._counted(info.key_number if is_work else 0):
                await self.app(scope, self._bounded(receive, is_json), send)
        except (ApiError, EngineOverloaded) as error:
            answer = to_api_error(error).answer(scope["path"])
            if answer.status_code == 401 and not is_api and wants_page(scope["method"], headers):
                answer = ask_for_key(bool(read_keys(headers, True)))
            await answer(scope, receive, send)
        except Exception as error:
            # an unexpected error, which the server logs afterwards; the request log gets id and status as always
            if not info.status:
                await to_api_error(error).answer(scope["path"])(scope, receive, send)
            raise
        finally:
            if is_work or info.status >= 400:
                # the client chose the path: escape it, so that it cannot forge log lines
                path = scope["path"][:MAX_LOGGED_PATH].encode("unicode_escape").decode()
                logger.log(logging.INFO if is_work else logging.DEBUG, "%s", info.describe(scope["method"], path))

    def _find_key(self, headers: Headers, takes_cookie: bool) -> int:
        """Return the number of the request's key, counted from 1; 0 if no key is required."""
        if not self.keys:
            return 0
        given = read_keys(headers, takes_cookie)
        number = max((find_key(key, self.keys) for key in given), default=0)
        if not number:
            what = "the API key is wrong" if given else "an API key is needed: send Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key")
        return number

    @contextmanager
    def _counted(self, key_number: int) -> Iterator[None]:
        """Count a request of a key while it is open."""
        limit = self.max_requests_per_key
        if not key_number or limit is None:
            yield
            return
        if self._num_open[key_number] >= limit:
            message = f"this key has reached its limit of {limit} open requests; try again when one has ended"
            raise ApiError(429, message, code="too_many_requests", retry_after_s=1)
        self._num_open[key_number] += 1
        try:
            yield
        finally:
            self._num_open[key_number] -= 1

    def _check_length(self, headers: Headers) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise BadRequest("Content-Length must be a number", None, "invalid_header")
        # int() of a very long text is slow, and such a length is too large anyway
        if len(length) > 18 or int(length) > self.max_body_bytes:
            raise self._too_large()

    def _decoded(self, receive: Receive, decoder: BodyDecoder) -> Receive:
        """Decompress a body piece by piece, so that it is measured while it grows."""
        has_more = True

        async def receive_decoded() -> Message:
            nonlocal has_more
            try:
                while not (piece := decoder.read()) and has_more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return message
                    decoder.feed(message.get("body", b""))
                    has_more = message.get("more_body", False)
                if not piece:
                    decoder.close()
            except ApiError as error:
                # FastAPI turns any other error into a 400 while it reads the body
                raise HTTPException(error.status, str(error)) from error
            await asyncio.sleep(0)  # many pieces may come out of one packet
            return {"type": "http.request", "body": piece, "more_body": bool(piece)}

        return receive_decoded

    def _bounded(self, receive: Receive, is_json: bool) -> Receive:
        """Count the body of a request without Content-Length, and limit the number of values in a JSON body.

        It is parsed on the event loop, where a value takes longer than its bytes.
        """
        num_bytes, counter = 0, ValueCounter()

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                body = message.get("body", b"")
                num_bytes += len(body)
                # FastAPI turns any other error into a 400 while it reads the body
                if num_bytes > self.max_body_bytes:
                    raise HTTPException(413, str(self._too_large()))
                if is_json:
                    counter.feed(body)
                if counter.is_over:
                    raise HTTPException(413, f"the body {TOO_MANY_VALUES}")
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


async def read_body(receive: Receive) -> bytes:
    """Return the whole body, which the gate has limited."""
    parts = []
    while True:
        try:
            message = await receive()
        except HTTPException as error:  # of `Gate._bounded`
            code = "body_too_large" if error.status_code == 413 else "invalid_encoding"
            raise ApiError(error.status_code, str(error.detail), code=code) from error
        if message["type"] == "http.disconnect":
            raise BadRequest("the client left before the body was complete", None, None)
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _plain(scope: Scope) -> Scope:
    """Return the scope of an API request without needless slashes in its path, and a GET in place of a HEAD.

    The HTTP protocol leaves out the body of the answer to a HEAD; FastAPI's routes know no such method.
    """
    path = re.sub("//+", "/", scope["path"]).rstrip("/") or "/"
    is_api = path.startswith(API_PREFIXES + HEALTH_PATHS)
    method = "GET" if scope["method"] == "HEAD" and (is_api or path == "/") else scope["method"]
    return {**scope, "path": path if is_api else scope["path"], "method": method}


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers if name in SINGLE_HEADERS]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1).decode()
        raise BadRequest(f"the request has more than one {name} header", None, "invalid_header")


def find_key(given: bytes, keys: Iterable[bytes]) -> int:
    """Return the number of the key, counted from 1, or 0. Takes constant time, so that it leaks no key."""
    matches = [secrets.compare_digest(given, key) for key in keys]
    return matches.index(True) + 1 if any(matches) else 0


def read_keys(headers: Mapping[bytes, bytes], takes_cookie: bool = False) -> list[bytes]:
    """Return the keys in a request's headers; one valid key suffices."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    bearer = value.strip() if scheme.lower() == b"bearer" else b""
    found = (headers.get(b"x-api-key", b""), bearer, read_cookie(headers) if takes_cookie else b"")
    return [key for key in found if key]


def make_owner(key: bytes, headers: Mapping[bytes, bytes]) -> str:
    """Return whose objects of the store a request sees: those of its key, or else of its browser's cookie.

    The store has digests only, which open nothing. A router names its client, whose key the server does not know.
    """
    cookie = COOKIE.search(headers.get(b"cookie", b""))
    secret = b"key " + key if key else b"browser " + cookie[1] if cookie is not None else b""
    if client := headers.get(CLIENT_HEADER):
        secret += b" of " + client
    return hashlib.sha256(secret).hexdigest()[:32] if secret else ""


def _make_cookie(scope: Scope, headers: Headers) -> str:
    """Return the header that gives a browser its cookie with the page; empty if it has one."""
    is_page = scope["path"] == "/" and b"text/html" in headers.get(b"accept", b"")
    if not is_page or COOKIE.search(headers.get(b"cookie", b"")):
        return ""
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return f"troupe={secrets.token_urlsafe(32)}; Path=/; Max-Age={COOKIE_AGE_S}; HttpOnly; SameSite=Lax{secure}"


def _watched(send: Send, info: RequestInfo, more: Mapping[str, str]) -> Send:
    """Record the status, and add the request id, a warning if there is one, and further headers."""

    async def send_watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            info.status = message["status"]
            # clients choose the names of fields: no control character may reach a header
            warning = "; ".join(info.warnings).encode("unicode_escape")[:MAX_WARNING_BYTES].decode()
            # the second is Anthropic's name
            ids = dict.fromkeys(("x-request-id", "request-id"), info.request_id)
            added = {**ids, "x-troupe-warning": warning, **more}
            headers = [(name.encode(), value.encode()) for name, value in added.items() if value]
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return send_watched
