"""CSV tables as a pattern: typed columns, a header, one delimiter, fields in quotes where they may be."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .description import read_description
from .errors import InvalidGrammar
from .regex.text import escape
from .schema.formats import EXACT_PATTERNS

Type = Literal["string", "integer", "number", "boolean", "date"]
# Within what 64-bit integers and doubles hold exactly.
INTEGER = r"(?:0|-?[1-9][0-9]{0,17})"
NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
BOOLEAN = "(?:true|false)"
DATE = EXACT_PATTERNS["date"].removeprefix("^").removesuffix("$")
SCALAR_PATTERNS = {"integer": INTEGER, "number": NUMBER, "boolean": BOOLEAN, "date": DATE}


class Table(Struct, forbid_unknown_fields=True):
    """A description of tables: name of a column -> its type, or the values allowed."""

    columns: Annotated[dict[str, Type | Annotated[list[str], Meta(min_length=1)]], Meta(min_length=1)]
    has_header: bool = True
    delimiter: Literal[",", ";", "\t", "|"] = ","
    is_quoting: bool = True


def describe_table(written: Any) -> dict[str, Any]:
    """Return a table as a JSON value, checked."""
    table = read_description(written, Table, "CSV table")
    delimiter, is_quoting = table["delimiter"], table["is_quoting"]
    for name, kind in table["columns"].items():
        for text in (name, *(kind if isinstance(kind, list) else ())):
            write_field(text, delimiter, is_quoting)
    return table | {"columns": [[*column] for column in table["columns"].items()]}


def make_csv_pattern(table: dict[str, Any]) -> str:
    """Return the pattern of the tables that `describe_table` described; rows end with a line feed between them."""
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
