"""JSON that clients and files bring: counted before it is parsed, and refused where it would lose or break something.

json.loads keeps the last of duplicate keys, so a schema would silently lose a part. It also accepts numbers and texts
that cannot be written as JSON again.
"""

from __future__ import annotations

import json
from typing import Any

# They take a tenth of a second to parse, the longest numbers half a second. 128k token ids and their request fit.
MAX_JSON_VALUES = 200_000
TOO_MANY_VALUES = f"has more than {MAX_JSON_VALUES} commas and brackets outside strings"
VALUE_SIGNS = b",[{"
_OTHERS = bytes(set(range(256)) - set(VALUE_SIGNS + b'"'))


class DuplicateKey(ValueError):
    """An object has a key twice; the message names the key."""


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
    counter = ValueCounter()
    counter.feed(text)
    return counter.is_over
