"""Documents with their correct records, to evaluate a model on: one JSON object a line.

A line has `text` and `record`. Its schema is its own `schema`, or else the ready-made one that `kind` names, or else
the one given for all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.extraction.prompt import Schema

SCHEMAS = Path(__file__).resolve().parents[2] / "assets" / "schemas"


class CaseError(ValueError):
    """A line is not a case; the message names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One document, its schema, and its correct record; `kind` groups the figures and may be empty."""

    kind: str
    schema: Schema
    text: str
    record: dict[str, Any]


def read_cases(path: Path, schema: Schema | None = None) -> list[Case]:
    """The cases of a file.

    Args:
        schema: of lines that name none.

    Raises:
        CaseError: a line is not a case, or there is none.
        OSError: the file cannot be read.
    """
    # Not splitlines, which also ends a line at characters that JSON leaves as they are.
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CaseError(f"{path.name} is not UTF-8 text: {error}") from error
    found = [
        _read_case(line, f"{path.name} line {number}", schema) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise CaseError(f"{path.name} has no line with a document")
    return found


def _read_case(line: str, where: str, schema: Schema | None) -> Case:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{where} is not JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise CaseError(f"{where} needs `text`, a string")
    if not isinstance(given.get("record"), dict):
        raise CaseError(f"{where} needs `record`, an object")
    kind = given.get("kind", "")
    if not isinstance(kind, str):
        raise CaseError(f"{where}: `kind` must be a string")
    known = {path.stem: path for path in sorted(SCHEMAS.glob("*.json"))}
    own = given.get("schema")
    if own is None and kind in known:
        own = json.loads(known[kind].read_text(encoding="utf-8"))
    own = schema if own is None else own
    if not isinstance(own, dict):
        raise CaseError(f"{where} has no `schema`, no `kind` among {', '.join(known)}, and --schema is not given")
    return Case(kind, own, given["text"], given["record"])
