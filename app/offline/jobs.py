"""Jobs: how the rows of a table are answered. Jobs are sent to actors, which own the engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.api.batch import answer_row
from app.api.context import ApiContext
from app.concurrency import gather_bounded
from app.config import AppConfig
from app.extraction import Extractor, Source, extract_records
from app.extraction.sources import TEXT_NAMES
from engine import Engine

Row = dict[str, Any]
MAX_CONCURRENT = 64  # rows of a part that an engine has at once


class Job(Protocol):
    async def answer(self, engine: Engine, rows: Sequence[Row], first: int) -> list[Row]:
        """Return one record for each row, in order; `first` is the number of the first row."""

    def describe(self) -> Row:
        """Return the settings that a resumed run must share with the first one."""

    def is_failed(self, record: Row) -> bool:
        """Return whether the row could not be answered."""


@dataclass(frozen=True, slots=True)
class ExtractJob:
    """Extract a record from the text column of each row."""

    schema: dict[str, Any]
    options: dict[str, Any]  # fields of Extractor
    column: str | None  # None: the first of TEXT_NAMES that the row has

    async def answer(self, engine: Engine, rows: Sequence[Row], first: int) -> list[Row]:
        sources = [self._read(row, f"row {number}") for number, row in enumerate(rows, first)]
        extractor = Extractor(engine, **self.options)
        return [record async for record, _ in extract_records(extractor, self.schema, sources)]

    def describe(self) -> Row:
        return {"job": "extract", "schema": self.schema, "options": repr(self.options), "column": self.column}

    def is_failed(self, record: Row) -> bool:
        return "error" in record

    def _read(self, row: Row, name: str) -> Source:
        by_name = {column.lower(): column for column in row}
        column = self.column or next((by_name[each] for each in TEXT_NAMES if each in by_name), None)
        others = {each: cell if isinstance(cell, str) else json.dumps(cell, default=str) for each, cell in row.items()}
        text = others.pop(column, None) if column is not None else None
        error = f"no column {column or 'of texts'} among {', '.join(row)}; name one with --column"
        return Source(name, text or "", others, None if text is not None else error)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Answer each row as a request of OpenAI's batch format."""

    async def answer(self, engine: Engine, rows: Sequence[Row], first: int) -> list[Row]:
        context = ApiContext(engine, AppConfig())
        requests = [self._read(row, number) for number, row in enumerate(rows, first)]
        return await gather_bounded((answer_row(context, each) for each in requests), MAX_CONCURRENT)

    def describe(self) -> Row:
        return {"job": "run-batch"}

    def is_failed(self, record: Row) -> bool:
        return bool(record["response"]["status_code"] != 200)

    def _read(self, row: Row, number: int) -> Row:
        """Return the request; in CSV and Parquet its body is JSON text."""
        body = row.get("body")
        if isinstance(body, str):
            try:
                body = json.loads(body)
            except (ValueError, RecursionError):
                body = None
        return row | {"body": body, "custom_id": str(row.get("custom_id", f"row {number}"))}
