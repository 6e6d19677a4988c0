"""JSON that clients and files bring: counted before it is parsed, and refused where it would lose or break something.

json.loads keeps the last of duplicate keys, so a schema would silently lose a part. It also accepts numbers and texts
that cannot be written as JSON again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from engine import is_unicode

Place = tuple[str | int, ...]

# They take a tenth of a second to parse, the longest numbers half a second. 128k token ids and their request fit.
MAX_JSON_VALUES = 200_000
TOO_MANY_VALUES = f"has more than {MAX_JSON_VALUES} commas and brackets outside strings"
PIECE_BYTES = 2**18
MAX_DEPTH = 850  # what is done with a value later takes more of Python's stack than its parsing
VALUE_SIGNS = b",[{"
# characters of a JSON string that are complete; two escapes are one character if the first is half of a pair
CHARACTERS = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL
)
_OTHERS = bytes(set(range(256)) - set(VALUE_SIGNS + b'"'))


class DuplicateKey(ValueError):
    """An object has a key twice; the message names the key."""


class RefusedJson(ValueError):
    """A JSON text that is refused: the message is what is wrong, the place that of the value.

    Attributes:
        where: such as ("messages", 3, "content"); empty for the whole text.
        is_too_large: it has too many values.
        is_json: it is the value that is wrong.
    """

    def __init__(self, message: str, where: Place = (), is_too_large: bool = False, is_json: bool = False) -> None:
        super().__init__(message)
        self.where = where
        self.is_too_large = is_too_large
        self.is_json = is_json


def parse_json(text: bytes, where: Place = ()) -> Any:
    """Return the value of a JSON text of a client.

    Args:
        where: the part of a form that it is.
    """
    if has_too_many_values(text):
        raise RefusedJson(f" {TOO_MANY_VALUES}", where, is_too_large=True)
    try:
        value = load_json(text)
    except DuplicateKey as error:
        raise RefusedJson(f": {error}", where) from error
    except RecursionError as error:
        raise RefusedJson(" is nested too deeply", where) from error
    except ValueError as error:
        raise RefusedJson(f" is not JSON: {error}", where) from error
    check_json(value, where)
    return value


def check_json(value: object, where: Place = ()) -> None:
    """Refuse a value that could not be written as JSON again, which the tokenizer, a template or a reply has to."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RefusedJson(" is nested too deeply", where)
        if any(map(_refuse, level)):
            place, reason = _find_wrong(value, where)
            raise RefusedJson(reason, place, is_json=True)
        level = [inner for each in level if isinstance(each, dict | list) for inner in _list_inner(each)]


def _list_inner(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _find_wrong(value: object, where: Place) -> tuple[Place, str]:
    """Return the place of the first wrong value and the reason."""
    waiting: list[tuple[Place, Any]] = [(where, value)]
    while waiting:
        place, value = waiting.pop()
        if reason := _refuse(value):
            return place, reason
        inner = [*(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())]
        waiting += [((*place, step), each) for step, each in reversed(inner)]
    raise AssertionError("one of them is wrong")


def _refuse(value: object) -> str:
    match value:
        case str():
            # the first test takes no time, however long the text is
            return "" if value.isascii() or is_unicode(value) else " contains an unpaired surrogate (invalid Unicode)"
        case float() if not math.isfinite(value):
            return f"={value} must be a finite number"
        case dict() if not all(map(is_unicode, value)):
            return " has a name with an unpaired surrogate (invalid Unicode)"
    return ""


def load_json(text: str | bytes) -> Any:
    """Parse a JSON text, in linear time.

    Raises:
        DuplicateKey: an object has a key twice.
        ValueError, RecursionError: it is not JSON.
    """
    return json.loads(text, object_pairs_hook=_make_object)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DuplicateKey(f"duplicate key {twice[:80]!r}")
    return found


def check_values(value: object) -> None:
    """Write a value as JSON would have it, in C: the cheapest walk over a large one.

    Raises:
        ValueError: a number in it is not finite, or a text is not Unicode.
        RecursionError: it is nested too deeply.
    """
    json.dumps(value, ensure_ascii=False, allow_nan=False, check_circular=False).encode()


class ValueCounter:
    """Counts the commas and brackets that stand outside strings, in a text that comes in pieces."""

    def __init__(self) -> None:
        self.num_values = 0
        self._is_utf8 = True
        self._open = b""  # the quote and backslash that still matter after the last piece

    @property
    def is_over(self) -> bool:
        """Return whether there are more than may be parsed."""
        return self.num_values > MAX_JSON_VALUES

    def feed(self, piece: bytes) -> None:
        """Take the next piece, in linear time and in C."""
        # in UTF-16 and UTF-32 other characters have the byte of a quote, too; only there is a zero, in the first one
        self._is_utf8 = self._is_utf8 and b"\0" not in piece
        if not self._is_utf8:
            self.num_values += sum(map(piece.count, VALUE_SIGNS))
            return
        text = (self._open + piece).replace(b"\\\\", b"..").replace(b'\\"', b"..")
        # two quotes side by side hide nothing; without them there are few parts
        parts = text.translate(None, _OTHERS).replace(b'""', b"").split(b'"')
        self.num_values += sum(map(len, parts[::2]))
        self._open = b'"' * (len(parts) % 2 == 0) + b"\\" * text.endswith(b"\\")


def has_too_many_values(text: bytes) -> bool:
    """Return whether a whole text has more values than may be parsed."""
    if len(text) <= MAX_JSON_VALUES:
        return False
    counter = ValueCounter()
    # in pieces, so that other threads run between them
    for start in range(0, len(text), PIECE_BYTES):
        counter.feed(text[start : start + PIECE_BYTES])
    return counter.is_over
