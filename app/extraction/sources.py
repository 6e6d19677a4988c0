"""Files as rows to extract from: CSV and JSONL have a row a line, every other file is one row; PDF through pypdf."""

from __future__ import annotations

import csv
import importlib
import io
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 64 * 2**20
MAX_ROWS = 100_000
# csv refuses longer cells by default, and long texts are what this is for.
MAX_CELL_CHARS = MAX_FILE_BYTES
FILE_COLUMN, TEXT_COLUMN = "file", "text"
# Names that a column of texts often has, best first; otherwise the column with the longest texts is taken.
TEXT_NAMES = ("text", "content", "body", "document", "message", "description")


class UnreadableSource(ValueError):
    """A file that gives no rows; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text to extract from, by the columns of its file; `error` when the file could not be read."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one or several files and the columns they have."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...]

    def pick_text_column(self) -> str | None:
        """The column that most likely holds the texts, None without columns."""
        by_name = {column.lower(): column for column in self.columns}
        named = next((by_name[name] for name in TEXT_NAMES if name in by_name), None)
        if named is not None or not self.columns:
            return named
        sample = self.rows[:50]
        return max(self.columns, key=lambda column: sum(len(row.cells.get(column, "")) for row in sample))


def read_table(paths: Iterable[str | Path]) -> Table:
    """All rows of these files, in order; a file that cannot be read is one row with its error.

    Raises:
        UnreadableSource: there are too many rows.
    """
    rows: list[Row] = []
    for path in map(Path, paths):
        try:
            rows += read_rows(path)
        except UnreadableSource as error:
            rows.append(Row(path.name, error=str(error)))
        if len(rows) > MAX_ROWS:
            raise UnreadableSource(f"there are more than {MAX_ROWS:,} rows; split the files")
    columns = dict.fromkeys(column for row in rows for column in row.cells)
    return Table(tuple(rows), tuple(columns))


def read_rows(path: Path) -> list[Row]:
    """The rows of one file.

    Raises:
        UnreadableSource: it is too large, not what its name says, or empty.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnreadableSource(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableSource(f"{path.name} cannot be read: {error.strerror}") from error
    suffix = path.suffix.lower()
    if suffix == ".pdf":
        return [Row(path.name, {FILE_COLUMN: path.name, TEXT_COLUMN: read_pdf(data, path.name)})]
    text = decode(data, path.name)
    if suffix in (".csv", ".tsv"):
        return _read_csv(text, path.name)
    if suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(text, path.name)
    return [Row(path.name, {FILE_COLUMN: path.name, TEXT_COLUMN: text})]


def decode(data: bytes, name: str) -> str:
    """UTF-8 text with plain line ends.

    Raises:
        UnreadableSource: it is not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableSource(f"{name} is not UTF-8 text: {error.reason} at byte {error.start:,}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_pdf(data: bytes, name: str) -> str:
    """The text of a PDF, its pages separated by empty lines.

    Raises:
        UnreadableSource: pypdf is missing, the file is broken or locked, or it holds pictures only.
    """
    try:
        pypdf = importlib.import_module("pypdf")
    except ImportError as error:
        raise UnreadableSource(f"{name}: reading PDF needs pypdf: pip install pypdf") from error
    # Every oddity of a file would otherwise be a line in the server's log.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages]
    # What a damaged file raises inside pypdf is not limited to its own errors.
    except (
        pypdf.errors.PyPdfError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise UnreadableSource(f"{name} cannot be read as PDF: {error}") from error
    text = "\n\n".join(page.strip() for page in pages).strip()
    if not text:
        raise UnreadableSource(
            f"{name} has no text in it (scanned pages are pictures); run it through OCR first"
        )
    return text


def _read_csv(text: str, name: str) -> list[Row]:
    csv.field_size_limit(MAX_CELL_CHARS)
    try:
        # Only the delimiter: what else is guessed (quotes, escapes) is wrong more often than the standard.
        delimiter = csv.Sniffer().sniff(text[:20_000], delimiters=",;\t|").delimiter
    except csv.Error:
        delimiter = "\t" if name.lower().endswith(".tsv") else ","
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise UnreadableSource(f"{name} is not CSV: {error}") from error
    if not lines:
        raise UnreadableSource(f"{name} is empty")
    columns = _name_columns(lines[0])
    filled = [line for line in lines[1:] if any(cell.strip() for cell in line)]
    return [
        Row(f"{name} row {number}", dict(zip(columns, line, strict=False)))
        for number, line in enumerate(filled, 1)
    ]


def _name_columns(cells: Sequence[str]) -> list[str]:
    """A name for each column, none twice."""
    names: list[str] = []
    for number, cell in enumerate(cells, 1):
        name = cell.strip() or f"column {number}"
        names.append(name if name not in names else f"{name} ({number})")
    return names


def _read_jsonl(text: str, name: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        row_name = f"{name} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            rows.append(Row(row_name, error=f"{row_name} is not JSON: {error}"))
            continue
        cells = value if isinstance(value, dict) else {TEXT_COLUMN: value}
        rows.append(Row(row_name, {key: _spell(cell) for key, cell in cells.items()}))
    return rows


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
