"""Finds the range of each value in a possibly incomplete JSON text, for confidence, evidence and previews."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from app.extraction.pointers import escape_pointer
from app.json_text import CHARACTERS

Scalar = str | int | float | bool | None
Path = tuple[str | int, ...]

NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
WORD_END = re.compile(r"[-+.\w]*\Z")  # the text ends within a number or a literal
# Deeper than any record that a person reads; a recursive schema could otherwise exhaust Python's stack.
MAX_DEPTH = 64
LITERALS: dict[str, Scalar] = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One scalar of a record and the half-open character range [start, end) of its JSON text."""

    pointer: str
    value: Scalar
    start: int
    end: int
    is_complete: bool = True
    path: Path = ()  # the pointer's steps: int for a list index, str for a property name


@dataclass(slots=True)
class Scan:
    """A parsed JSON text, possibly incomplete: its value (None if too short to know) and its scalars in order.

    Attributes:
        is_json: the text is JSON as far as it goes.
    """

    value: Any = None
    leaves: list[Leaf] = field(default_factory=list)
    is_json: bool = True


class _EndOfText(Exception):
    """The text ends inside a value. The values read so far are kept."""


def scan(text: str) -> Scan:
    """Parse JSON up to its end or cut. A value that is cut off is kept if its beginning is meaningful."""
    scanner = _Scanner(text)
    result = Scan(leaves=scanner.leaves)
    with suppress(_EndOfText):
        scanner.read_value((), lambda value: setattr(result, "value", value))
    result.is_json = scanner.is_json and (scanner.is_cut or not text[scanner.position :].strip())
    return result


class _Scanner:
    """Recursive-descent JSON parser. Containers are passed on before they are filled, so that a cut keeps them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.is_json, self.is_cut = True, False
        self.leaves: list[Leaf] = []

    def read_value(self, path: Path, put: Any) -> None:
        char = self.peek()
        if char in "{[":
            if self.depth == MAX_DEPTH:
                raise _EndOfText
            self.depth += 1
            (self.read_object if char == "{" else self.read_array)(path, put)
            self.depth -= 1
        elif char == '"':
            start = self.position
            value, is_complete = self.read_string()
            self.add_leaf(path, value, start, is_complete, put)
        else:
            self.read_number_or_literal(path, put)

    def read_object(self, path: Path, put: Any) -> None:
        record: dict[str, Any] = {}
        put(record)
        self.position += 1
        while self.peek() != "}":
            if self.peek() == ",":
                self.position += 1
            self.expect('"')
            name, is_complete = self.read_string()
            if not is_complete:
                self.is_cut = True
                raise _EndOfText
            self.expect(":")
            self.position += 1
            self.read_value((*path, name), lambda v, name=name: record.__setitem__(name, v))
        self.position += 1

    def read_array(self, path: Path, put: Any) -> None:
        items: list[Any] = []
        put(items)
        self.position += 1
        while self.peek() != "]":
            if self.peek() == ",":
                self.position += 1
            self.read_value((*path, len(items)), items.append)
        self.position += 1

    def read_string(self) -> tuple[str, bool]:
        start = self.position
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] != '"':
            self.position += 2 if self.text[self.position] == "\\" else 1
        is_complete = self.position < len(self.text)
        self.position = min(self.position + 1, len(self.text))
        if is_complete:
            return _decode_string(self.text[start : self.position]), True
        return _decode_prefix(self.text[start:]), False

    def read_number_or_literal(self, path: Path, put: Any) -> None:
        start = self.position
        for name, value in LITERALS.items():
            if self.text.startswith(name, start):
                self.position += len(name)
                return self.add_leaf(path, value, start, True, put)
        match = NUMBER.match(self.text, start)
        is_end = WORD_END.match(self.text, start if match is None else match.end())
        self.is_cut = is_end is not None
        self.is_json = self.is_cut or match is not None
        if match is None:
            raise _EndOfText
        self.position = len(self.text) if self.is_cut else match.end()
        is_complete = self.position < len(self.text)
        try:
            value = json.loads(match.group())
        except ValueError as error:  # a whole number of more digits than Python reads
            raise _EndOfText from error
        return self.add_leaf(path, value, start, is_complete, put)

    def add_leaf(self, path: Path, value: Scalar, start: int, is_complete: bool, put: Any) -> None:
        put(value)
        pointer = "".join(f"/{escape_pointer(str(step))}" for step in path)
        self.leaves.append(Leaf(pointer, value, start, self.position, is_complete, path))
        if not is_complete:
            self.is_cut = True
            raise _EndOfText

    def peek(self) -> str:
        while self.position < len(self.text) and self.text[self.position] in " \t\r\n":
            self.position += 1
        if self.position >= len(self.text):
            self.is_cut = True
            raise _EndOfText
        return self.text[self.position]

    def expect(self, char: str) -> None:
        if self.peek() != char:
            self.is_json = False
            raise _EndOfText


def _decode_string(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except json.JSONDecodeError:
        return literal[1:-1]


def _decode_prefix(literal: str) -> str:
    """A string without its end: a character that is cut in the middle is left out."""
    found = CHARACTERS.match(literal, 1)
    return _decode_string(f'"{"" if found is None else found[0]}"')
