"""Many sources, one schema: what `python -m app extract` runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from app.extraction.bounds import Limits
from app.extraction.chunks import extract_whole
from app.extraction.extractor import DEFAULT_LIMITS, Extractor
from app.extraction.prompt import Schema
from app.extraction.schema_check import SchemaChecker
from engine import Engine, EngineDead, EngineError
from grammar import GrammarError

# Enough to fill the engine's batch; the rest waits here, not in the engine's bounded queue.
MAX_CONCURRENT = 16


async def extract_records(
    engine: Engine,
    schema: Schema,
    sources: Iterable[tuple[str, str]],
    *,
    max_concurrent: int = MAX_CONCURRENT,
    ground: bool = False,
    limits: Limits | None = DEFAULT_LIMITS,
) -> AsyncIterator[dict[str, Any]]:
    """Yield one JSON-able dict per (name, text), in the order of the sources, several running at once.

    A source longer than the model is read in parts. One that fails alone (of too many parts, say, or with limits of its
    own that cannot be enforced) yields a record of None with its `error`; the others go on.

    Raises:
        GrammarError: the schema itself cannot be used.
        EngineDead: the engine is gone.
    """
    extractor = Extractor(engine, limits, ground=ground)
    # A grammar is made of schema and text. With a schema that is sound alone the text is to blame.
    await asyncio.to_thread(SchemaChecker().check, json.dumps(schema))
    waiting = iter(sources)
    running: list[asyncio.Task[dict[str, Any]]] = []
    try:
        while True:
            while len(running) < max_concurrent and (item := next(waiting, None)) is not None:
                running.append(asyncio.ensure_future(_extract_one(extractor, schema, *item)))
            if not running:
                return
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _extract_one(extractor: Extractor, schema: Schema, name: str, text: str) -> dict[str, Any]:
    if not text.strip():
        return describe_failure(name, "the text is empty: there is nothing to extract")
    try:
        return (await extract_whole(extractor, schema, text, source=name)).to_json()
    except EngineDead:
        raise
    except (EngineError, GrammarError) as error:
        return describe_failure(name, str(error))


def describe_failure(name: str, error: str) -> dict[str, Any]:
    """What stands in place of the record of a source that failed alone."""
    return {
        "source": name, "record": None, "valid": False, "finish_reason": "error",
        "confidence": {}, "evidence": {}, "error": error,
    }  # fmt: skip
