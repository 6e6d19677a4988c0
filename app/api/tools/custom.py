"""Custom tools, whose input is one text: for the model they are functions with the argument `input`.

Their calls in replies are read from those of the functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from app.api.errors import refuse
from app.api.fields import check_unknown, warn
from app.api.tools.lark_regex import NotRegular, to_regex
from app.api.tools.styled_calls import Piece, StyledCalls
from app.api.wording import Path, say_place
from app.json_text import CHARACTERS

Json = dict[str, Any]

FIELDS = ("type", "name", "description", "format", "defer_loading", "allowed_callers")
INPUT_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')


def to_function(where: Path, custom: Mapping[str, Any]) -> Json | None:
    """Return a custom tool as a function; None for one that is left out because of its grammar."""
    check_unknown(custom, FIELDS, where)
    schema: Json = {"type": "string"}
    asked = custom.get("format") or {"type": "text"}
    # chat completions have the grammar's fields one level deeper than responses
    grammar = asked.get("grammar", asked) if isinstance(asked, dict) else {}
    kind = (asked.get("type"), grammar.get("syntax")) if isinstance(grammar, dict) else (None, None)
    if kind[0] == "grammar" and isinstance(grammar.get("definition"), str):
        pattern = grammar["definition"]
        if kind[1] == "lark":
            try:
                pattern, kind = to_regex(pattern), ("grammar", "regex")
            except NotRegular as error:
                warn(f"{say_place(where)} was left out: calls cannot follow its Lark grammar, which has {error}")
                return None
        schema["pattern"] = f"^(?:{pattern})$"
    if kind[0] != "text" and kind != ("grammar", "regex"):
        rule = " must be text, or a grammar with the syntax lark or regex, and its definition"
        raise refuse((*where, "format"), rule)
    parameters = {"type": "object", "properties": {"input": schema}, "required": ["input"]}
    kept = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    return kept | {"parameters": parameters | {"additionalProperties": False}}


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
