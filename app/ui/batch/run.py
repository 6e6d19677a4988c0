"""BatchRun: a job of the store as a page shows it, with the corrections that a person made to its records."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.extraction import Schema
from app.extraction.batch import describe_failure
from app.extraction.flags import LOW_CONFIDENCE
from app.extraction.sources import Source, load_source
from app.store import Connection, Item, Store, jobs, objects
from app.ui.batch.downloads import make_slug
from app.ui.batch.fields import cut_text, has_record, list_asking
from app.ui.extract.shown import Shown, restore

Record = dict[str, Any]
NUM_SHOWN = 100  # rows on the page at most, because thousands make it slow; the downloads have all rows
# What a row of the store has for this page, beside the record that the files have.
INNER = ("usage", "choices", "draft", "checked", "seen", "origin", "empty")


@dataclass(slots=True, eq=False)
class BatchRun:
    """A job as far as a page has read it; `records` are the rows that have ended, by their index."""

    owner: str
    job: Item
    sure_from: float | None = LOW_CONFIDENCE
    asking_first: bool = True  # show the records with most to check first, once all are there
    focus: str = ""  # the field of which the page shows the values side by side; "": it shows whole records
    cuts: dict[int, dict[str, str]] = field(default_factory=dict)  # their places in the texts as HTML, by row
    confirmed: dict[int, list[str]] = field(default_factory=dict)  # values approved together last, by row, to undo that
    at: int | None = None  # the row that a person has opened last
    open: Shown | None = None  # that row, as the page shows it
    is_stale: bool = False  # another column or schema is chosen now
    counts: dict[str, int] = field(default_factory=dict)  # rows by state
    records: dict[int, Record] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _num_read: int = 0
    _ranks: dict[int, tuple[float, float]] = field(default_factory=dict)  # of rows when they were read: they stay there

    async def update(self, store: Store) -> bool:
        """Read what has changed since; returns whether anything has."""

        def read(db: Connection) -> tuple[Item | None, dict[str, int], list[tuple[int, int, Record]]]:
            rows = jobs.read_ended(db, self.job.number, self._num_read)
            found = [(row.ended, row.number, _read_result(row)) for row in rows]
            job = objects.get(db, self.owner, "job", self.job.id)
            is_same = not found and job is not None and self.counts and job.changed == self.job.changed
            return job, self.counts if is_same else jobs.count(db, self.job.number), found

        job, counts, found = await store.run(read)
        job = job or replace(self.job, body=self.job.body | {"status": "cancelled"})  # it was deleted
        before = (self.job.body, self.counts)
        self.job, self.counts = job, counts
        for ended, index, record in found:
            self._num_read, self.records[index] = ended, record
            self._ranks[index] = rank(record)
        return bool(found) or before != (job.body, counts)

    async def look_at(self, store: Store, index: int) -> Shown | None:
        """Return a row as `open_row` does, and remember that it was opened last if it has a record."""
        if has_record(self.records.get(index, {"record": None})):
            self.at = index
        return await self.open_row(store, index)

    async def open_row(self, store: Store, index: int) -> Shown | None:
        """Return a row for review: its record with its text, as it was left; None if it has no record."""
        row = await store.run(jobs.read_row, self.job.number, index)
        record = json.loads(row[1]) if row is not None and row[1] else {}
        if row is None or record.get("record") is None:
            return None
        self.records[index] = record  # another page may have corrected it
        source = load_source(row[0])
        notes = [note for note in record.get("notes", ()) if note not in source.notes]
        kept = record | {"model": self.model, "notes": notes, "sure_from": self.sure_from}
        return replace(restore(kept, source.text, self.schema), reading=f"{self.job.id}/{index}")

    async def keep(self, store: Store, index: int, shown: Shown) -> None:
        """Put a row back as it was reviewed; the downloads have it."""
        before = self.records[index]
        source = await self._read_source(store, index)
        record = shown.result.to_json()
        record["flags"] = {pointer: list(shown.reasons[pointer]) for pointer in shown.to_check}
        kept = {name: before[name] for name in ("row", "usage", "choices") if name in before}
        draft = before.get("draft") or {name: before[name] for name in ("record", "confidence")}
        reviewed = {"corrected": sorted(shown.by_hand), "approved": shown.is_approved}
        inner = {"checked": sorted(shown.checked), "seen": sorted(shown.seen), "draft": draft}
        inner |= {"origin": dict(shown.origin), "empty": sorted(shown.empty)}
        record = self.records[index] = source.complete(record) | kept | reviewed | inner
        await store.run(jobs.change_result, self.job.number, index, json.dumps(record))
        if self.focus:
            self._cut(index, source.text)

    @property
    def schema(self) -> Schema:
        schema: Schema = self.job.body["request"]["schema"]
        return schema

    @property
    def model(self) -> str:
        model: str = self.job.body["model"]
        return model

    @property
    def column(self) -> str | None:
        """Return the column that the job reads; the page may have chosen another one since."""
        body = self.job.body
        column: str | None = body.get("column", body.get("opened", {}).get("column"))
        return column

    @property
    def document(self) -> str:
        """Return the name of the one file that was opened, without its suffix; of several, what the schema is named."""
        opened = self.job.body.get("opened", {})
        paths = opened.get("paths", ())
        name = Path(paths[0]).stem if len(paths) == 1 else str(self.schema.get("title") or opened.get("schema", ""))
        return make_slug(name)

    @property
    def is_running(self) -> bool:
        return self.job.body["status"] in jobs.UNFINISHED

    @property
    def num_rows(self) -> int:
        return sum(self.counts.values())

    @property
    def for_files(self) -> list[Record]:
        """Return the finished records in row order, as they are written into files, with the model that read them."""
        return [
            {name: value for name, value in record.items() if name not in INNER}
            | {"model": self.model, "approved": record.get("approved", False)}
            for _, record in sorted(self.records.items())
        ]

    def list_rows(self) -> list[int]:
        """Return the indices of the finished rows in the order of the page."""
        done = sorted(self.records)
        if self.focus:
            return [index for index in done if list_asking(self.records[index], self.focus)]
        if self.asking_first and not self.is_running:
            done.sort(key=lambda index: self._ranks.get(index) or rank(self.records[index]))
        return done

    async def show_field(self, store: Store, name: str) -> None:
        """Show one field of the rows where it asks side by side; "" shows whole records again."""
        self.focus, self.cuts = name, {}
        for index in self.list_rows()[:NUM_SHOWN]:
            self._cut(index, (await self._read_source(store, index)).text)

    async def confirm_field(self, store: Store, name: str, rows: Iterable[int]) -> None:
        """Mark the values of a field in these rows as checked by a person, and show whole records again."""
        self.confirmed, self.at, self.open = {}, None, None
        for index in filter(self.records.__contains__, dict.fromkeys(rows)):
            pointers = list_asking(self.records[index], name)
            if pointers and (shown := await self.open_row(store, index)):
                await self.keep(store, index, replace(shown, checked=shown.checked.union(pointers)))
                self.confirmed[index] = pointers
        await self.show_field(store, self.focus if self.list_rows() else "")

    async def undo_confirm(self, store: Store) -> None:
        """Let the values that were approved together last ask for a check again."""
        confirmed, self.confirmed, self.at, self.open = self.confirmed, {}, None, None
        for index, pointers in confirmed.items():
            if shown := await self.open_row(store, index):
                await self.keep(store, index, replace(shown, checked=shown.checked.difference(pointers)))
        await self.show_field(store, self.focus)

    async def _read_source(self, store: Store, index: int) -> Source:
        row = await store.run(jobs.read_row, self.job.number, index)
        return load_source(row[0] if row is not None else "")

    def _cut(self, index: int, text: str) -> None:
        record = self.records[index]
        evidence = record.get("evidence", {})
        pointers = list_asking(record, self.focus)
        self.cuts[index] = {pointer: cut_text(text, evidence.get(pointer)) for pointer in pointers}

    def list_reviewed(self) -> list[int]:
        """Return the indices of the rows that a person can open, in the order of the page."""
        return [index for index in self.list_rows() if has_record(self.records[index])]

    def find_next(self, index: int | None, step: int = 1) -> int | None:
        """Return the row with a record that follows or precedes another on the page."""
        rows = self.list_reviewed()
        place = rows.index(index) + step if index in rows else 0
        return rows[place] if 0 <= place < len(rows) else None

    def find_open(self, index: int) -> int | None:
        """Return the next row that is not approved; after the last row it starts again at the first."""
        rows = self.list_reviewed()
        at = rows.index(index) if index in rows else -1
        others = rows[at + 1 :] + rows[: max(at, 0)]
        return next((each for each in others if not self.records[each].get("approved")), None)

    @property
    def cached_share(self) -> float | None:
        """Return the share of prompt tokens found in the prefix cache, 0 to 1; None before there are any."""
        total: Counter[str] = Counter()
        for usage in (record.get("usage") for record in self.records.values()):
            if usage:
                total["prompt"] += usage["prompt_tokens"]
                total["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
        return total["cached"] / total["prompt"] if total["prompt"] else None

    @property
    def seconds(self) -> float:
        """Return how long the job has run, or ran."""
        body = self.job.body
        started = body.get("started", self.clock())
        return float(max((self.clock() if self.is_running else body.get("ended", started)) - started, 1e-9))


def _read_result(row: jobs.JobRow) -> Record:
    found: Record = json.loads(row.result)
    # A fault of the server has no record.
    return found if "record" in found else describe_failure(f"row {row.number + 1}", found["error"]["message"])


def rank(record: Record) -> tuple[float, float]:
    """Return the sort key of a row: failed rows come first, then many flags, then low confidence."""
    if not has_record(record):
        return -math.inf, 0.0
    return -len(record["flags"]), min(record["confidence"].values(), default=1.0)
