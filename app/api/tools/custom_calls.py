"""CustomCalls: calls of custom tools in replies, read from those of functions with the argument `input`."""

from __future__ import annotations

import json
import re

from app.api.tools.styled_calls import Piece, StyledCalls

INPUT_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# characters of a JSON string that are complete; two escapes are one character if the first is half of a pair
CHARACTERS = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL
)


class CustomCalls:
    """Turns calls of custom tools into their inputs, in what StyledCalls reads."""

    def __init__(self, inner: StyledCalls, names: frozenset[str]) -> None:
        self._inner = inner
        self._names = names
        self._readers: dict[int, InputReader] = {}  # by the number of the call

    def feed(self, text: str) -> list[Piece]:
        return self._convert(self._inner.feed(text))

    def close(self, is_cut: bool = False) -> list[Piece]:
        return self._convert(self._inner.close(is_cut))

    def _convert(self, pieces: list[Piece]) -> list[Piece]:
        found = []
        for piece in pieces:
            if piece.name in self._names:
                self._readers[piece.call] = InputReader()
            if (reader := self._readers.get(piece.call)) is not None:
                piece = piece._replace(kind="custom", text=reader.feed(piece.text))
            if piece.text or piece.call_id:
                found.append(piece)
        return found


class InputReader:
    """Reads the text of {"input": "..."} from pieces of it."""

    def __init__(self) -> None:
        self._held = ""
        self._is_begun = False

    def feed(self, piece: str) -> str:
        """Return further text."""
        self._held += piece
        if not self._is_begun:
            begin = INPUT_START.match(self._held)
            if begin is None:
                return ""
            self._held, self._is_begun = self._held[begin.end() :], True
        found = CHARACTERS.match(self._held)
        assert found is not None, "it matches nothing, too"
        self._held = self._held[found.end() :]
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return text
