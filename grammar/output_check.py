"""The check after the end: whether a finished text is what its spec asked for, by other means than the engines'."""

import csv
import io
import json
import math
import re
from typing import Any, Literal

from .csv_table import SCALAR_PATTERNS
from .regex.dialects import read_classes
from .regex.text import Matches, read_pattern
from .spec import GrammarSpec
from .validator import SchemaValidator
from .xml.validator import XmlValidator

MAX_NUM_DIGITS = 4300


class OutputCheck:
    """Checks finished texts of one spec.

    json_schema and json_object by a JSON Schema validator, xml by an XML parser, csv by Python's csv, regex by an
    engine of linear time, choice by comparison. EBNF, Lark, structural tags, and patterns that this engine does not
    read are not checked, nor are texts beyond ASCII where a shorthand such as `\\d` decides. A text that was cut short
    (finish_reason length) is not finished and never valid.
    """

    def __init__(self, spec: GrammarSpec) -> None:
        self._matches = find_check(spec)

    def is_valid(self, text: str) -> bool | None:
        """Return whether a finished text is what the spec asks for; None where nothing but the grammar can tell."""
        return None if self._matches is None else self._matches(text)


def find_check(spec: GrammarSpec) -> Matches | None:
    """Return the check of a spec's texts, None where there is none."""
    match spec.kind:
        case "json_schema" | "json_object":
            validator = SchemaValidator(spec.document)
            return lambda text: is_instance(text, validator)
        case "xml":
            return XmlValidator(spec.text).is_valid
        case "choice":
            return frozenset(spec.document).__contains__
        case "csv":
            return lambda text: is_table(text, spec.document)
        case "regex" if re.search(r"\[:|\\[pPzAbB]", spec.text) is None:
            # Other patterns may mean something else to the engines.
            return read_pattern(read_classes(spec.text))
    return None


def is_instance(text: str, validator: SchemaValidator) -> bool | None:
    try:
        return validator.is_valid(json.loads(text, parse_int=read_int, parse_float=read_float))
    except LargeNumber:
        return None
    except (ValueError, RecursionError):
        return False


class LargeNumber(Exception):
    """A number that neither Python's integers of 4,300 digits nor a double hold, so that it cannot be validated."""


def read_int(digits: str) -> int:
    if len(digits) > MAX_NUM_DIGITS:
        raise LargeNumber
    return int(digits)


def read_float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise LargeNumber
    return number


def is_table(text: str, table: dict[str, Any]) -> bool:
    columns, source = table["columns"], io.StringIO(text, newline="")
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if table["is_quoting"] else csv.QUOTE_NONE
    try:
        rows = list(csv.reader(source, strict=True, quoting=quoting, delimiter=table["delimiter"]))
    except csv.Error:
        return False
    if table["has_header"] and (not rows or rows.pop(0) != [name for name, _ in columns]):
        return False
    if not rows and not table["has_header"]:
        return False  # the grammar wants a row
    return all(
        len(row) == len(columns)
        and all(is_field(field, kind) for (_, kind), field in zip(columns, row, strict=True))
        for row in rows
    )


def is_field(field: str, kind: str | list[str]) -> bool:
    if isinstance(kind, list):
        return field in kind
    return kind == "string" or re.fullmatch(SCALAR_PATTERNS[kind], field) is not None
