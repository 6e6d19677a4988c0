"""One batch: rows in, records out as they finish, with progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from app.concurrency import run_bounded
from app.extraction import ExtractionResult, Extractor, Schema
from app.extraction.batch import MAX_CONCURRENT, extract_source
from app.extraction.bounds import BoundedSchema
from app.extraction.extractor import make_again
from app.extraction.sources import Row
from app.ui.extract.choices import Choice, find_choices
from app.ui.extract.shown import Shown
from app.ui.jobs import Job


@dataclass(slots=True, eq=False)
class BatchRun(Job):
    """The rows of a batch and their results; `records` are the finished ones, by row index."""

    rows: Sequence[Row]
    column: str
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    choices: dict[int, dict[str, Choice]] = field(default_factory=dict)
    reviewed: dict[int, Shown] = field(default_factory=dict)  # the rows that a person has corrected or approved
    is_measured: bool = True
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    started: float = 0.0
    lowest_first: bool = False  # show the records with the lowest confidence first
    schema: Schema = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    async def run(
        self, extractor: Extractor, schema: Schema, cache_salt: str, indices: Sequence[int] | None = None
    ) -> None:
        """Extract every row, or some rows, several at once; cancelling it aborts running ones.

        Raises:
            EngineDead: the engine is gone.
        """
        self.started = self.clock()
        self.schema = schema
        self.is_measured = extractor.is_measured
        chosen = range(len(self.rows)) if indices is None else indices
        works = (self._extract(index, extractor, schema, cache_salt) for index in chosen)
        async with aclosing(run_bounded(works, MAX_CONCURRENT)) as rows:
            async for _ in rows:
                self.change()

    async def _extract(self, index: int, extractor: Extractor, schema: Schema, salt: str) -> None:
        source = self.rows[index].pick(self.column)
        self.records[index], result = await extract_source(extractor, schema, source, cache_salt=salt)
        self.reviewed.pop(index, None)
        if result is not None:
            self.choices[index] = await asyncio.to_thread(find_choices, result, extractor.engine)
            self.num_prompt_tokens += result.usage.num_prompt_tokens
            self.num_cached_tokens += result.usage.num_cached_tokens

    @property
    def ordered(self) -> list[dict[str, Any]]:
        """Return the finished records in row order."""
        return [self.records[index] for index in sorted(self.records)]

    def list_failed(self) -> list[int]:
        """Return the indices of rows without a valid record."""
        return [i for i, each in sorted(self.records.items()) if not each["valid"]]

    def open_row(self, index: int) -> Shown:
        """Return a row for review: its record with its text, or as it was left."""
        if index in self.reviewed:
            return self.reviewed[index]
        record, source = self.records[index], self.rows[index].pick(self.column)
        notes = tuple(note for note in record.get("notes", ()) if note not in source.notes)
        result = ExtractionResult(
            source.name, record["record"], "", record["valid"], (), record["finish_reason"], record["confidence"],
            {}, (), BoundedSchema(self.schema), notes, is_measured=self.is_measured,
        )
        again = make_again(self.schema, source.text, result, record["record"])
        return Shown(again, source.text, self.schema, choices=self.choices.get(index, {}))

    def keep(self, index: int, shown: Shown) -> None:
        """Put a row back as it was reviewed; the downloads have it."""
        source, record = self.rows[index].pick(self.column), shown.result.to_json()
        record["flags"] = {pointer: list(shown.reasons[pointer]) for pointer in shown.to_check}
        given = {"row": source.others} if source.others else {}
        reviewed = {"corrected": sorted(shown.by_hand), "approved": shown.is_approved}
        self.records[index] = source.complete(record) | given | reviewed
        self.reviewed[index] = shown

    def list_rows(self) -> list[int]:
        """Return the indices of the finished rows in the order of the page."""
        done = sorted(self.records)
        if self.lowest_first:
            done.sort(key=lambda index: least_confidence(self.records[index]))
        return done

    def find_next(self, index: int, step: int = 1) -> int | None:
        """Return the row with a record that follows or precedes another on the page."""
        rows = [each for each in self.list_rows() if self.records[each]["record"] is not None]
        place = rows.index(index) + step if index in rows else 0
        return rows[place] if 0 <= place < len(rows) else None

    @property
    def num_valid(self) -> int:
        return sum(record["valid"] for record in self.records.values())

    @property
    def num_failed(self) -> int:
        return sum("error" in record for record in self.records.values())

    @property
    def cached_share(self) -> float:
        """Return the share of prompt tokens found in the prefix cache, 0 to 1."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the rate so far; None before there is a rate."""
        num_done = len(self.records)
        if not num_done:
            return None
        return (self.clock() - self.started) / num_done * (len(self.rows) - num_done)


def least_confidence(record: dict[str, Any]) -> float:
    """Return the lowest confidence of the record's values; 0 for a row without a record."""
    return 0.0 if record["record"] is None else min(record["confidence"].values(), default=1.0)
