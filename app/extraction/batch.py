"""Many sources, one schema: what `python -m app extract` runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from app.extraction.extractor import Extractor
from app.extraction.prompt import Schema
from engine import Engine, EngineDead, EngineError

# Enough to fill the engine's batch; the rest waits here, not in the engine's bounded queue.
MAX_CONCURRENT = 16


async def extract_records(
    engine: Engine,
    schema: Schema,
    sources: Iterable[tuple[str, str]],
    *,
    max_concurrent: int = MAX_CONCURRENT,
    ground: bool = False,
) -> AsyncIterator[dict[str, Any]]:
    """Yield one JSON-able dict per (name, text), in the order of the sources, several running at once.

    A source that fails alone (too long, say) yields a record of None with its `error`; the others go on.

    Raises:
        GrammarError: the schema itself cannot be used.
        EngineDead: the engine is gone.
    """
    extractor = Extractor(engine, ground=ground)
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
    try:
        return (await extractor.extract(schema, text, source=name)).to_json()
    except EngineDead:
        raise
    except EngineError as error:
        return {
            "source": name, "record": None, "valid": False, "finish_reason": "error",
            "confidence": {}, "evidence": {}, "error": str(error),
        }  # fmt: skip
