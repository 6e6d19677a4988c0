"""CSV as programs write it: any delimiter, lines above the header, a `sep=` line, and rows of unequal length."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.extraction.decoding import UnreadableSource

# Names that a column of texts often has, best first.
TEXT_NAMES = ("text", "content", "body", "document", "message", "description")
DELIMITERS = ",;\t|"
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\n', re.IGNORECASE)  # Excel's, the first line of a file
# 1,234.56 and -12,50 and 3 % and 2026-02-01 and 1.2.2026 10:15
NUMBER = re.compile(r"[\s\d.,:/%€$£()+-]*\d[\s\d.,:/%€$£()+-]*")
MAX_CELL_CHARS = 64 * 2**20  # csv refuses longer cells by default, and long texts are what this is for
MAX_HEADER_CHARS = 80  # of a cell below lines that are not part of the table
NUM_SNIFFED = 20_000  # characters used to find delimiter and header
MAX_NOTED_CHARS = 200
MAX_ABOVE = 2  # lines that may be wider than the table below them


@dataclass(frozen=True, slots=True)
class CsvTable:
    """The names of the columns, the rows that are not blank, and what was left out or renamed."""

    columns: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A delimiter with the header it gives.

    Attributes:
        start: number of lines above the header.
        width: cells of the header.
        evenness: share of the rows below it that have as many.
    """

    delimiter: str
    start: int = 0
    width: int = 1
    evenness: float = 0.0


def read_csv(text: str, name: str, check: Callable[[int, int], None]) -> CsvTable:
    """Read a table with plain line ends.

    Args:
        check: raises if so many rows and cells are too many.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    named = SEPARATOR_LINE.match(text)
    body = text[named.end() :] if named else text
    layout = find_layout(body, name, named[1] if named else "")
    above, below = _split_lines(body, layout.start)
    begun = num_above = layout.start + bool(named) + 1  # the line where the row being read begins
    reader = csv.reader(io.StringIO(below, newline=""), delimiter=layout.delimiter, strict=True)
    filled: list[list[str]] = []
    num_cells = 0
    try:
        for line in reader:
            begun = num_above + reader.line_num
            if any(cell.strip() for cell in line):
                filled.append(line)
                num_cells += len(line)
                check(len(filled) - 1, num_cells)
    except csv.Error as error:
        last = num_above + reader.line_num - 1
        where = f"line {begun}" if begun >= last else f"lines {begun} to {last}"
        raise UnreadableSource(f"{name} is not CSV, {where}: {error}") from error
    if len(filled) < 2:
        raise UnreadableSource(f"{name} {'has a header and no row below it' if filled else 'is empty'}")
    columns, notes = name_columns(filled[0])
    if any(NUMBER.fullmatch(cell.strip()) for cell in filled[0]):
        shown = " / ".join(map(str.strip, filled[0]))[:MAX_NOTED_CHARS]
        notes = [f"{name}: the first row is read as names of the columns: {shown}", *notes]
    if above.strip(" \t\n" + DELIMITERS):
        shown = " / ".join(line for line in above.split("\n") if line.strip())[:MAX_NOTED_CHARS]
        notes = [f"{name}: {layout.start} lines above the header are not part of the table: {shown}", *notes]
    return CsvTable(columns, filled[1:], tuple(notes))


def name_columns(cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a name for each column, none twice, and notes on those that were changed."""
    names: dict[str, None] = {}
    changed = []
    for number, cell in enumerate(cells, 1):
        name = cell.strip() or f"column {number}"
        while name in names:
            name = f"{name} ({number})"
        names[name] = None
        if name != cell.strip():
            changed.append(name)
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    notes = [f"columns without a name of their own are called {', '.join(changed[:5])}{more}"] if changed else []
    return list(names), notes


