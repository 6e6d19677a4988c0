"""Texts longer than the model: cut into overlapping parts, extracted side by side, and merged into one record.

text ──cut──▶ parts, each with a margin of the one before ──Extractor──▶ records ──merge──▶ one record, checked again
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from app.extraction.bounds import BoundedSchema
from app.extraction.extractor import (
    ExtractionResult,
    Extractor,
    TextTooLong,
    extract_patiently,
    list_violations,
)
from app.extraction.grounding import Evidence
from app.extraction.json_spans import scan
from app.extraction.pointers import escape_pointer
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
# What a part that is denser than the rest is cut to, again and again until it fits.
SMALLER_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Part:
    """The half-open range [start, end) of the text."""

    start: int
    end: int


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
    results: list[ExtractionResult | None] = [None] * len(parts)
    gate = asyncio.Semaphore(MAX_CONCURRENT)

    async def read(index: int) -> None:
        async with gate:
            piece = text[parts[index].start : parts[index].end]
            results[index] = await extract_patiently(
                extractor, schema, piece, source=source, cache_salt=cache_salt
            )

    tasks = {asyncio.ensure_future(read(index)) for index in range(len(parts))}
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            yield PartsDone(len(tasks) - len(waiting), len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = [result for result in results if result is not None]
    yield await asyncio.to_thread(merge, schema, parts, found)


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
    limit, frame = engine.resolved.max_model_len, await _count_frame(engine, schema)
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


async def _count_frame(engine: Engine, schema: Schema) -> int:
    """The tokens of a prompt without its text."""
    messages = make_messages(schema, "")
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


def merge(schema: Schema, parts: list[Part], results: list[ExtractionResult]) -> ExtractionResult:
    """One result of the parts' results: lists joined, single values taken where they are surest."""
    if len(results) == 1:
        return results[0]
    merger = _Merger(parts, results)
    record = merger.join([(index, result.record, "") for index, result in enumerate(results)], "")
    errors = tuple(
        f"part {number} of {len(parts)}: {error}"
        for number, result in enumerate(results, 1)
        for error in result.errors
        if result.finish_reason != "stop"
    )
    errors = errors or list_violations(schema, record)
    raw = json.dumps(record, indent=2, ensure_ascii=False)
    reasons = [result.finish_reason for result in results if result.finish_reason != "stop"]
    note = f"read in {len(parts)} overlapping parts; single values come from the part that was surest of them"
    return replace(
        results[0],
        record=record,
        raw=raw,
        valid=not errors,
        errors=errors,
        finish_reason=reasons[0] if reasons else "stop",
        confidence=merger.confidence,
        evidence=merger.evidence,
        leaves=tuple(scan(raw).leaves),
        bounds=_join_bounds([result.bounds for result in results]),
        notes=(note, *dict.fromkeys(note for result in results for note in result.notes)),
        output=None,
    )


def _join_bounds(each: list[BoundedSchema]) -> BoundedSchema:
    """What was added for any of the parts: a form that one part's text has others of may still hold in the next."""
    added = dict.fromkeys(bound for bounds in each for bound in bounds.added)
    patterns = dict.fromkeys(bound for bounds in each for bound in bounds.patterns)
    return BoundedSchema(each[0].schema, tuple(added), tuple(patterns))


Found = tuple[int, Any, str]  # part, value, its pointer in that part's record


@dataclass(slots=True)
class _Merger:
    """Joins values and carries each one's confidence and evidence to its new place."""

    parts: list[Part]
    results: list[ExtractionResult]
    confidence: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)

    def join(self, found: list[Found], pointer: str) -> Any:
        filled = [each for each in found if each[1] is not None] or found
        first = filled[0][1]
        if isinstance(first, dict) and all(isinstance(value, dict) for _, value, _ in filled):
            names = dict.fromkeys(name for _, value, _ in filled for name in value)
            return {
                name: self.join(_inner(filled, name), f"{pointer}/{escape_pointer(name)}") for name in names
            }
        if isinstance(first, list) and all(isinstance(value, list) for _, value, _ in filled):
            items = _chain(filled)
            return [self.join([item], f"{pointer}/{index}") for index, item in enumerate(items)]
        best = max(filled, key=self._rank)
        self._adopt(best, pointer)
        return best[1]

    def _rank(self, each: Found) -> tuple[bool, float]:
        index, value, pointer = each
        evidence = self.results[index].evidence.get(pointer)
        is_shown = evidence is not None and evidence.match != "none"
        return (is_shown and value != "", self.results[index].confidence.get(pointer, 0.0))

    def _adopt(self, each: Found, pointer: str) -> None:
        index, _, old = each
        result, shift = self.results[index], self.parts[index].start
        if old in result.confidence:
            self.confidence[pointer] = result.confidence[old]
        evidence = result.evidence.get(old)
        if evidence is not None:
            is_shown = evidence.match != "none"
            self.evidence[pointer] = (
                replace(evidence, start=evidence.start + shift, end=evidence.end + shift)
                if is_shown
                else evidence
            )


def _inner(found: list[Found], name: str) -> list[Found]:
    step = escape_pointer(name)
    return [(index, value[name], f"{pointer}/{step}") for index, value, pointer in found if name in value]


def _chain(found: list[Found]) -> list[Found]:
    """The items of all parts in order; what one part repeats of the end of the part before is left out."""
    items: list[Found] = []
    before: list[Any] = []
    for index, values, pointer in found:
        size = next((n for n in range(min(len(before), len(values)), 0, -1) if before[-n:] == values[:n]), 0)
        items += [(index, value, f"{pointer}/{at}") for at, value in enumerate(values) if at >= size]
        before = values
    return items
