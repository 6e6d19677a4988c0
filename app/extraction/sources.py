"""Files as rows to extract from: CSV and JSONL have a row a line, every other file is one row."""

from __future__ import annotations

import json
import math
import re
import sys
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

from app.extraction.boxes import find_boxes
from app.extraction.child import run_child
from app.extraction.csv_table import TEXT_NAMES, read_csv
from app.extraction.decoding import UnreadableSource, decode, decode_text, describe_guess, find_declared
from app.extraction.pdf import read_pdf, read_picture
from app.json_text import TOO_MANY_VALUES, has_too_many_values, load_json
from engine import is_unicode

MAX_FILE_BYTES = 64 * 2**20
PAGE_BREAK = "\n\n"
FILE_COLUMN, TEXT_COLUMN = "file", "text"
IMAGE_TYPES = (".png", ".jpg", ".jpeg", ".webp")
MAX_IMAGE_BYTES = 24 * 2**20
# Read in a process of their own, as PDFs are.
OFFICE_TYPES = (
    ".docx", ".docm", ".dotx", ".dotm", ".xlsx", ".xlsm", ".xltx", ".xltm", ".pptx", ".pptm", ".potx", ".ppsx",
    ".html", ".htm", ".eml", ".msg", ".mht", ".mhtml",
)
SHEET_TYPES = (".xlsx", ".xlsm", ".xltx", ".xltm")
OLD_TYPES = {".doc": ".docx", ".xls": ".xlsx", ".ppt": ".pptx", ".odt": ".docx", ".ods": ".xlsx", ".rtf": ".docx"}
MAX_CHARS = 10_000_000  # of the text of such a file
TABLE_TYPES = (".csv", ".tsv", ".jsonl", ".ndjson")
BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Source:
    """One document to extract from: a text, images, or both.

    Attributes:
        others: the other cells of its row.
        error: why it cannot be read.
        page_starts: offsets of a PDF's pages in the text.
        boxes: where the words of each page, or of an image, stand; see app.extraction.boxes.
        images: files or URLs, for a model that sees images.
        notes: what was left out or guessed when it was read; of a whole table in its first row.
    """

    name: str
    text: str
    others: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    page_starts: tuple[int, ...] = ()
    images: tuple[bytes | str, ...] = ()
    notes: tuple[str, ...] = ()
    boxes: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def is_empty(self) -> bool:
        return not self.text.strip() and not self.images

    def find_page(self, offset: int) -> int:
        """Return the page, counted from 1, at an offset of the text; 0 if it is not a PDF's."""
        return bisect_right(self.page_starts, offset)

    def complete(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record of this source with its notes, and the page, counted from 1, and boxes of each place in a PDF."""
        starts = self.page_starts or (0,) * len(self.boxes)
        for found in record["evidence"].values() if starts else ():
            if found["match"] != "none" and (page := bisect_right(starts, found["start"])):
                found["page"] = page
                place = found["start"] - starts[page - 1], found["end"] - starts[page - 1]
                words = self.boxes[page - 1] if self.boxes else b""
                found["boxes"] = [{"page": page, **each} for each in find_boxes(words, *place)]
        notes = [*self.notes, *record.get("notes", ())]
        return record | ({"notes": notes} if notes else {})


def dump_source(source: Source) -> str:
    """Return a document as JSON text."""
    return json.dumps(asdict(source), ensure_ascii=False, default=lambda data: {"base64": b64encode(data).decode()})


def load_source(text: str) -> Source:
    """Return the document of `dump_source`."""
    given = json.loads(text)
    images = tuple(b64decode(each["base64"]) if isinstance(each, dict) else each for each in given.pop("images"))
    boxes = tuple(b64decode(each["base64"]) for each in given.pop("boxes", ()))
    page_starts, notes = tuple(given.pop("page_starts")), tuple(given.pop("notes"))
    return Source(**given, page_starts=page_starts, images=images, notes=notes, boxes=boxes)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table, or a whole file, by its columns; `error` when it could not be read."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    page_starts: tuple[int, ...] = ()
    images: tuple[bytes, ...] = ()  # of the text column
    notes: tuple[str, ...] = ()
    boxes: tuple[bytes, ...] = ()

    def pick(self, column: str) -> Source:
        """Return the column's text. The file name is omitted because the source's name already has it."""
        own = (column, FILE_COLUMN if self.cells.get(FILE_COLUMN) == self.name else column)
        others = {name: cell for name, cell in self.cells.items() if name not in own}
        text, error = self.cells.get(column, ""), self.error
        if others and error is None and not text.strip():
            error = f"the column {column!r} is empty in this row"
        if column != TEXT_COLUMN:
            return Source(self.name, text, others, error, notes=self.notes)
        return Source(self.name, text, others, error, self.page_starts, self.images, self.notes, self.boxes)


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Limits of a table in memory; by default only the size of its files is limited."""

    max_rows: float = math.inf
    max_cells: float = math.inf
    max_chars: float = math.inf

    def check(self, name: str, num_rows: int, num_cells: int, num_chars: int = 0) -> None:
        """Refuse a table that is larger."""
        for count, limit, what in (
            (num_rows, self.max_rows, "rows"),
            (num_cells, self.max_cells, "cells"),
            (num_chars, self.max_chars, "characters"),
        ):
            if count > limit:
                raise UnreadableSource(f"{name}: more than {limit:,} {what} in all; open fewer or split them")


UNLIMITED = TableLimits()
# Limits of the tables that clients send.
LIMITS = TableLimits(max_rows=100_000, max_cells=2_000_000, max_chars=64 * 2**20)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one or several files and the columns they have."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    num_cells: int = 0
    num_chars: int = 0

    def pick_text_column(self) -> str | None:
        """The column that most likely holds the texts, None without columns."""
        by_name = {column.lower(): column for column in self.columns}
        named = next((by_name[name] for name in TEXT_NAMES if name in by_name), None)
        if named is not None or not self.columns:
            return named
        sample = self.rows[:50]
        return max(self.columns, key=lambda column: sum(len(row.cells.get(column, "")) for row in sample))

    def list_sources(self, column: str | None = None) -> list[Source]:
        """The documents in a column; by default, in the one that most likely holds the texts."""
        picked = column or self.pick_text_column() or TEXT_COLUMN
        return [row.pick(picked) for row in self.rows]


def make_table(rows: Sequence[Row]) -> Table:
    columns = dict.fromkeys(column for row in rows for column in row.cells)
    num_chars = sum(len(cell) for row in rows for cell in row.cells.values())
    return Table(tuple(rows), tuple(columns), sum(len(row.cells) for row in rows), num_chars)


def read_rows(
    path: Path, name: str | None = None, limits: TableLimits = UNLIMITED, with_images: bool = False
) -> list[Row]:
    """The rows of one file, which goes by `name` or else by its own; see parse_rows."""
    name = name or path.name
    max_bytes = MAX_IMAGE_BYTES if path.suffix.lower() in IMAGE_TYPES else MAX_FILE_BYTES
    return parse_rows(read_bytes(path, name, max_bytes), name, limits, with_images)


def parse_rows(data: bytes, name: str, limits: TableLimits = UNLIMITED, with_images: bool = False) -> list[Row]:
    """The rows of a file's content.

    Args:
        with_images: images are documents too, and so are pages of a PDF without text.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix == ".pdf":
        found = read_pdf(data, name, with_images)
        starts = (0, *accumulate(len(page) + len(PAGE_BREAK) for page in found.pages[:-1]))
        cells = {FILE_COLUMN: name, TEXT_COLUMN: PAGE_BREAK.join(found.pages)}
        return [Row(name, cells, page_starts=starts, images=found.images, notes=found.notes, boxes=found.boxes)]
    if suffix in IMAGE_TYPES:
        if not with_images:
            text, boxes = read_picture(data, name)
            cells = {FILE_COLUMN: name, TEXT_COLUMN: text}
            return [Row(name, cells, notes=(f"{name}: text read by OCR",), boxes=(boxes,))]
        return [Row(name, {FILE_COLUMN: name, TEXT_COLUMN: ""}, images=(data,))]
    if suffix in (*OFFICE_TYPES, *OLD_TYPES):
        text, notes = read_office(data, name)
        return [Row(name, {FILE_COLUMN: name, TEXT_COLUMN: text}, notes=notes)]
    text, guessed = decode_text(data, name)
    if suffix in TABLE_TYPES:
        rows = (read_table if suffix in (".csv", ".tsv") else _read_jsonl)(text, name, limits)
    else:
        rows = [Row(name, {FILE_COLUMN: name, TEXT_COLUMN: text})]
    if guessed:
        rows[0] = replace(rows[0], notes=(describe_guess(name, guessed), *rows[0].notes))
    return rows


def read_office(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a Word, Excel, PowerPoint, HTML or mail file, and what was left out."""
    suffix = PurePath(name).suffix.lower()
    if suffix in OLD_TYPES:
        raise UnreadableSource(f"{name} is of a format that is not read here; save it as {OLD_TYPES[suffix]}")
    notes = []
    if suffix in (".html", ".htm"):
        page, guessed = decode_text(data, name, find_declared(data))
        data, notes = page.encode(), [describe_guess(name, guessed)] if guessed else []
    if suffix == ".eml" and b"\0" in data:
        raise UnreadableSource(f"{name} is not a mail: it has a NUL character at byte {data.index(0):,}")
    found = run_child("office.read", data, name, kind=suffix[1:], max_chars=MAX_CHARS)
    if not found["text"]:
        raise UnreadableSource(f"{name} has no text in it")
    return found["text"], (*notes, *(f"{name}: {note}" for note in found["notes"]))


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of one file; files that are read in a process of their own have a limit of their own.

    Raises UnreadableSource: it is too large or no text.
    """
    if path.suffix.lower() == ".pdf":
        return PAGE_BREAK.join(read_pdf(read_bytes(path, path.name, MAX_FILE_BYTES), path.name).pages)
    if path.suffix.lower() in (*OFFICE_TYPES, *OLD_TYPES):
        return read_office(read_bytes(path, path.name, MAX_FILE_BYTES), path.name)[0]
    return decode(read_bytes(path, path.name, max_bytes), path.name)


def read_bytes(path: Path | None, name: str, max_bytes: int) -> bytes:
    """The content of one file, or of stdin if the path is None."""
    try:
        with nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as file:
            data = file.read(max_bytes + 1)  # a pipe does not report its size
    except OSError as error:
        raise UnreadableSource(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise UnreadableSource(f"{name} is larger than {max_bytes >> 20} MiB")
    return data


def read_table(text: str, name: str, limits: TableLimits) -> list[Row]:
    """The rows of a CSV text."""
    table = read_csv(text, name, partial(limits.check, name))
    columns = table.columns
    rows = [_make_row(f"{name} row {number}", columns, line) for number, line in enumerate(table.rows, 1)]
    return [replace(rows[0], notes=(*table.notes, *rows[0].notes)), *rows[1:]]


def _make_row(name: str, columns: Sequence[str], cells: Sequence[str]) -> Row:
    """A row, or its error where cells have no column; empty ones at the end say nothing and are left out."""
    if any(cell.strip() for cell in cells[len(columns) :]):
        return Row(name, error=f"{name} has {len(cells)} cells, the header {len(columns)}: quote the text")
    notes = (f"{name} has {len(cells)} cells, the header {len(columns)}",) if len(cells) < len(columns) else ()
    return Row(name, dict(zip(columns, cells, strict=False)), notes=notes)


def _read_jsonl(text: str, name: str, limits: TableLimits) -> list[Row]:
    rows: list[Row] = []
    num_cells = 0
    for number, line in _iterate_lines(text):
        limits.check(name, len(rows) + 1, num_cells)
        row_name = f"{name} line {number}"
        try:
            cells = _read_json_line(line)
        except (ValueError, RecursionError) as error:
            rows.append(Row(row_name, error=f"{row_name} {error}"))
            continue
        rows.append(Row(row_name, cells))
        num_cells += len(cells)
    if not rows:
        raise UnreadableSource(f"{name} is empty")
    return rows


def _iterate_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers. A file of blank lines takes no memory."""
    number, start = 1, 0
    while (begun := BLANKS.match(text, start).end()) < len(text):  # type: ignore[union-attr]
        number += text.count("\n", start, begun)
        start = text.find("\n", begun) % (len(text) + 1)  # the end of the text if there is no further line end
        yield number, text[begun:start]


def _read_json_line(line: str) -> dict[str, str]:
    """The cells of a line.

    Raises ValueError, RecursionError: it is not JSON that can be kept; the message continues the name of the row.
    """
    if has_too_many_values(line.encode()):
        raise ValueError(TOO_MANY_VALUES)
    try:
        value = load_json(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    found = value if isinstance(value, dict) else {TEXT_COLUMN: value}
    cells = {key: spell(cell) for key, cell in found.items()}
    broken = next((key for key, cell in cells.items() if not is_unicode(key + cell)), None)
    if broken is not None:
        raise ValueError(f"has an unpaired surrogate in {broken!r} (invalid Unicode)")
    return cells


def spell(value: Any) -> str:
    """A cell of a table as text: null is empty, other values are JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
