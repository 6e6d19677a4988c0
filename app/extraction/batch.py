"""Many sources, one schema: what `python -m app extract` runs, and one of them, as the Batch tab does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.concurrency import gather_bounded, run_in_order
from app.extraction.chunks import extract_whole
from app.extraction.extractor import ExtractionResult, Extractor
from app.extraction.prompt import Example, Schema
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import Source, UnreadableSource, make_table, read_rows
from engine import LLM, Engine, EngineDead, EngineError
from grammar import GrammarError

# Enough to fill the engine's batch; the rest waits here, not in the engine's bounded queue.
MAX_CONCURRENT = 16


async def extract_records(
    extractor: Extractor, schema: Schema, sources: Iterable[Source], *, cache_salt: str | None = None
) -> AsyncGenerator[tuple[dict[str, Any], ExtractionResult | None], None]:
    """Yield what `extract_source` returns for each source, in their order, several running at once.

    A source longer than the model is read in parts. One that fails alone (of too many parts, say, or with limits of its
    own that cannot be enforced) yields a record of None with its `error`; the others go on.

    Raises:
        GrammarError: the schema itself cannot be used.
        EngineDead: the engine is gone.
    """
    # A grammar is made of schema and text. With a schema that is sound alone the text is to blame.
    await asyncio.to_thread(SchemaChecker().check, json.dumps(schema))
    works = (extract_source(extractor, schema, source, cache_salt=cache_salt) for source in sources)
    async with aclosing(run_in_order(works, MAX_CONCURRENT)) as results:
        async for pair in results:
            yield pair


async def extract_source(
    extractor: Extractor, schema: Schema, source: Source, *, cache_salt: str | None = None, raises: bool = False
) -> tuple[dict[str, Any], ExtractionResult | None]:
    """The record of one source as a JSON-able dict, and its result; without one where the source fails alone.

    Args:
        raises: whether a source that fails raises its error.

    Raises EngineDead: the engine is gone.
    """
    result, name, text = None, source.name, source.text
    try:
        if source.error is not None:
            raise UnreadableSource(source.error)
        if source.is_empty:
            raise UnreadableSource("the text is empty: there is nothing to extract")
        reader = replace(extractor, images=source.images)
        result = await extract_whole(reader, schema, text, source=name, cache_salt=cache_salt)
        record = result.to_json()
    except EngineDead:
        raise
    except (EngineError, GrammarError, UnreadableSource) as error:
        if raises:
            raise
        record = describe_failure(name, str(error))
    return source.complete(record) | ({"row": source.others} if source.others else {}), result


def describe_failure(source: str, error: str) -> dict[str, Any]:
    """Return what stands for the record of a source that has none."""
    return {
        "source": source, "record": None, "valid": False, "finish_reason": "error", "confidence": {}, "evidence": {},
        "flags": {}, "checks": [], "error": error,
    }


def extract(
    llm: LLM, schema: Schema, documents: Sequence[str | Path | Source], *, instructions: str = "",
    examples: Sequence[Example] = (), **options: Any,
) -> list[ExtractionResult]:
    """Extract a record from each document, in order.

    Args:
        documents: texts, and paths of files: texts, PDFs, tables (a record per row), and images if the model sees them.
        options: further fields of Extractor, such as ground and limits.

    Raises:
        GrammarError: the schema is malformed or cannot be enforced exactly.
        InvalidRequest: a document cannot be extracted from.
        UnreadableSource: a file cannot be read, or a document is empty.
    """

    async def read_all(engine: Engine) -> list[ExtractionResult]:
        extractor = Extractor(engine, instructions=instructions, examples=tuple(examples), **options)
        sources = [each for given in documents for each in _list_sources(given, engine.sees_images)]
        works = (extract_source(extractor, schema, source, raises=True) for source in sources)
        return [result for _, result in await gather_bounded(works, MAX_CONCURRENT) if result is not None]

    return llm.run(read_all)


def _list_sources(given: str | Path | Source, sees_images: bool) -> list[Source]:
    if isinstance(given, Source):
        return [given]
    if isinstance(given, str):
        return [Source("", given)]
    return make_table(read_rows(given, with_images=sees_images)).list_sources()
