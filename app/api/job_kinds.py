"""The kinds of jobs: how a row of each is answered. A row is JSON text: a request, or a document to extract from."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from app.api.batch import answer_row, make_reply
from app.api.call import usage
from app.api.context import ApiContext
from app.api.errors import to_api_error
from app.api.extract import ExtractRequest, make_extractor, read_schema
from app.api.model_pool import ModelPool
from app.extraction.batch import extract_source
from app.extraction.choices import NUM_RIVALS, find_choices
from app.extraction.sources import load_source
from app.job_runner import AnswerRow, RowAnswer
from app.store import Item
from engine import EngineDead, EngineSleeping

logger = logging.getLogger("troupe.jobs")

Work = Callable[[str], Awaitable[RowAnswer]]


def make_answer(pool: ModelPool, job: Item) -> AnswerRow | None:
    """Return the function that answers the rows of a job; None while no such model is served."""
    model, kind = job.body.get("model"), KINDS[job.body["kind"]]
    if model is not None and not pool.can_answer(model):
        return None
    works: dict[int, Work] = {}  # by the id of its context, which it holds; one for each model

    async def answer(given: str) -> RowAnswer:
        try:
            if model is not None and not pool.can_answer(model):
                raise EngineSleeping(f"the model {model!r} is not loaded any more")
            named = model or _read_model(json.loads(given))
            async with pool.hold(await pool.find(named)) as context:
                work = works.get(id(context)) or works.setdefault(id(context), kind(context, job.body))
                return await work(given)
        except (EngineDead, EngineSleeping):
            raise
        except Exception as error:
            # the border of the job: whatever it was, the row has failed, and the others go on
            logger.exception("a row of the job %s failed", job.id)
            known = to_api_error(error)
            is_batch = job.body["kind"] == "batch"
            row = make_reply(json.loads(given), known.status, known.body, uuid.uuid4().hex) if is_batch else known.body
            return RowAnswer(json.dumps(row), is_failed=True)

    return answer


def _read_model(row: Any) -> str | None:
    """Return the model that a batch's row names; what is wrong with the row is in its answer."""
    named = body.get("model") if isinstance(body := row.get("body"), dict) else None
    return named if isinstance(named, str) else None


def _answer_requests(context: ApiContext, body: dict[str, Any]) -> Work:
    async def answer(given: str) -> RowAnswer:
        reply = await answer_row(context, json.loads(given), body.get("owner", ""))
        return RowAnswer(json.dumps(reply), reply["response"]["status_code"] != 200)

    return answer


def _extract(context: ApiContext, body: dict[str, Any]) -> Work:
    asked = ExtractRequest.model_validate(body["request"])
    schema, is_weighed = read_schema(asked.schema_), body.get("is_weighed", False)  # the page shows what was weighed
    extractor = make_extractor(context, asked, context.check_model(asked.model))
    extractor.num_rivals = NUM_RIVALS if is_weighed else 0

    async def answer(given: str) -> RowAnswer:
        source = load_source(given)
        record, result = await extract_source(extractor, schema, source, cache_salt=asked.cache_salt)
        more = {} if result is None else {"usage": usage(*result.usage)}
        if result is not None and is_weighed:
            found = await asyncio.to_thread(find_choices, result, context.engine, source.text)
            more["choices"] = {pointer: asdict(choice) for pointer, choice in found.items()}
        return RowAnswer(json.dumps(record | more), not record["valid"])

    return answer


KINDS = {"batch": _answer_requests, "extract": _extract}
