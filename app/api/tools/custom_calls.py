"""CustomCalls: calls of custom tools in replies, read from those of functions with the argument `input`."""

from __future__ import annotations

import json
import re
from typing import Any

from app.api.tools.calls import ConvertedCalls, ToolParser

Json = dict[str, Any]

INPUT_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# characters of a JSON string that are complete; two escapes are one character if the first is half of a pair
CHARACTERS = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL
)


class CustomCalls(ConvertedCalls):
    """A ToolParser that turns calls of custom tools into their inputs."""

    def __init__(self, inner: ToolParser, names: frozenset[str]) -> None:
        super().__init__(inner)
        self._names = names
        self._readers: dict[int, InputReader] = {}  # by the number of the call

    def _convert(self, delta: Json) -> Json:
        parts = [part for part in map(self._convert_part, delta.pop("tool_calls", ())) if part]
        return delta | ({"tool_calls": parts} if parts else {})

    def _convert_part(self, part: Json) -> Json:
        index, function = part["index"], part["function"]
        if "id" in part and function["name"] in self._names:
            self._readers[index] = InputReader()
            name, text = function["name"], self._readers[index].feed(function["arguments"])
            return {"index": index, "id": part["id"], "type": "custom", "custom": {"name": name, "input": text}}
        if index not in self._readers:
            return part
        text = self._readers[index].feed(function["arguments"])
        return {"index": index, "custom": {"input": text}} if text else {}


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
