"""Records as files: JSONL keeps everything; CSV, Excel and Parquet are tables with one column a field.

CSV and Excel are for people, and cannot be read back as they were. If all records together have one list of objects,
each of its items is a row, which repeats the other fields. Lists of single values are joined by "; ". Several lists of
objects, and lists in lists, are JSON text; Excel has a further sheet for each of several lists, with one row an item.
Parquet is for programs: it has one row a source, and all lists are JSON text.

A table's other columns (such as an id) become the record's `row` in JSONL, and separate columns in the other formats.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine import is_unicode

Path = tuple[str, ...]  # keys of the path to a field

# The rule, for those who download.
FILE_RULE = (
    "CSV and Excel: each item of a list is a row that repeats the other fields; lists of single values are joined by "
    "“; ”. With several lists, Excel has a sheet for each, and CSV has them as JSON. "
    "JSON keeps everything as it is."
)
FORMATS = ("jsonl", "csv", "xlsx", "parquet")  # in the order in which they are offered
# Columns about the run, in front of the record's own.
ABOUT = ("source", "model", "valid", "finish_reason", "confidence", "to_check", "approved", "error")
RARE = ("model", "approved", "error")  # absent if no record has them
MAX_CELLS = 20_000_000  # records whose keys all differ would fill the memory
MAX_SHEET_ROWS, MAX_CELL_CHARS = 2**20, 32_767  # of Excel
NOT_IN_CELL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
NOT_IN_TITLE = re.compile(r"[\x00-\x1f:\\/?*\[\]']")
# Text that a spreadsheet would run as a formula, after invisible characters; +44 20 7946 and -12.50 are data.
FORMULA = re.compile(
    r"[\t\r]|[\s\x00-\x1f\u200b-\u200f\u2060\ufeff]*(?:[=@\uff1d\uff20]|[+\uff0b\uff0d-](?![\d\s().,/-]*\Z))"
)


class ExportError(ValueError):
    """Records cannot be written in the requested format; the message names a solution."""


def export(records: Sequence[Mapping[str, Any]], file_format: str) -> bytes:
    """Return the content of a file with these records, from `ExtractionResult.to_json` or a batch."""
    try:
        match file_format:
            case "jsonl":
                return b"".join(_write_line(each) for each in records)
            case "csv":
                return write_csv(make_rows(records, is_sheet=True))
            case "xlsx":
                return write_xlsx(records)
            case "parquet":
                return write_parquet(make_rows(records))
    except UnicodeEncodeError as error:
        odd = (each for each in records if not is_unicode(json.dumps(dict(each), ensure_ascii=False)))
        where = next((f"{each.get('source')!r}" for each in odd), "a column")
        raise ExportError(
            f"{where} contains an unpaired surrogate, which only JSONL can keep: export JSONL"
        ) from error
    raise ExportError(f"format {file_format!r} is not one of {', '.join(FORMATS)}")


def _write_line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(dict(record), ensure_ascii=False)
    # A lone surrogate can only be written as an escape.
    return f"{text if is_unicode(text) else json.dumps(dict(record))}\n".encode()


def make_rows(records: Sequence[Mapping[str, Any]], is_sheet: bool = False) -> list[dict[str, Any]]:
    """Return flat rows, all with the same columns: objects become `a.b`.

    `confidence` is the lowest of the record's values, `to_check` the JSON pointers of flagged values.

    Args:
        is_sheet: one row an item of the only list of objects, and lists of single values joined; otherwise one row a
            record, and all lists as JSON text.
    """
    about = [name for name in ABOUT if name not in RARE or any(name in each for each in records)]
    path = _find_only_list(records) if is_sheet else None
    parts = [(each, part) for each in records for part in _split(each.get("record"), path)]
    given: list[dict[Path, Any]] = [{(name,): cell for name, cell in each.get("row", {}).items()} for each, _ in parts]
    found = [dict(_flatten(part, is_sheet)) for _, part in parts]
    given_names = _name_columns(given, "row", about)
    found_names = _name_columns(found, "record", [*about, *given_names.values()])
    num_cells = len(parts) * (len(given_names) + len(found_names))
    if num_cells > MAX_CELLS:
        raise ExportError(f"a table of these records has {num_cells:,} cells; at most {MAX_CELLS:,}: export JSONL")
    return [
        {name: each.get(name) for name in about}
        | {
            "confidence": min((each.get("confidence") or {}).values(), default=None),
            "to_check": ", ".join(each.get("flags") or ()),
        }
        | {name: own.get(path) for path, name in given_names.items()}
        | {name: row.get(path) for path, name in found_names.items()}
        for (each, _), own, row in zip(parts, given, found, strict=True)
    ]


def _find_only_list(records: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the path of the list of objects, if all records together have one."""
    paths = {path for each in records for path, _ in _find_lists(each.get("record"))}
    return paths.pop() if len(paths) == 1 else None


def _split(record: Any, path: Path | None) -> Iterator[Any]:
    """Yield the record once for each item of its list at a path, with the item in the list's place."""
    value = record
    for key in path or ():
        value = value.get(key) if isinstance(value, dict) else None
    if path is None or not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        yield record
    else:
        # An empty list has one row, without values of an item.
        yield from (_replace(record, path, item) for item in value or [{}])


