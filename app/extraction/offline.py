"""extract: records from texts in a script, on an LLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from app.extraction.batch import MAX_CONCURRENT
from app.extraction.chunks import extract_whole
from app.extraction.extractor import ExtractionResult, Extractor
from app.extraction.prompt import Example, Schema
from engine import LLM, Engine


def extract(
    llm: LLM,
    schema: Schema,
    texts: Sequence[str],
    *,
    instructions: str = "",
    examples: Sequence[Example] = (),
    **options: Any,
) -> list[ExtractionResult]:
    """Extract a record from each text, in the order of the texts.

    Args:
        options: further fields of Extractor, such as ground, num_samples and recheck.

    Raises:
        GrammarError: the schema is malformed or cannot be enforced exactly.
        InvalidRequest: a text cannot be read.
    """

    async def read_all(engine: Engine) -> list[ExtractionResult]:
        extractor = Extractor(engine, instructions=instructions, examples=tuple(examples), **options)
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def read(text: str) -> ExtractionResult:
            async with room:
                return await extract_whole(extractor, schema, text)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(text)) for text in texts]
        return [task.result() for task in tasks]

    return llm.run(read_all)
