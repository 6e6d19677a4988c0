"""Texts longer than the model: cut into overlapping parts, extracted side by side, and merged into one record.

text ──cut──▶ parts, each with a margin of the one before ──Extractor──▶ records ──merge──▶ one record, checked again
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from app.concurrency import retry_while_full, run_bounded, take_last
from app.extraction.extractor import ExtractionResult, Extractor, PartialExtraction, TextTooLong
from app.extraction.merging import Part, merge
from app.extraction.prompt import Schema, make_messages, make_plain_prompt
from engine import Engine, InvalidRequest

# Tokens kept free for each part's record, as a share of the model's length.
OUTPUT_SHARE = 0.3
MAX_OUTPUT_TOKENS = 1024
OVERLAP_SHARE = 0.15
# A part below that many characters says too little to be worth a request.
MIN_PART_CHARS = 200
MAX_PARTS = 64
MAX_CONCURRENT = 8
# A part with more tokens than the others is cut to this share until it fits.
SMALLER_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class PartsDone:
    """Progress of a text that is read in parts."""

    num_done: int
    num_parts: int


async def extract_long(
    extractor: Extractor, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None
) -> AsyncGenerator[PartsDone | ExtractionResult, None]:
    """Yield progress, then one merged ExtractionResult; a text that fits is read in one part.

    A full queue is waited for: the parts of one text may fill it themselves.

    Raises:
        TextTooLong: the schema alone fills the model, or the text has too many parts.
        GrammarError, EngineError: as Extractor.
    """
    parts = await plan_parts(extractor, schema, text)
    results: dict[int, ExtractionResult] = {}

    async def read(index: int) -> None:
        piece = text[parts[index].start : parts[index].end]
        results[index] = await retry_while_full(
            lambda: extractor.extract(schema, piece, source=source, cache_salt=cache_salt)
        )

    async with aclosing(run_bounded(map(read, range(len(parts))), MAX_CONCURRENT)) as reads:
        async for _ in reads:
            yield PartsDone(len(results), len(parts))
    yield await asyncio.to_thread(merge, schema, parts, [results[index] for index in range(len(parts))])


async def stream_whole(
    extractor: Extractor, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None
) -> AsyncGenerator[PartialExtraction | PartsDone | ExtractionResult, None]:
    """Yield a record as it is written where the text fits the model, else the progress in parts; then the result.

    Raises:
        TextTooLong, GrammarError, EngineError: as extract_long.
    """
    try:
        async with aclosing(extractor.stream(schema, text, source=source, cache_salt=cache_salt)) as parts:
            async for part in parts:
                yield part
        return
    except TextTooLong:
        if extractor.images:  # which belong to no part of the text
            raise
    async with aclosing(extract_long(extractor, schema, text, source=source, cache_salt=cache_salt)) as steps:
        async for step in steps:
            yield step


async def extract_whole(
    extractor: Extractor, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None
) -> ExtractionResult:
    """The finished record alone, of a text of any length; a full queue is waited for.

    Raises:
        TextTooLong, GrammarError, EngineError: as extract_long.
    """

    result = await retry_while_full(
        lambda: take_last(stream_whole(extractor, schema, text, source=source, cache_salt=cache_salt))
    )
    assert isinstance(result, ExtractionResult), "it comes last"
    return result


async def plan_parts(extractor: Extractor, schema: Schema, text: str) -> list[Part]:
    """The parts of this text that the model takes, each beside the schema and a record.

    Raises:
        TextTooLong: the schema alone fills the model, or the text has too many parts.
        InvalidRequest: the engine has no tokenizer.
    """
    engine = extractor.engine
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise InvalidRequest("extraction needs a tokenizer; start the engine without skip_tokenizer_init")
    limit, frame = engine.resolved.max_model_len, await _count_frame(extractor, schema)
    room = limit - frame - min(int(limit * OUTPUT_SHARE), MAX_OUTPUT_TOKENS)
    num_tokens = max(len(await engine.encode(text)), 1)
    if num_tokens <= room:
        return [Part(0, len(text))]
    # A tenth is kept back, so that most parts fit as they are; those that are denser still are cut smaller.
    fitting = int(room * 0.9 * len(text) / num_tokens)
    if fitting < MIN_PART_CHARS:
        raise TextTooLong(
            f"the schema takes {frame:,} of the model's {limit:,} tokens and leaves no room for a text",
            "text",
        )
    too_many = TextTooLong(
        f"the text needs more than {MAX_PARTS} parts of what the model takes; no more are read", "text"
    )
    if len(text) > fitting * MAX_PARTS:
        raise too_many
    parts = await asyncio.to_thread(cut, text, fitting, lambda part: len(tokenizer.encode(part)) <= room)
    if len(parts) > MAX_PARTS:
        raise too_many
    return parts


async def _count_frame(extractor: Extractor, schema: Schema) -> int:
    """The tokens of a prompt without its text."""
    engine: Engine = extractor.engine
    messages = make_messages(schema, "", extractor.instructions, extractor.examples)
    if engine.tokenizer is not None and engine.tokenizer.has_chat_template:
        return len(await engine.render_chat(messages))
    return len(await engine.encode(make_plain_prompt(messages)))


def cut(text: str, max_chars: int, fits: Callable[[str], bool] = lambda part: True) -> list[Part]:
    """Overlapping parts of at most `max_chars` characters that end at a paragraph, a line or a space.

    A part that does not fit is cut shorter, until it does.

    Raises:
        TextTooLong: not even MIN_PART_CHARS characters fit somewhere.
    """
    parts: list[Part] = []
    start = covered = 0
    while not parts or covered < len(text):
        size = max_chars
        end = _find_end(text, start, size)
        while not fits(text[start:end]):
            if end - start <= MIN_PART_CHARS:
                raise TextTooLong(
                    f"characters {start + 1:,} to {end:,} of the text are more tokens than the model takes beside "
                    "the schema and a record",
                    "text",
                )
            size = int((end - start) * SMALLER_SHARE)
            end = _find_end(text, start, size)
        if parts and end <= covered:
            start = covered  # nothing new fits behind the overlap
            continue
        parts.append(Part(start, end))
        covered = end
        start = _find_start(text, end - int(size * OVERLAP_SHARE), end)
    return parts


def _find_end(text: str, start: int, size: int) -> int:
    low, high = start + size // 2, start + size
    if high >= len(text):
        return len(text)
    for mark in ("\n\n", "\n", ". ", " "):
        found = text.rfind(mark, low, high)
        if found >= 0:
            return found + len(mark)
    return high


def _find_start(text: str, low: int, high: int) -> int:
    for mark in ("\n", " "):
        found = text.find(mark, low, high)
        if found >= 0:
            return found + 1
    return low
