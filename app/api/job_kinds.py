"""The kinds of jobs: how a row of each is answered. A row is JSON text: a request, or a document to extract from."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from app.api.batch import answer_row
from app.api.call import usage
from app.api.context import ApiContext
from app.api.errors import to_api_error
from app.api.extract import ExtractRequest, make_extractor, read_schema
from app.extraction.batch import extract_source
from app.extraction.sources import load_source
from app.job_runner import AnswerRow, RowAnswer
from app.store import Item
from engine import EngineDead, EngineSleeping

logger = logging.getLogger("troupe.jobs")


def make_answer(context: ApiContext, job: Item) -> AnswerRow | None:
    """Return the function that answers the rows of a job; None while another model is served."""
    if job.body.get("model") not in (None, *context.model_names):
        return None
    work = KINDS[job.body["kind"]](context, job.body)

    async def answer(given: str) -> RowAnswer:
        try:
            return await work(given)
        except (EngineDead, EngineSleeping):
            raise
        except Exception as error:
            # the border of the job: whatever it was, the row has failed, and the others go on
            logger.exception("a row of the job %s failed", job.id)
            return RowAnswer(json.dumps(to_api_error(error).body), is_failed=True)

    return answer


def _answer_requests(context: ApiContext, body: dict[str, Any]) -> Callable[[str], Awaitable[RowAnswer]]:
    async def answer(given: str) -> RowAnswer:
        reply = await answer_row(context, json.loads(given))
        return RowAnswer(json.dumps(reply, ensure_ascii=False), reply["response"]["status_code"] != 200)

    return answer


def _extract(context: ApiContext, body: dict[str, Any]) -> Callable[[str], Awaitable[RowAnswer]]:
    asked = ExtractRequest.model_validate(body["request"])
    schema = read_schema(asked.schema_)
    extractor = make_extractor(context, asked, context.check_model(asked.model))

    async def answer(given: str) -> RowAnswer:
        source = load_source(given)
        record, result = await extract_source(extractor, schema, source, cache_salt=asked.cache_salt)
        tokens = {} if result is None else {"usage": usage(*result.usage)}
        return RowAnswer(json.dumps(record | tokens, ensure_ascii=False), not record["valid"])

    return answer


KINDS = {"batch": _answer_requests, "extract": _extract}