def find_layout(text: str, name: str, delimiter: str = "") -> Layout:
    """Return the delimiter and header of the start of a table; the delimiter may be given."""
    start = text[:NUM_SNIFFED]
    usual = "\t" if name.lower().endswith(".tsv") else ","
    marks = delimiter or sorted(DELIMITERS, key=lambda mark: mark != usual)
    found = [_lay_out(start, mark, len(text) > NUM_SNIFFED) for mark in marks if mark in start]
    best = max(found, key=lambda each: (each.width > 1, each.evenness, each.width), default=None)
    return best if best is not None and best.width > 1 else Layout(delimiter or usual)


def _lay_out(text: str, delimiter: str, is_cut: bool) -> Layout:
    """Return the header that a delimiter gives, with the rows below it."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: list[list[str]] = []
    lines: list[tuple[int, bool]] = []  # where a row begins, and whether a blank line is above it
    begun, is_apart = 0, False
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append(row)
                lines.append((begun, is_apart))
                is_apart = False
            else:
                is_apart = True
            begun = reader.line_num
    except (csv.Error, ValueError):
        return Layout(delimiter)
    if is_cut and len(rows) > 1:
        del rows[-1]
    if not rows:
        return Layout(delimiter)
    header = _find_header(rows, [apart for _, apart in lines], text, delimiter)
    width = len(rows[header])
    below = rows[header + 1 :]
    evenness = sum(len(row) == width for row in below) / max(1, len(below))
    return Layout(delimiter, lines[header][0], width, evenness)


def _find_header(rows: list[list[str]], is_apart: list[bool], text: str, delimiter: str) -> int:
    """Return the index of the header: the first row, unless what is above another is clearly no part of the table."""
    filled = [_count_filled(row) for row in rows]
    apart = next((number for number, is_first in enumerate(is_apart) if number and is_first), 0)
    if 0 < apart <= MAX_ABOVE and _is_wider_preamble(rows[:apart], rows[apart:]):
        return apart
    width = max(Counter(map(len, rows)).items(), key=lambda each: (each[1], each[0]))[0]
    if width < 2 or filled[0] >= width or rows[0][0].strip().lower() in TEXT_NAMES:
        return 0
    index = next((number for number, count in enumerate(filled) if count >= width), 0)
    header, below = rows[index], rows[index + 1 :]
    cells = [cell.strip() for cell in header]
    is_name = all(cells) and len(set(cells)) == len(cells) and max(map(len, cells)) <= MAX_HEADER_CHARS
    if not below or not is_name or any(NUMBER.fullmatch(cell) for cell in cells):
        return 0
    columns = zip(cells, zip(*(row for row in below if len(row) == width), strict=False), strict=False)
    has_numbers = any(
        not re.search(r"\d", cell) and all(NUMBER.fullmatch(each.strip()) for each in column if each.strip())
        for cell, column in columns
        if any(map(str.strip, column))
    )
    # In a sentence a comma or semicolon has a space behind it.
    is_prose = 2 * text.count(f"{delimiter} ") > text.count(delimiter)
    has_line = is_apart[index] or (len(below) > 1 and not re.search(r"\d", "".join(cells)) and " " in rows[0][0])
    return index if has_numbers or (has_line and not is_prose) else 0


def _is_wider_preamble(above: list[list[str]], block: list[list[str]]) -> bool:
    """Return whether lines with numbers, and of another width, stand above a longer and regular table."""
    widths, names = set(map(len, block)), [cell.strip() for cell in block[0]]
    is_table = len(block) > len(above) and len(widths) == 1 and len(names) > 1 and all(names)
    has_numbers = any(NUMBER.fullmatch(cell.strip()) for row in above for cell in row)
    is_header = len(set(names)) == len(names) and not any(map(NUMBER.fullmatch, names))
    return is_table and has_numbers and is_header and widths.isdisjoint(map(len, above))


def _count_filled(row: list[str]) -> int:
    """Return the number of cells up to the last that is not blank."""
    return max((number for number, cell in enumerate(row, 1) if cell.strip()), default=0)


def _split_lines(text: str, num_lines: int) -> tuple[str, str]:
    """Return the first lines, and the others."""
    at = 0
    for _ in range(num_lines):
        at = text.index("\n", at) + 1
    return text[:at], text[at:]
