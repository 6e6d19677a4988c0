"""Documents with their correct records, to evaluate a model on: one JSON object a line.

A line has `text` and `record`. Its schema is its own `schema`, or else the ready-made one that `kind` names, or else
the one given for all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.extraction.prompt import Schema, read_labelled

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
    try:
        lines = read_labelled(path.read_text(encoding="utf-8"), f"{path.name} line")
        found = [_read_case(given, where, schema) for where, given in lines]
    except UnicodeDecodeError as error:
        raise CaseError(f"{path.name} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise CaseError(str(error)) from error
    if not found:
        raise CaseError(f"{path.name} has no line with a document")
    return found


def find_schemas() -> dict[str, Path]:
    """Return the files of the ready-made schemas by name."""
    return {path.stem: path for path in sorted(SCHEMAS.glob("*.json"))}


def _read_case(given: dict[str, Any], where: str, schema: Schema | None) -> Case:
    if not isinstance(given["record"], dict):
        raise CaseError(f"{where} needs `record`, an object")
    kind = given.get("kind", "")
    if not isinstance(kind, str):
        raise CaseError(f"{where}: `kind` must be a string")
    own, known = given.get("schema"), find_schemas()
    if own is None and kind in known:
        own = json.loads(known[kind].read_text(encoding="utf-8"))
    own = schema if own is None else own
    if not isinstance(own, dict):
        raise CaseError(f"{where} has no `schema`, no `kind` among {', '.join(known)}, and --schema is not given")
    return Case(kind, own, given["text"], given["record"])
