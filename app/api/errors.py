"""The OpenAI error body, and which of our errors answers with which status.

InvalidRequest, GrammarError, bad JSON or fields    400 invalid_request_error
finish_reason dead_end: the request's grammar and   400 invalid_request_error, code dead_end
sampling parameters leave no token
missing or wrong key                                401 authentication_error
another site's page, see origins.py                 403 permission_error
unknown model or route                              404 not_found_error
body over the limit                                 413 invalid_request_error
body in an unknown Content-Encoding                 415 invalid_request_error
EngineOverloaded, EngineSleeping, a starting or     503 service_unavailable (to Anthropic's clients
dead engine, a server that closes                       overloaded_error), Retry-After
LeaseRefused                                        429 rate_limit_error
RequestTimeout                                      504 timeout_error
StoreFull, DiskFull                                 507 server_error, code store_full
EngineDead in mid-request, a bug                    500 server_error
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.api.wording import KINDS, Path, say_place, say_rule, say_value
from app.json_text import RefusedJson
from app.store import DiskFull, StoreError, StoreFull
from engine import (
    CompletionOutput,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    LeaseRefused,
    PromptTooLong,
    RequestTimeout,
)
from grammar import GrammarError, InvalidGrammar, UnsupportedGrammar

logger = logging.getLogger("troupe.api")

MAX_MESSAGE_CHARS = 1000
MAX_PLACE_CHARS = 200
RETRY_AFTER_S = 2.0
CLOSING = "server_closing"
API_PREFIXES = (
    "/v1", "/v2", "/metrics", "/version", "/tokenize", "/detokenize", "/rerank", "/score", "/openapi.json",
    "/api/", "/replicas", "/tokenizer_info",
    "/server_info", "/models", "/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping",
)
HEALTH_PATHS = ("/health", "/ping", "/livez", "/readyz")
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 413: "invalid_request_error",
    415: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error",
}
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error"}
# pydantic's name of a union member in a location, such as function-after[f(), Model]: not a field of the request
UNION_MEMBER = re.compile(r"str|bool|int|float|[a-z-]+\[.*\]")
HIDDEN = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*|\b[A-Za-z]:\\\S+|\b0x[0-9a-fA-F]{4,}\b")


# The id of the request that is being answered, which errors of /v1/messages have; the gate sets it.
REQUEST_ID: ContextVar[str] = ContextVar("request_id")
# whether it comes from a client of Anthropic, on any route; the gate sets it
FOR_ANTHROPIC: ContextVar[bool] = ContextVar("for_anthropic")


class ApiError(Exception):
    """An error reply: status, message and OpenAI's error fields."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None, details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = {
            name: _cut(value) if isinstance(value, str) else value for name, value in (details or {}).items()
        }
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error object; a refused grammar adds keyword, pointer and reason."""
        error = {
            "message": _cut(str(self)), "type": TYPES.get(self.status, "server_error"),
            "param": None if self.param is None else _printable(self.param), "code": self.code,
        }
        return {"error": error | self.details}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Return the same error in the format of /v1/messages."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        error = {"type": kind, "message": _cut(str(self))} | self.details
        return {"type": "error", "error": error, "request_id": REQUEST_ID.get("")}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """Return the same error in the format of Ollama's routes."""
        return {"error": _cut(str(self))}

    def answer(self, path: str = "") -> Response:
        """Return the reply on the given path, in the format of its dialect."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.body
        if path.startswith("/v1/messages") or FOR_ANTHROPIC.get(False):
            body = self.anthropic_body
        elif path.startswith("/api/"):
            body = self.ollama_body
        return JSONResponse(body, self.status, headers)


class BadRequest(ApiError):
    """A 400 that names a field of the request."""

    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(400, message, param, code)


def refuse(where: Path, rule: str, code: str | None = "invalid_value") -> BadRequest:
    """Return the error of a value in the request.

    Args:
        where: its place under the names of the route, such as ("messages", 3, "content").
        rule: what follows the place in the message: " must be a text", or ": its base64 is damaged".
    """
    return BadRequest(f"{say_place(where)}{rule}", str(where[0]), code)


def use_names(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error of the engine with the route's name of the parameter, which its message begins with."""
    param = error.param or ""
    name, message = names.get(param, param), str(error)
    if name == param:
        return error
    return type(error)(name + message.removeprefix(param) if message.startswith(param) else message, name)


def scrub(message: str) -> str:
    """Remove file paths and addresses, which help an attacker and not a client.

    For messages of the system or of libraries only: in our own messages a JSON pointer would look like a path.
    """
    return _cut(HIDDEN.sub("...", message))


def _cut(message: str) -> str:
    return _printable(message[:MAX_MESSAGE_CHARS])


def _printable(text: str) -> str:
    # a lone surrogate is legal in JSON's escapes, so a client's own text may hold one
    return text.encode("utf-8", "backslashreplace").decode()


