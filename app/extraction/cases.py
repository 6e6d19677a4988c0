"""Documents with their right records, to evaluate a model on: one JSON object a line.

A line has `text` and `record`, and either `kind` (one of the ready-made schemas) or a `schema` of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.extraction.prompt import Schema

ASSETS = Path(__file__).resolve().parents[2] / "assets"
EVALUATION = ASSETS / "demo_model" / "recipe" / "evaluation"
# name of a set -> its file
SETS = {
    "generated": EVALUATION / "generated.jsonl",
    "handwritten": EVALUATION / "handwritten.jsonl",
    "samples": EVALUATION / "samples.jsonl",
    "unseen": EVALUATION / "unseen.jsonl",
    "development": EVALUATION / "development.jsonl",
}
SURROUNDINGS = EVALUATION / "surroundings.txt"


class CaseError(ValueError):
    """A line of a set is not a case; the message names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One document, the schema that asks, and the record that is right."""

    kind: str
    schema: Schema
    text: str
    record: dict[str, Any]


def read_cases(path: Path, schemas: Path = ASSETS / "schemas") -> list[Case]:
    """The cases of a file.

    Raises:
        CaseError: a line is not a case.
        OSError: the file cannot be read.
    """
    # Not splitlines, which also ends a line at characters that JSON leaves as they are.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [
        _read_case(line, f"{path.name} line {number}", schemas)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _read_case(line: str, where: str, schemas: Path) -> Case:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise CaseError(f"{where} is not JSON: {error}") from error
    kind = given.get("kind") if isinstance(given, dict) else None
    if not isinstance(kind, str) or not isinstance(given.get("text"), str):
        raise CaseError(f"{where} needs `kind` and `text`, both strings")
    if not isinstance(given.get("record"), dict):
        raise CaseError(f"{where} needs `record`, an object")
    schema = given.get("schema")
    if schema is None:
        path = schemas / f"{kind}.json"
        if not path.is_file():
            known = ", ".join(sorted(path.stem for path in schemas.glob("*.json")))
            raise CaseError(f"{where} has no `schema`, and its kind {kind!r} is none of {known}")
        schema = json.loads(path.read_text(encoding="utf-8"))
    return Case(kind, schema, given["text"], given["record"])


def surround(
    case: Case, num_tokens: int, count_tokens: Callable[[str], int], paragraphs: Sequence[str]
) -> Case:
    """The case with about `num_tokens` of other text around it, half before and half behind.

    Whole paragraphs are taken in order, and again from the start when there are not enough; the one that would
    go too far is cut between words.
    """
    before = _take(num_tokens // 2, count_tokens, paragraphs)
    behind = _take(num_tokens - num_tokens // 2, count_tokens, paragraphs[::-1])
    return replace(case, text="\n\n".join([*before, case.text, *behind]))


def _take(num_tokens: int, count_tokens: Callable[[str], int], paragraphs: Sequence[str]) -> list[str]:
    taken: list[str] = []
    left = num_tokens
    while left > 0:
        paragraph = paragraphs[len(taken) % len(paragraphs)]
        while paragraph and count_tokens(paragraph) > left:
            paragraph = paragraph.rpartition(" ")[0]
        if not paragraph:
            break
        taken.append(paragraph)
        left -= count_tokens(paragraph)
    return taken


def read_paragraphs(path: Path = SURROUNDINGS) -> list[str]:
    """The paragraphs of a plain text."""
    return [part.strip() for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
