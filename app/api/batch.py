"""One row of an OpenAI batch file, answered as its route would answer it, without a server in between."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from app.api import chat, completions
from app.api.context import ApiContext
from app.api.errors import ApiError, BadRequest, to_api_error
from app.api.fields import WARNINGS
from app.api.gate import RequestInfo
from app.api.protocol import ChatRequest, CompletionRequest
from app.api.responses import routes as responses
from app.api.responses.request import ResponsesRequest
from app.concurrency import retry_while_full
from app.json_text import DuplicateKey, RefusedJson, check_json, load_json
from engine import EngineDead, EngineError
from grammar import GrammarError

Json = dict[str, Any]


def read_line(line: bytes) -> Json:
    """Return the row of a line."""
    try:
        row = load_json(line)
    except DuplicateKey as error:
        raise BadRequest(f"has the {error}") from error
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("custom_id"), str):
        raise BadRequest("is not a JSON object with a custom_id")
    return row


def check_lines(lines: Iterable[bytes], name: str, endpoint: str | None = None) -> Iterator[Json | str]:
    """Yield the row of each line that is not blank, or what is wrong with the line.

    Args:
        name: how the number of a line is introduced.
        endpoint: the url that every row must have.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = read_line(line)
        except ApiError as error:
            yield f"{name}{number} {error}"
            continue
        if row["custom_id"] in seen:
            yield f"{name}{number} has the custom_id {row['custom_id'][:80]!r} of an earlier line"
        elif endpoint is not None and row.get("url") != endpoint:
            yield f"{name}{number} has the url {str(row.get('url'))[:80]!r}, not the batch's endpoint {endpoint}"
        else:
            yield row
        seen.add(row["custom_id"])


async def answer_row(context: ApiContext, row: Json, owner: str = "") -> Json:
    """The output row for an input row; what is wrong with the row is in its answer.

    Args:
        owner: whose stored files it may name.
    """
    request_id = uuid.uuid4().hex
    status, body = 200, {}
    warnings: list[str] = []
    WARNINGS.set(warnings)
    try:
        body = await _answer(context, row, request_id, owner)
    except (ApiError, EngineError, GrammarError, RefusedJson) as caught:
        if isinstance(caught, EngineDead) or context.engine.state != "ready":
            raise EngineDead(str(caught)) from caught
        known = to_api_error(caught)
        status, body = known.status, known.body
    reply = make_reply(row, status, body, request_id)
    if warnings:
        reply["response"]["warnings"] = warnings
    return reply


def make_reply(row: Json, status: int, body: Json, request_id: str) -> Json:
    """The output row for an input row."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    # "error" is for requests without a response; here every row gets one
    return {"id": f"batch_req_{request_id}", "custom_id": row["custom_id"], "response": response, "error": None}


async def _answer(context: ApiContext, row: Json, request_id: str, owner: str) -> Json:
    url, method, body = row.get("url"), row.get("method", "POST"), row.get("body")
    if method != "POST" or not isinstance(url, str) or url not in ROUTES:
        message = f"{str(method)[:20]} {str(url)[:80]} is not possible in a batch; POST to {' or '.join(ROUTES)}"
        raise BadRequest(message, "url")
    if not isinstance(body, dict):
        message = "body is required: the request of this row, a JSON object"
        raise BadRequest(message, "body", "missing_field" if body is None else "invalid_value")
    check_json(body)
    if body.get("stream"):
        raise BadRequest("stream is not possible in a batch", "stream")
    return await retry_while_full(lambda: ROUTES[url](context, body, RequestInfo(request_id, owner=owner)))


async def _chat(context: ApiContext, body: Any, info: RequestInfo) -> Json:
    return await chat.ChatWriter(await chat.prepare(chat.read_chat(ChatRequest.read(body)), info, context)).finish()


async def _complete(context: ApiContext, body: Any, info: RequestInfo) -> Json:
    return await completions.TextWriter(await completions.prepare(CompletionRequest.read(body), info, context)).finish()


async def _respond(context: ApiContext, body: Any, info: RequestInfo) -> Json:
    asked = ResponsesRequest.read(body)
    return await (await responses.make_writer(asked, info, context)).finish()


ROUTES = {"/v1/chat/completions": _chat, "/v1/completions": _complete, "/v1/responses": _respond}
