"""Texts that are read in parts side by side and merged into one record: those longer than the model, and tables.

text ──cut──▶ parts, each with a margin of the one before ──Extractor──▶ records ──merge──▶ one record, checked again
table ──plan_tables──▶ rows, and the text without them ──Extractor──▶ items and other fields ──merge──▶ the same
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from app.concurrency import retry_while_full, run_bounded, take_last
from app.extraction.checks import read_checks
from app.extraction.extractor import (
    MIN_OUTPUT_TOKENS,
    ExtractionResult,
    Extractor,
    PartialExtraction,
    TextTooLong,
)
from app.extraction.merging import Part, merge
from app.extraction.prompt import Example, Schema
from app.extraction.result import Usage
from app.extraction.tables import TablePlan, plan_tables
from engine import InvalidRequest

# Tokens kept free for a record, as a share of the model's length.
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


async def stream_whole(
    extractor: Extractor, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None
) -> AsyncGenerator[PartialExtraction | PartsDone | ExtractionResult, None]:
    """Yield a record as it is written where text and record fit the model, else the progress in parts; then the result.

    A list that the text gives as a table is read row by row.

    Raises TextTooLong, GrammarError, EngineError: as extract_long.
    """
    plan = None if extractor.images else await asyncio.to_thread(plan_tables, schema, text)
    steps = (
        _stream_undivided(extractor, schema, text, source, cache_salt) if plan is None
        else _read_tables(extractor, schema, plan, source, cache_salt)
    )
    async with aclosing(steps):
        async for step in steps:
            yield step


async def _read_tables(
    extractor: Extractor, schema: Schema, plan: TablePlan, source: str, cache_salt: str | None
) -> AsyncGenerator[PartsDone | ExtractionResult, None]:
    """Yield progress, then the record of the rows' items and of the other fields."""
    read_checks(schema)  # the divided schemas are without them
    shown = tuple(
        Example(each.text, {name: value for name, value in each.record.items() if name not in plan.items})
        for each in extractor.examples
        if isinstance(each.record, dict)
    )
    others = [(replace(extractor, examples=shown), plan.rest, plan.rest_text)] if plan.rest else []
    alone = replace(extractor, examples=())
    asked = [*others, *((alone, plan.make_schema(row), row.text) for row in plan.rows)]
    results: dict[int, ExtractionResult] = {}

    async def read(index: int) -> None:
        reader, part, text = asked[index]
        last = await retry_while_full(lambda: take_last(_stream_undivided(reader, part, text, source, cache_salt)))
        assert isinstance(last, ExtractionResult), "it comes last"
        results[index] = last

    async with aclosing(run_bounded(map(read, range(len(asked))), MAX_CONCURRENT)) as steps:
        async for _ in steps:
            yield PartsDone(len(results), len(asked))
    ordered = [results[index] for index in range(len(asked))]
    placed = [plan.place_rest(result, schema) for result in ordered[: len(others)]]
    items = [plan.place_row(row, result) for row, result in zip(plan.rows, ordered[len(others) :], strict=True)]
    items[0] = replace(items[0], notes=(*items[0].notes, *plan.list_partial(schema, items)))
    parts = [*(Part(0, len(plan.text)) for _ in others), *(Part(row.start, row.end) for row in plan.rows)]
    note = f"the {len(plan.rows)} rows of a table were read one by one, the other fields from the text without them"
    merged = await asyncio.to_thread(merge, schema, parts, [*placed, *items], plan.text, note)
    yield replace(merged, usage=Usage.sum(result.usage for result in ordered))


async def _stream_undivided(
    extractor: Extractor, schema: Schema, text: str, source: str, cache_salt: str | None
) -> AsyncGenerator[PartialExtraction | PartsDone | ExtractionResult, None]:
    # Images belong to no part of the text.
    room = MIN_OUTPUT_TOKENS if extractor.images else keep_room(extractor)
    result = None
    try:
        whole = extractor.stream(schema, text, source=source, cache_salt=cache_salt, room=room)
        async with aclosing(whole) as steps:
            async for step in steps:
                if isinstance(step, PartialExtraction):
                    yield step
                else:
                    result = step
    except TextTooLong:
        if extractor.images:
            raise
    if result is not None and (extractor.images or _num_cut(extractor, [result]) == 0):
        yield result
        return
    parts = extract_long(extractor, schema, text, source=source, cache_salt=cache_salt, whole=result)
    async with aclosing(parts):
        async for part in parts:
            yield part


