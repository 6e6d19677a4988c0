"""The rows of a text's tables, whose heads name the fields of a list: where each field's cell stands in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from app.extraction.column_names import is_position, is_total, rate_match
from app.extraction.dates import read_date
from app.extraction.numbers import find_numbers
from app.extraction.pointers import escape_pointer
from app.extraction.prompt import Schema
from app.extraction.schema_places import list_kinds

Span = tuple[int, int]  # start and end in the text

SEPARATORS = tuple(map(re.compile, (r"\|", r"\t", r" {2,}", ";")))
NO_HEAD = re.compile(r"\d|:\s*\S")
RULE = re.compile(r"[-=_+|:;\s]*")
EMPTY = ("", "-", "–", "—")
NUMBER = re.compile(r"(?:[^\W\d_]{1,3}\.? |[A-Z]{0,3}[€$£¥] ?)?[-−+(]?[.\d][\d.,'’ \u00a0]*[^\d\n]{0,8}")
FRACTION = re.compile(r"\d[.,](?!0+(?!\d)|\d{3}(?!\d))\d")
DECIMALS = re.compile(r"\d[.,]\d{1,2}(?!\d)")
MIN_FILLED = 0.6  # share of the columns that a row has cells for
MIN_SURE_COLUMNS = 3  # that many cells in a line are a row wherever they stand
MAX_FORM_CHARS = 4000  # below the heads, searched for a row without gaps
MAX_HEAD_CHARS, MAX_COLUMNS = 40, 10
SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a table: its heads, and the number of the column of each field.

    Attributes:
        kinds: of the values that may stand in each column; none known: any.
        forms: of the cells of the first row without gaps; empty if there is none.
        others: columns that are shown too, because a field has no column.
    """

    name: str
    separator: re.Pattern[str]
    heads: tuple[str, ...]
    fields: Mapping[str, int]
    all_fields: frozenset[str]
    kinds: tuple[frozenset[str], ...]
    forms: tuple[str, ...] = ()
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableRow:
    """One item of the list `name`: its line, its text for the model, and where each field's cell stands.

    Attributes:
        missing: fields that the row says nothing about.
    """

    name: str
    start: int
    end: int
    text: str
    cells: Mapping[str, Span]
    missing: frozenset[str]


def find_rows(schema: Schema, lists: Mapping[str, Schema], text: str) -> tuple[list[TableRow], list[Span]]:
    """Return the rows of all tables, and the lines that are no longer needed, in order."""
    rows: list[TableRow] = []
    removed: list[Span] = []
    columns: _Columns | None = None
    is_broken = False  # other lines were between: what looks like a row may be none
    for start, end in _list_lines(text):
        line = text[start:end]
        if not line.strip():
            continue
        found = _read_heads(schema, lists, line)
        if found is not None:
            columns, is_broken = _learn_forms(found, text, end), False
            removed.append((start, end))
        elif columns is not None and RULE.fullmatch(line):
            removed.append((start, end))
        elif columns is not None:
            row = _read_row(columns, text, start, end, is_broken)
            is_broken = is_broken or row is None
            if row is not None:
                rows.append(row)
                removed.append((start, end))
    return rows, removed


