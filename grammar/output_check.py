"""The check after the end: whether a finished text is what its spec asked for, by other means than the engines'."""

import csv
import io
import json
import re

from .csv_table import SCALAR_PATTERNS
from .regex.linear_pattern import LinearPattern, read_pattern
from .spec import GrammarSpec
from .validator import SchemaValidator
from .xml.validator import XmlValidator


class OutputCheck:
    """Checks finished texts of one spec; kinds that nothing here can read (`checks` is False) are left alone.

    json_schema and json_object by a JSON Schema validator, xml by an XML parser, csv by Python's csv, regex by an
    engine of linear time, choice by comparison. EBNF, Lark, structural tags, and patterns that this engine does not
    read are not checked, nor are texts beyond ASCII where a shorthand such as `\\d` decides. A text that was cut short
    (finish_reason length) is not finished and never valid.
    """

    def __init__(self, spec: GrammarSpec) -> None:
        self._spec = spec
        self._schema: SchemaValidator | None = None
        self._tree: XmlValidator | None = None
        self._pattern: LinearPattern | None = None
        if spec.kind in ("json_schema", "json_object"):
            self._schema = SchemaValidator(json.loads(spec.text))
        elif spec.kind == "xml":
            self._tree = XmlValidator(spec.text)
        elif spec.kind == "regex":
            self._pattern = find_pattern(spec.text)
        self.checks = spec.kind in ("choice", "csv") or any((self._schema, self._tree, self._pattern))

    def is_valid(self, text: str) -> bool | None:
        """Return whether a finished text is what the spec asks for; None where nothing but the grammar can tell."""
        if self._pattern is not None:
            return self._pattern.matches(text)
        return self.first_error(text) is None if self.checks else None

    def first_error(self, text: str) -> str | None:
        """Return what is wrong with a finished text, None when nothing is or it is not checked."""
        if self._schema is not None:
            return check_json(text, self._schema)
        if self._tree is not None:
            return self._tree.first_error(text)
        if self._pattern is not None:
            return "the text does not match the pattern" if self._pattern.matches(text) is False else None
        if self._spec.kind == "choice":
            return None if text in json.loads(self._spec.text) else f"{text[:80]!r} is none of the choices"
        return check_table(text, json.loads(self._spec.text)) if self._spec.kind == "csv" else None


def find_pattern(pattern: str) -> LinearPattern | None:
    """Return a pattern, None where it may mean something else to the engines or cannot be matched."""
    if re.search(r"\[\[|\[:|&&|--|~~|\\[pPzAbB]", pattern) is not None:
        return None
    return read_pattern(pattern)


def check_json(text: str, validator: SchemaValidator) -> str | None:
    try:
        instance = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    found = validator.first_error(instance)
    return None if found is None else f"{found[0] or '#'}: {found[1]}"


def check_table(text: str, table: dict[str, object]) -> str | None:
    columns = table["columns"]
    assert isinstance(columns, list), "describe_table made it"
    is_quoting, delimiter = bool(table["is_quoting"]), str(table["delimiter"])
    style = {"quoting": csv.QUOTE_MINIMAL if is_quoting else csv.QUOTE_NONE, "delimiter": delimiter}
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True, **style))  # type: ignore[arg-type]
    except csv.Error as error:
        return f"not CSV: {error}"
    names = [name for name, _ in columns]
    if table["has_header"]:
        if not rows or rows[0] != names:
            return f"the header is not {names}"
        rows = rows[1:]
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            return f"row {number} has {len(row)} fields, not {len(columns)}"
        for (name, kind), field in zip(columns, row, strict=True):
            if not is_field(field, kind):
                return f"row {number}: {field[:80]!r} is no {name}"
    return None


def is_field(field: str, kind: str | list[str]) -> bool:
    if isinstance(kind, list):
        return field in kind
    return kind == "string" or re.fullmatch(SCALAR_PATTERNS[kind], field) is not None