def to_api_error(error: Exception, param: str | None = None) -> ApiError:
    """Translate an error of the engine, the grammar or the protocol.

    Args:
        param: the field to blame for a grammar, which knows nothing of requests.
    """
    match error:
        case ApiError():
            return error
        case RefusedJson():
            where, status = error.where, 413 if error.is_too_large else 400
            place = say_place(where)[:MAX_PLACE_CHARS] or "the body"
            code = "body_too_large" if error.is_too_large else "invalid_value" if error.is_json else "invalid_json"
            first = where[0] if where else None
            return ApiError(status, f"{place}{error}", first if isinstance(first, str) else None, code)
        case PromptTooLong():
            return ApiError(400, str(error), error.param or param, "context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error), error.param or param, "invalid_value")
        case UnsupportedGrammar():
            parts = {"keyword": error.keyword, "pointer": error.pointer, "reason": error.reason}
            return ApiError(400, str(error), param, "unsupported_grammar", details=parts)
        case GrammarError():
            pointer = error.pointer if isinstance(error, InvalidGrammar) else None
            details = {"pointer": pointer, "reason": str(error)}
            return ApiError(400, str(error), param, "invalid_grammar", details=details)
        case EngineOverloaded():
            return ApiError(503, str(error), code="engine_overloaded", retry_after_s=error.retry_after_s)
        case EngineSleeping():
            return ApiError(503, str(error), code="engine_sleeping", retry_after_s=RETRY_AFTER_S)
        case LeaseRefused():
            return ApiError(429, str(error), code="gpu_not_lent")
        case RequestTimeout():
            return ApiError(504, str(error), code="request_timeout")
        case EngineDead():
            return ApiError(500, "the engine stopped while the request was in it; try again", code="engine_dead")
        case StoreFull() | DiskFull():
            return ApiError(507, str(error), code="store_full")
        case StoreError():
            logger.error("%s", error)
            return ApiError(500, "what this server keeps cannot be read or written now", code="store_failed")
        case EngineError():
            return ApiError(500, "the engine could not serve the request", code="engine_error")
    return ApiError(500, "internal error", code="internal_error")


def make_failure(completion: CompletionOutput) -> ApiError:
    """The error for a completion that the engine gave up."""
    reason = completion.error or "the engine could not go on with this request"
    if completion.finish_reason == "dead_end":
        return ApiError(400, reason, code="dead_end")
    return ApiError(500, scrub(reason), code="generation_failed")


def make_closing_error() -> ApiError:
    """Return the error of a request that the shutdown of the server cut off."""
    message = "the server is closing, and the request was not finished in the time it had left; try again"
    return ApiError(503, message, code=CLOSING, retry_after_s=RETRY_AFTER_S)


def describe_fields(errors: Sequence[Any], names: Mapping[str, str] | None = None) -> ApiError:
    """Put the first of pydantic's errors into one sentence that names the field and its value.

    Args:
        names: the fields that have another name on the route.
    """
    first, kinds = _pick_member(errors)
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    where = list(first["loc"])
    if not where:
        return ApiError(
            400, "the body must be a JSON object sent as Content-Type: application/json", code="invalid_json"
        )
    where[0] = field = (names or {}).get(where[0], str(where[0]))
    name = say_place(where)
    if kind == "missing":
        return ApiError(400, f"{name} is required", field, "missing_field")
    rule = f"must be {' or '.join(kinds)}" if kinds else say_rule(first)
    reason = f": {first['msg']}" if rule is None else f" {rule}"
    return ApiError(400, f"{name}={say_value(first['input'])}{reason}", field, "invalid_value")


def _pick_member(errors: Sequence[Any]) -> tuple[Any, list[str]]:
    """Return the error to report; in a union, that of the member whose type matches the value.

    The location omits the member's name. If no member matches, also returns the types that the union accepts.
    """
    first = errors[0]
    depth = next((i for i, part in enumerate(first["loc"]) if _is_member(part)), None)
    if depth is None:
        return first, []
    field = first["loc"][:depth]
    members = [e for e in errors if e["loc"][:depth] == field and _is_member(*e["loc"][depth : depth + 1])]
    if len(members) == 1:  # not a union, but a key that looks like one of its members
        return first, []
    fitting = [e for e in members if len(e["loc"]) > depth + 1 or e["type"] not in KINDS]
    if fitting:
        return fitting[0] | {"loc": (*field, *fitting[0]["loc"][depth + 1 :])}, []
    return first | {"loc": field}, [KINDS[e["type"]] for e in members]


def _is_member(part: object = None) -> bool:
    return isinstance(part, str) and UNION_MEMBER.fullmatch(part) is not None


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of the app answer with the OpenAI body."""

    async def answer(request: Request, error: Exception) -> Response:
        return to_api_error(error).answer(request.url.path)

    async def answer_fields(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # FastAPI's places begin with the part of the request: body, query
        found = [each | {"loc": each["loc"][1:]} for each in error.errors()]
        return describe_fields(found).answer(request.url.path)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # FastAPI raises a bare 400 for a body that is not JSON
        code = "invalid_json" if error.status_code == 400 else None
        response = ApiError(error.status_code, str(error.detail), code=code).answer(request.url.path)
        response.headers.update(error.headers or {})
        return response

    for kind in (ApiError, EngineError, GrammarError, RefusedJson, StoreError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, answer_fields)
    app.add_exception_handler(HTTPException, answer_http)
