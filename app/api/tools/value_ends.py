"""Finds where the values of arguments end, in text that arrives in pieces."""

from __future__ import annotations


class JsonEnd:
    """Finds the end of a JSON object, array or string in text that arrives in pieces."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_ended = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def find(self, text: str, start: int = 0) -> int:
        """Return where the value that continues at `start` ends; the text's length if it continues after this text."""
        self.is_begun = True
        for position in range(start, len(text)):
            char = text[position]
            if self._is_escaped:
                self._is_escaped = False
                continue
            if self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
                continue
            else:
                self._depth += (char in "{[") - (char in "}]")
            if not self._is_in_string and self._depth == 0:
                self.is_ended = True
                return position + 1
        return len(text)


class LiteralEnd:
    """Finds the end of a literal of Python, or of Gemma's notation, in text that arrives in pieces."""

    def __init__(self, quotes: tuple[str, ...]) -> None:
        self.is_ended = False
        self._quotes = quotes
        self._quote = ""  # of the open string
        self._depth = 0
        self._is_escaped = False

    def find(self, text: str, start: int) -> int:
        """Return up to where the text from `start` is a part of the literal, as far as the text shows it."""
        at = start
        while at < len(text):
            rest = text[at : at + 16]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                if text.startswith(self._quote, at):
                    at, self._quote = at + len(self._quote), ""
                    if self._end_value():
                        return at
                    continue
                if self._quote.startswith(rest):
                    return at
                self._is_escaped = text[at] == "\\" and len(self._quote) == 1
            elif quote := next((each for each in self._quotes if rest.startswith(each)), ""):
                at, self._quote = at + len(quote), quote
                continue
            elif any(each.startswith(rest) for each in self._quotes):
                return at
            elif text[at] in "[{":
                self._depth += 1
            elif self._depth == 0 and text[at] in ",)]}<\n":
                self.is_ended = True
                return at
            elif text[at] in "]}":
                self._depth -= 1
                if self._end_value():
                    return at + 1
            at += 1
        return at

    def _end_value(self) -> bool:
        self.is_ended = self._depth == 0
        return self.is_ended
