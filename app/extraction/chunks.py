"""Texts longer than the model: cut into overlapping parts, extracted side by side, and merged into one record.

text ──cut──▶ parts, each with a margin of the one before ──Extractor──▶ records ──merge──▶ one record, checked again
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from app.extraction.extractor import ExtractionResult, Extractor, TextTooLong
from app.extraction.grounding import Evidence
from app.extraction.json_spans import scan
from app.extraction.prompt import Schema, make_messages, make_plain_prompt
from grammar import SchemaValidator

# Tokens kept free for each part's record, as a share of the model's length.
OUTPUT_SHARE = 0.3
MAX_OUTPUT_TOKENS = 1024
OVERLAP_SHARE = 0.15
# A part below that many characters says too little to be worth a request.
MIN_PART_CHARS = 200
MAX_PARTS = 64
MAX_CONCURRENT = 8


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

    Raises:
        TextTooLong: the schema alone fills the model, or the text has too many parts.
        GrammarError, EngineError: as Extractor.
    """
    parts = cut(text, await count_fitting_chars(extractor, schema, text))
    if len(parts) > MAX_PARTS:
        raise TextTooLong(
            f"the text needs {len(parts):,} parts of what the model takes; at most {MAX_PARTS} are read",
            "text",
        )
    results: list[ExtractionResult | None] = [None] * len(parts)
    gate = asyncio.Semaphore(MAX_CONCURRENT)

    async def read(index: int) -> None:
        async with gate:
            piece = text[parts[index].start : parts[index].end]
            results[index] = await extractor.extract(schema, piece, source=source, cache_salt=cache_salt)

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


async def count_fitting_chars(extractor: Extractor, schema: Schema, text: str) -> int:
    """How many characters of this text the model takes in one part beside the schema and a record."""
    engine = extractor.engine
    messages = make_messages(schema, "")
    has_template = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    frame = await (
        engine.render_chat(messages) if has_template else engine.encode(make_plain_prompt(messages))
    )
    limit = engine.resolved.max_model_len
    room = limit - len(frame) - min(int(limit * OUTPUT_SHARE), MAX_OUTPUT_TOKENS)
    num_tokens = max(len(await engine.encode(text)), 1)
    if num_tokens <= room:
        return len(text)
    # Tokens are not spread evenly; a tenth is kept back for parts that are denser than the rest.
    fitting = int(room * 0.9 * len(text) / num_tokens)
    if fitting < MIN_PART_CHARS:
        raise TextTooLong(
            f"the schema takes {len(frame):,} of the model's {limit:,} tokens and leaves no room for a text",
            "text",
        )
    return fitting


def cut(text: str, max_chars: int) -> list[Part]:
    """Overlapping parts of at most `max_chars` characters that end at a paragraph, a line or a space."""
    if len(text) <= max_chars:
        return [Part(0, len(text))]
    parts, start, overlap = [], 0, int(max_chars * OVERLAP_SHARE)
    while start + max_chars < len(text):
        end = _find_end(text, start + max_chars // 2, start + max_chars)
        parts.append(Part(start, end))
        start = _find_start(text, end - overlap, end)
    return [*parts, Part(start, len(text))]


def _find_end(text: str, low: int, high: int) -> int:
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
    violation = None if errors else SchemaValidator(schema).first_error(record)
    if violation is not None:
        errors = (f"{violation[0] or 'the record'}: {violation[1]}",)
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
        notes=(note, *dict.fromkeys(note for result in results for note in result.notes)),
        output=None,
    )


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
            return {name: self.join(_inner(filled, name), f"{pointer}/{_escape(name)}") for name in names}
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
    step = _escape(name)
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


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