def _replace(value: Any, path: Path, item: Any) -> Any:
    return value | {path[0]: _replace(value[path[0]], path[1:], item)} if path else item


def _name_columns(rows: Sequence[Mapping[Path, Any]], origin: str, before: Sequence[str]) -> dict[Path, str]:
    """Return a unique column name for each field: a key may contain a dot, or equal another column's name."""
    names: dict[Path, str] = {}
    taken = set(before)
    for path in dict.fromkeys(path for row in rows for path in row):
        name = base = f"{origin}.{path[0]}" if path[0] in before and len(path) == 1 else ".".join(path)
        number = 1
        while name in taken:
            number += 1
            name = f"{base} ({number})"
        names[path] = name
        taken.add(name)
    return names


def _flatten(value: Any, is_sheet: bool, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, is_sheet, (*path, key))
    elif isinstance(value, list):
        is_plain = is_sheet and not any(isinstance(item, dict | list) for item in value)
        texts = [item if isinstance(item, str) else json.dumps(item) for item in value]
        yield path or ("value",), "; ".join(texts) if is_plain else json.dumps(value, ensure_ascii=False)
    elif path or value is not None:
        yield path or ("value",), value


def write_csv(rows: list[dict[str, Any]]) -> bytes:
    """Return a file of flat rows with the same columns."""
    columns = list(rows[0]) if rows else list(ABOUT)
    # With a byte order mark, without which spreadsheets misread accents.
    text = io.StringIO("\ufeff")
    text.seek(0, io.SEEK_END)
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerows([map(_spell, columns), *([_spell(row.get(name)) for name in columns] for row in rows)])
    return text.getvalue().encode()


def _spell(value: Any) -> Any:
    """Write true and false as in JSON, and quote a text that a spreadsheet would run as a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "'" + value if isinstance(value, str) and FORMULA.match(value) else value


def write_xlsx(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a workbook: a sheet of the records, and one of each list of several, with the number of the record."""
    # By name, as for Parquet.
    openpyxl, cell = importlib.import_module("openpyxl"), importlib.import_module("openpyxl.cell")
    rows = make_rows(records, is_sheet=True)
    json.dumps(rows, ensure_ascii=False).encode()  # raises as the other formats do for what is no text
    sheets: dict[Path, list[dict[Path, Any]]] = {(): [{(name,): value for name, value in row.items()} for row in rows]}
    for number, each in enumerate(records if _find_only_list(records) is None else (), 1):
        for path, items in _find_lists(each.get("record")):
            sheets.setdefault(path, []).extend({(): number} | dict(_flatten(item, True)) for item in items)
    tables = [(".".join(path) or "records", _make_table(lines)) for path, lines in sheets.items()]
    for name, table in tables:
        if len(table) > MAX_SHEET_ROWS:
            raise ExportError(f"{name} has {len(table) - 1:,} rows; Excel takes {MAX_SHEET_ROWS - 1:,}: export CSV")
    book = openpyxl.Workbook(write_only=True)
    for name, table in tables:
        sheet = book.create_sheet(NOT_IN_TITLE.sub("_", name)[:25])  # openpyxl numbers equal names
        for row in table:
            cells = [cell.WriteOnlyCell(sheet, value) for value in row]
            for each in cells:
                if each.data_type == "f":
                    each.data_type = "s"  # a text, which Excel must not run as a formula
            sheet.append(cells)
    sink = io.BytesIO()
    book.save(sink)
    return sink.getvalue()


def _make_table(lines: Sequence[Mapping[Path, Any]]) -> list[list[Any]]:
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return [
        [".".join(column) or "#" for column in columns],
        *([_make_excel_value(line.get(column)) for column in columns] for line in lines),
    ]


def _find_lists(value: Any, path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """Yield the lists of objects in a record that lie in objects only."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _find_lists(inner, (*path, key))
    elif path and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        yield path, value


def _make_excel_value(value: Any) -> Any:
    """Return a value that a cell can hold: Excel has doubles, no control characters, and bounds a text."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**15:
        return str(value)
    if isinstance(value, str):
        if len(value) > MAX_CELL_CHARS:
            raise ExportError(f"a text has {len(value):,} characters; Excel takes {MAX_CELL_CHARS:,}: export CSV")
        return NOT_IN_CELL.sub("\ufffd", value)
    return value


def write_parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return a file of flat rows with the same columns."""
    # By name: only this format needs it, and its import takes a while.
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    columns = list(rows[0]) if rows else list(ABOUT)
    table = arrow.table({name: _unify([row.get(name) for row in rows]) for name in columns})
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def _unify(values: list[Any]) -> list[Any]:
    """Return one type per column: numbers if all are numbers, flags if all are flags, else text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float} and all(abs(v) <= sys.float_info.max for v in values if isinstance(v, int)):
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and (kinds != {int} or all(abs(v) < 2**63 for v in values if v is not None)):
        return values
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
