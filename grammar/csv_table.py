"""CSV tables as a pattern: typed columns, a header, one delimiter, fields in quotes where they may be."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InvalidGrammar
from .regex.text import escape
from .schema.formats import EXACT_PATTERNS

# Within what 64-bit integers and doubles hold exactly.
INTEGER = r"(?:0|-?[1-9][0-9]{0,17})"
NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
BOOLEAN = "(?:true|false)"
DATE = EXACT_PATTERNS["date"].removeprefix("^").removesuffix("$")
SCALAR_PATTERNS = {"integer": INTEGER, "number": NUMBER, "boolean": BOOLEAN, "date": DATE}
DELIMITERS = (",", ";", "\t", "|")


def describe_table(
    columns: Mapping[str, str | Sequence[str]], has_header: bool, delimiter: str, is_quoting: bool
) -> dict[str, Any]:
    """Return a table as a JSON value, checked.

    Args:
        columns: name -> "string", "integer", "number", "boolean", "date", or a list of the values allowed.
    """
    if not columns:
        raise InvalidGrammar("a CSV table needs at least one column")
    if delimiter not in DELIMITERS:
        raise InvalidGrammar(f"a CSV delimiter is one of {list(DELIMITERS)}, not {delimiter!r}")
    listed = []
    for name, kind in columns.items():
        values = None if isinstance(kind, str) else list(kind)
        if values is None and kind != "string" and kind not in SCALAR_PATTERNS:
            known = ["string", *SCALAR_PATTERNS]
            raise InvalidGrammar(f"column {name!r} has type {kind!r}; choose from {known} or list its values")
        if values is not None and not (values and all(isinstance(value, str) for value in values)):
            raise InvalidGrammar(f"column {name!r} needs at least one value, all of them strings")
        for text in (name, *(values or ())):
            write_field(text, delimiter, is_quoting)
        listed.append([name, kind if values is None else values])
    return {"columns": listed, "has_header": has_header, "delimiter": delimiter, "is_quoting": is_quoting}


def make_csv_pattern(text: str) -> str:
    """Return the pattern of the tables that `describe_table` described; rows end with a line feed between them."""
    table = json.loads(text)
    delimiter, is_quoting, columns = table["delimiter"], table["is_quoting"], table["columns"]
    fields = [make_field(kind, delimiter, is_quoting, len(columns) == 1) for _, kind in columns]
    row = escape(delimiter).join(fields)
    if not table["has_header"]:
        return rf"{row}(?:\n{row})*"
    header = delimiter.join(write_field(name, delimiter, is_quoting) for name, _ in columns)
    return rf"{escape(header)}(?:\n{row})*"


def make_field(kind: str | list[str], delimiter: str, is_quoting: bool, is_alone: bool) -> str:
    if isinstance(kind, list):
        return "(?:" + "|".join(escape(write_field(value, delimiter, is_quoting)) for value in kind) + ")"
    if kind != "string":
        return SCALAR_PATTERNS[kind]
    # An empty line would be no row at all.
    plain = rf'[^"\x00-\x1f\x7f{escape(delimiter)}]' + ("+" if is_alone else "*")
    return rf'(?:{plain}|"(?:[^"\x00-\x1f\x7f]|"")*")' if is_quoting else plain


def write_field(text: str, delimiter: str, is_quoting: bool) -> str:
    """Return a fixed text as a field, in quotes where it has to be."""
    if any((ord(character) < 0x20 and character != "\t") or character == "\x7f" for character in text):
        raise InvalidGrammar(f"the CSV field {text!r} holds a control character")
    if not text:
        raise InvalidGrammar("names and values of a CSV table are not empty")
    if delimiter not in text and '"' not in text:
        return text
    if not is_quoting:
        raise InvalidGrammar(f"the CSV field {text!r} needs quotes, which quoting=False forbids")
    return '"' + text.replace('"', '""') + '"'