def _list_lines(text: str) -> Iterator[Span]:
    """Yield each line with its line break."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield start, end
        start = end


def _cut(line: str, separator: re.Pattern[str]) -> list[Span]:
    """Return where the cells of a line stand."""
    edges = [match.span() for match in separator.finditer(line.rstrip(), len(line) - len(line.lstrip(" ")))]
    starts, ends = [0, *(end for _, end in edges)], [*(start for start, _ in edges), len(line)]
    return [_strip(line, start, end) for start, end in zip(starts, ends, strict=True)]


def _strip(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    begin = start + len(piece) - len(piece.lstrip())
    return begin, max(begin, start + len(piece.rstrip()))


def _learn_forms(columns: _Columns, text: str, start: int) -> _Columns:
    """Return the columns with the forms of the first row below that has no gaps."""
    for line in text[start : start + MAX_FORM_CHARS].split("\n"):
        cells = [line[low:high] for low, high in _cut(line, columns.separator)]
        if len(cells) == len(columns.heads) and not any(cell in EMPTY for cell in cells) and not RULE.fullmatch(line):
            return replace(columns, forms=tuple(map(_find_form, cells)))
    return columns


def _read_heads(schema: Schema, lists: Mapping[str, Schema], line: str) -> _Columns | None:
    """Return the columns of a line of heads that names at least two fields of a list, and half of them."""
    separator = next((each for each in SEPARATORS if each.search(line.strip())), None)
    if separator is None:
        return None
    heads = tuple(line[start:end].strip("*_ ") for start, end in _cut(line, separator))
    is_short = all(len(head) <= MAX_HEAD_CHARS and not NO_HEAD.search(head) for head in heads)
    if not is_short or len(heads) > MAX_COLUMNS:
        return None
    for name, item in lists.items():
        pointer = f"/{escape_pointer(name)}/0"
        kinds = {field: list_kinds(schema, f"{pointer}/{escape_pointer(field)}") for field in item["properties"]}
        fields = _match(heads, [field for field, kind in kinds.items() if kind <= SCALARS])
        if len(fields) >= 2 and 2 * len(fields) >= len(kinds):
            by_column = {column: field for field, column in fields.items()}
            found = (
                kinds[by_column[column]] if column in by_column
                else frozenset({"integer"}) if is_position(head) else frozenset[str]()
                for column, head in enumerate(heads)
            )
            others = [n for n, head in enumerate(heads) if n not in by_column and head and not is_position(head)]
            shown = tuple(others) if len(fields) < len(kinds) else ()
            return _Columns(name, separator, heads, fields, frozenset(kinds), tuple(found), others=shown)
    return None


def _match(heads: Sequence[str], fields: Sequence[str]) -> dict[str, int]:
    """Return the column of each field, the surest matches first."""
    rated = sorted(
        (-rate, column, field)
        for field in fields
        for column, head in enumerate(heads)
        if (rate := rate_match(field, head))
    )
    matched: dict[str, int] = {}
    for _, column, field in rated:
        if field not in matched and column not in matched.values():
            matched[field] = column
    return matched


def _read_row(columns: _Columns, text: str, start: int, end: int, is_broken: bool) -> TableRow | None:
    """Return the row that a line is; None for a total, and for any line that does not fit the columns."""
    spans = [(start + low, start + high) for low, high in _cut(text[start:end], columns.separator)]
    cells = [text[slice(*span)] for span in spans]
    num_filled = sum(cell not in EMPTY for cell in cells)
    label = next((cell for cell in cells if any(map(str.isalpha, cell))), "")
    numbers = _align(columns, cells, is_broken)
    num_heads = sum(map(bool, columns.heads))
    is_short = num_filled < max(2, MIN_FILLED * num_heads)
    if is_short or numbers is None or is_total(label, num_filled < num_heads):
        return None
    filled = {number: span for number, span in zip(numbers, spans, strict=True) if text[slice(*span)] not in EMPTY}
    at = {field: filled[number] for field, number in columns.fields.items() if number in filled}
    if len(at) < 2:
        return None
    pieces = [
        f"{_label(field)}: {_spell(text[slice(*span)], columns.kinds[columns.fields[field]])}"
        for field, span in at.items()
    ]
    others = [number for number in columns.others if number in filled]
    pieces += [f"{columns.heads[number]}: {text[slice(*filled[number])]}" for number in others]
    missing = (frozenset(columns.fields) if others else columns.all_fields) - set(at)
    return TableRow(columns.name, start, end, "; ".join(pieces), at, missing)


def _spell(cell: str, kinds: frozenset[str]) -> str:
    """Return a cell as it is shown to the model: an amount that has one reading with a decimal point."""
    found = [number for number in find_numbers(cell) if number.is_sure] if kinds & {"number", "integer"} else []
    if len(found) != 1 or len(found[0].readings) != 1 or "string" in kinds:
        return cell
    return f"{cell[: found[0].start]}{found[0].readings[0]}{cell[found[0].end :]}"


def _align(columns: _Columns, cells: Sequence[str], is_strict: bool) -> tuple[int, ...] | None:
    """Return the column of each cell; where cells are missing, the first way in which the others fit.

    Args:
        is_strict: whether cells with gaps must have the forms of the first row.
    """
    if len(cells) > len(columns.heads):
        return None
    forms = [_find_form(cell) for cell in cells]
    fit = [[_fits(cell, kinds) for kinds in columns.kinds] for cell in cells]
    ways = [
        way
        for way in combinations(range(len(columns.heads)), len(cells))
        if all(row[number] for row, number in zip(fit, way, strict=True))
    ]
    alike = (
        way
        for way in ways
        if columns.forms
        and all(
            cell in EMPTY or form == columns.forms[number]
            for cell, form, number in zip(cells, forms, way, strict=True)
        )
    )
    is_full = len(cells) == len(columns.heads) >= MIN_SURE_COLUMNS and not any(cell in EMPTY for cell in cells)
    return next(alike, ways[0] if ways and (is_full or not is_strict) else None)


def _find_form(cell: str) -> str:
    if read_date(cell):
        return "date"
    if NUMBER.fullmatch(cell) is None:
        return "text"
    return "fraction" if DECIMALS.search(cell) else "integer"


def _fits(cell: str, kinds: frozenset[str]) -> bool:
    """Return whether a cell may have a value of these kinds."""
    if cell in EMPTY or "string" in kinds or not kinds & {"number", "integer"}:
        return True
    return NUMBER.fullmatch(cell) is not None and ("number" in kinds or FRACTION.search(cell) is None)


def _label(field: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[_-]+", " ", field)
    return words[:1].upper() + words[1:].lower()