async def extract_long(
    extractor: Extractor, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None,
    whole: ExtractionResult | None = None,
) -> AsyncGenerator[PartsDone | ExtractionResult, None]:
    """Yield progress, then one merged ExtractionResult; a text that fits is read in one part.

    Where a part leaves too little room for its record, the text is cut into smaller ones. A full queue is waited for:
    the parts of one text may fill it themselves.

    Args:
        whole: the record of the undivided text, for which there was too little room.

    Raises:
        TextTooLong: the schema alone fills the model, or the text has too many parts.
        GrammarError, EngineError: as Extractor.
    """
    room, merged = keep_room(extractor), whole
    usages = [] if whole is None else [whole.usage]
    num_cut = _num_cut(extractor, [whole] if whole is not None else [])
    while merged is None or num_cut:
        if num_cut:
            room = min(2 * max(room, num_cut), extractor.max_tokens)
        try:
            parts = await plan_parts(extractor, schema, text, room)
        except TextTooLong:
            if merged is None:
                raise
            break
        results: dict[int, ExtractionResult] = {}

        async def read(index: int, parts: list[Part], results: dict[int, ExtractionResult]) -> None:
            piece = text[parts[index].start : parts[index].end]
            results[index] = await retry_while_full(
                lambda: extractor.extract(schema, piece, source=source, cache_salt=cache_salt)
            )

        reads = (read(index, parts, results) for index in range(len(parts)))
        async with aclosing(run_bounded(reads, MAX_CONCURRENT)) as steps:
            async for _ in steps:
                yield PartsDone(len(results), len(parts))
        ordered = [results[index] for index in range(len(parts))]
        usages += [result.usage for result in ordered]
        merged = await asyncio.to_thread(merge, schema, parts, ordered, text)
        num_cut = _num_cut(extractor, ordered) if room < extractor.max_tokens else 0
    yield replace(merged, usage=Usage.sum(usages))


def keep_room(extractor: Extractor) -> int:
    """Return the tokens that are kept for a record: a text that leaves fewer is divided."""
    limit = extractor.engine.resolved.max_model_len
    return min(int(limit * OUTPUT_SHARE), MAX_OUTPUT_TOKENS, extractor.max_tokens)


def _num_cut(extractor: Extractor, results: list[ExtractionResult]) -> int:
    """Return the tokens of the longest record that ended for lack of room, not at `max_tokens`; 0 if none did."""
    lengths = [
        len(result.output.outputs[0].token_ids)
        for result in results
        if result.finish_reason == "length" and result.output is not None
    ]
    return max((length for length in lengths if length < extractor.max_tokens), default=0)


async def extract_whole(
    extractor: Extractor, schema: Schema, text: str, *, source: str = "", cache_salt: str | None = None
) -> ExtractionResult:
    """The finished record alone, of a text of any length; a full queue is waited for.

    Raises TextTooLong, GrammarError, EngineError: as extract_long.
    """

    result = await retry_while_full(
        lambda: take_last(stream_whole(extractor, schema, text, source=source, cache_salt=cache_salt))
    )
    assert isinstance(result, ExtractionResult), "it comes last"
    return result


async def plan_parts(extractor: Extractor, schema: Schema, text: str, room_for_record: int) -> list[Part]:
    """The parts of this text that the model takes, each beside the schema and a record."""
    engine = extractor.engine
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise InvalidRequest("extraction needs a tokenizer; start the engine without skip_tokenizer_init")
    limit, frame = engine.resolved.max_model_len, len(await extractor.encode_prompt(schema, ""))
    room = limit - frame - room_for_record
    too_many = TextTooLong(
        f"the text needs more than {MAX_PARTS} parts of what the model takes; no more are read", "text"
    )
    if len(text) > MAX_PARTS * limit * tokenizer.max_token_chars:
        raise too_many
    num_tokens = max(len(await engine.encode(text)), 1)
    if num_tokens <= room:
        return [Part(0, len(text))]
    # A tenth is kept back, so that most parts fit as they are; those that are denser still are cut smaller.
    fitting = int(room * 0.9 * len(text) / num_tokens)
    if fitting < MIN_PART_CHARS:
        raise TextTooLong(
            f"the schema takes {frame:,} of the model's {limit:,} tokens and leaves no room for a text", "text"
        )
    if len(text) > fitting * MAX_PARTS:
        raise too_many
    parts = await asyncio.to_thread(cut, text, fitting, lambda part: len(tokenizer.encode(part)) <= room)
    if len(parts) > MAX_PARTS:
        raise too_many
    return parts


def cut(text: str, max_chars: int, fits: Callable[[str], bool] = lambda part: True) -> list[Part]:
    """Overlapping parts of at most `max_chars` characters that end at a paragraph, a line or a space.

    A part that does not fit is cut shorter, until it does.
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
