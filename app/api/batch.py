"""One row of an OpenAI batch file, answered as its route would answer it, without a server in between."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from pydantic import ValidationError

from app.api import chat, completions
from app.api.context import ApiContext
from app.api.errors import ApiError, describe_fields, to_api_error
from app.api.json_body import check_json
from app.api.protocol import ChatRequest, CompletionRequest
from app.api.visit import Visit
from engine import EngineDead, EngineError, EngineOverloaded
from grammar import GrammarError

Json = dict[str, Any]

URLS = ("/v1/chat/completions", "/v1/completions")


async def answer_row(context: ApiContext, row: Json) -> Json:
    """The output row for an input row; what is wrong with the row is in its answer.

    Raises:
        EngineDead: the engine is gone, which is no fault of the row.
    """
    request_id = uuid.uuid4().hex
    status, body, error = 200, {}, None
    try:
        body = await _answer(context, row, request_id)
    except (ApiError, EngineError, GrammarError, ValidationError) as caught:
        if isinstance(caught, EngineDead) or context.engine.state != "ready":
            raise EngineDead(str(caught)) from caught
        known = describe_fields(caught.errors()) if isinstance(caught, ValidationError) else None
        known = known or to_api_error(caught)
        status, body = known.status, known.body
        error = {"code": known.code, "message": body["error"]["message"]}
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": row["custom_id"],
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": error,
    }


async def _answer(context: ApiContext, row: Json, request_id: str) -> Json:
    url, method, body = row.get("url"), row.get("method", "POST"), row.get("body")
    if method != "POST" or url not in URLS:
        message = (
            f"{str(method)[:20]} {str(url)[:80]} is not possible in a batch; POST to {' or '.join(URLS)}"
        )
        raise ApiError(400, message, "url", "invalid_value")
    if not isinstance(body, dict):
        message = "body is required: the request of this row, a JSON object"
        raise ApiError(400, message, "body", "missing_field" if body is None else "invalid_value")
    check_json(body)
    if body.get("stream"):
        raise ApiError(400, "stream is not possible in a batch", "stream", "invalid_value")
    while True:
        try:
            if url == URLS[0]:
                return await _chat(context, body, Visit(request_id))
            return await _complete(context, body, Visit(request_id))
        except EngineOverloaded as error:
            # a batch has time
            await asyncio.sleep(error.retry_after_s)


async def _chat(context: ApiContext, body: Any, visit: Visit) -> Json:
    call, echo = await chat.prepare(ChatRequest.model_validate(body), visit, context)
    return chat.whole_reply(call, await call.finish(), echo)


async def _complete(context: ApiContext, body: Any, visit: Visit) -> Json:
    call = await completions.prepare(CompletionRequest.model_validate(body), visit, context)
    return completions.whole_reply(call, await completions.finish_all(call))
