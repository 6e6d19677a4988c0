"""One batch: rows in, records out as they finish, with progress."""

from __future__ import annotations

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
from app.ui.jobs import Job


@dataclass(slots=True, eq=False)
class BatchRun(Job):
    """The rows of a batch and their results; `records` are the finished ones, by row index."""

    rows: Sequence[Row]
    column: str
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
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
        chosen = range(len(self.rows)) if indices is None else indices
        works = (self._extract(index, extractor, schema, cache_salt) for index in chosen)
        async with aclosing(run_bounded(works, MAX_CONCURRENT)) as rows:
            async for _ in rows:
                self.change()

    async def _extract(self, index: int, extractor: Extractor, schema: Schema, salt: str) -> None:
        source = self.rows[index].pick(self.column)
        self.records[index], result = await extract_source(extractor, schema, source, cache_salt=salt)
        if result is not None:
            self.num_prompt_tokens += result.usage.num_prompt_tokens
            self.num_cached_tokens += result.usage.num_cached_tokens

    @property
    def ordered(self) -> list[dict[str, Any]]:
        """Return the finished records in row order."""
        return [self.records[index] for index in sorted(self.records)]

    def list_failed(self) -> list[int]:
        """Return the indices of rows without a valid record."""
        return [i for i, each in sorted(self.records.items()) if not each["valid"]]

    def restore(self, index: int) -> ExtractionResult:
        """Recreate the result of a row from its record and its text."""
        record, source = self.records[index], self.rows[index].pick(self.column)
        result = ExtractionResult(
            source.name, record["record"], "", record["valid"], (), record["finish_reason"], record["confidence"],
            {}, (), BoundedSchema(self.schema),
        )  # fmt: skip
        return make_again(self.schema, source.text, result, record["record"])

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
