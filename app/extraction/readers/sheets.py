"""Reads Excel files: rows as lines, numbers with all digits and the signs of their formats, comments, text boxes.

Numbers stand as they are stored, not rounded as they are shown; dates are written as 2026-05-03.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from datetime import datetime, timedelta
from typing import Any

from .package import (
    CELL_GAP,
    Lines,
    Package,
    find_attribute,
    find_parts,
    name_of,
    note_unread,
    parse,
    read_blocks,
)

UNCOMPUTED = re.compile(rb"(?:</f>|<f[^>]*/>)\s*(?:<v\s*/>|<v></v>)?\s*</c>")  # a formula without its value
PADDED = re.compile(r"0[0 /-]*0")  # the format of a number with leading zeros, as 000-00
NUMBER = re.compile(r"[\d.,:/%€$£ +-]+")
MAX_WHOLE = 1e21  # numbers below are written with all their digits
# What a format shows as it is, a currency such as [$€-407], other brackets, room, and signs with a meaning.
FORMAT = re.compile(r'"(?P<text>[^"]*)"|\\(?P<sign>.)|\[\$(?P<unit>[^\]-]*)[^\]]*\]|\[[^\]]*\]|[_*].|(?P<code>.)')
SHOWN = "$€£¥ "  # without quotes
DIGITS = "0#?"


def read_xlsx(data: bytes, notes: list[str]) -> Lines:
    """Yield the rows of all sheets, each sheet behind its name, then comments and text boxes."""
    package = Package(data)
    sheets = find_parts(package, "xl/worksheets/sheet.*")
    num_formulas = sum(len(UNCOMPUTED.findall(package.read(name))) for name in sheets)
    note_unread(package, "xl/", notes)
    comments = [parse(package, name) for name in find_parts(package, r"xl/(?:.*/)?comments?\d*\.xml")]
    drawings = [parse(package, name) for name in find_parts(package, r"xl/drawings/drawing\d*\.xml")]
    if num_formulas:
        plural = "s have" if num_formulas > 1 else " has"
        notes.append(f"{num_formulas} formula{plural} no stored value; save the file in a spreadsheet program once")
    # By name, because it is slow to import, and only needed here.
    book = importlib.import_module("openpyxl").load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # some programs write a wrong size, outside which nothing would be read
        rows = [[_spell(cell) for cell in row] for row in sheet.iter_rows()]
        lines = [CELL_GAP.join(row).rstrip(" |") for row in rows if any(row)]
        if lines:
            yield f"\n{sheet.title}"
            yield from lines
    for each in (each for part in comments for each in part.iter() if name_of(each) == "comment"):
        text = "".join(child.text or "" for child in each.iter() if name_of(child) == "t")
        yield f"[Comment {find_attribute(each, 'ref')}: {' '.join(text.split())}]"
    for part in drawings:
        yield from read_blocks(part)


def read_table(data: bytes, notes: list[str]) -> Lines:
    """Yield the only sheet with cells as CSV, behind Excel's `sep=` line; nothing if it is no table.

    A table has names above all its cells: different ones that are no numbers, with two or more rows below, most of
    which are filled to the half.
    """
    book = importlib.import_module("openpyxl").load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    found = []
    for sheet in book.worksheets:
        sheet.reset_dimensions()
        rows = [[_spell(cell, is_one_line=False) for cell in row] for row in sheet.iter_rows()]
        found += [rows] if (rows := [row for row in rows if any(row)]) else []
    if len(found) != 1:
        return
    head, *below = found[0]
    names = [name for name in head if name]
    is_named = len(set(names)) == len(names) > 1 and not any(NUMBER.fullmatch(name) for name in names)
    is_inside = not any(any(row[len(names) :]) for row in found[0])
    num_filled = sum(2 * sum(map(bool, row)) >= len(names) for row in below)
    if is_named and is_inside and len(below) > 1 and 2 * num_filled > len(below):
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(row[: len(names)] for row in found[0])
        yield "sep=,"
        yield out.getvalue()


def _spell(cell: Any, is_one_line: bool = True) -> str:
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        before, codes, behind = _read_format(cell.number_format)
        if value < 0 and before:
            return f"-{before}{_spell_number(-value, codes)}{behind}"
        return f"{before}{_spell_number(value, codes)}{behind}"
    if isinstance(value, timedelta):
        seconds = round(abs(value.total_seconds()))
        return f"{'-' * (value < timedelta(0))}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if isinstance(value, datetime) and not {*"hs"} & {*_read_format(cell.number_format)[1].lower()}:
        value = value.date()
    return " ".join(str(value).split()) if is_one_line else str(value).strip()


def _spell_number(value: int | float, codes: str) -> str:
    """Return a number as the codes of its format ask, but not rounded."""
    if "%" in codes:
        return f"{value * 100:.15g}%"
    if PADDED.fullmatch(codes) and value >= 0 and value == int(value):
        size = codes.count("0")
        digits = f"{int(value):0{size}d}"
        last = iter(digits[-size:])
        return digits[:-size] + re.sub("0", lambda _: next(last), codes)
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < MAX_WHOLE else f"{value:.15g}"
    return str(value)


def _read_format(shape: str) -> tuple[str, str, str]:
    """Return the text that a format of positive numbers shows before the digits, its codes, and the text behind."""
    first = re.match(r'(?:"[^"]*"|\\.|[^;"\\])*', shape)
    shown, codes = [], []
    for match in FORMAT.finditer(first.group() if first else ""):
        code = match["code"] or ""
        codes.append(code)
        shown.append(match["text"] or match["sign"] or match["unit"] or (code if code in SHOWN else ""))
    digits = [place for place, code in enumerate(codes) if code and code in DIGITS]
    if not digits:
        return "", "".join(codes), ""
    start, end = digits[0], digits[-1] + 1
    inner = "".join(code or sign for code, sign in zip(codes[start:end], shown[start:end], strict=True))
    percent = "%" * ("%" in codes)
    # A comma behind the digits shows thousands of the stored number, for which the text behind stands.
    if ",." in inner or "," in codes[end : end + 1]:
        return "", inner + percent, ""
    return "".join(shown[:start]).lstrip(), inner + percent, "".join(shown[end:]).rstrip()
