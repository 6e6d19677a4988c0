"""StopStrings: finds the first stop string in a stream of text and never shows a part of it.

However the text is cut into pieces, the result is the same: the hit is the stop string that is complete
first, the longest one where several end together.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the longest end of the text that may still become a stop string.

    Args:
        stops: the stop strings, none empty.
        include_in_output: release the stop string itself too.
        min_tokens: a stop string completed before that many tokens is ordinary text.
    """

    __slots__ = ("_first_chars", "_held", "_include_in_output", "_matches", "_min_tokens")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False, min_tokens: int = 0) -> None:
        self._matches = [_PrefixMatch(stop) for stop in dict.fromkeys(stops)]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._include_in_output = include_in_output
        self._min_tokens = min_tokens
        self._held = ""

    def feed(self, text: str, num_tokens: int = 0) -> tuple[str, str | None]:
        """Take the next text, which ends with token number `num_tokens`.

        Returns the text that is safe to show and the stop string hit; after a hit the stream is over.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        ends = [(match.advance(text), match) for match in self._matches]
        buffer = self._held + text
        if num_tokens >= self._min_tokens:
            hits = [(end, -len(match.stop), match.stop) for end, match in ends if end is not None]
            if hits:
                return self._cut(buffer, *min(hits))
        num_held = max(match.num_matched for match in self._matches)
        num_shown = len(buffer) - num_held
        self._held = buffer[num_shown:]
        return buffer[:num_shown], None

    def finish(self) -> str:
        """The text still held back, for the end of a stream without a hit."""
        held, self._held = self._held, ""
        return held

    def _cut(self, buffer: str, end: int, negative_length: int, stop: str) -> tuple[str, str]:
        stop_end = len(self._held) + end
        self._held = ""
        return buffer[: stop_end if self._include_in_output else stop_end + negative_length], stop


class _PrefixMatch:
    """How much of one stop string the text ends with; constant time a character (Knuth, Morris and Pratt)."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # For each prefix reached so far, the length of its longest proper prefix that is also its suffix.
        self._fallback = [0]

    def advance(self, text: str) -> int | None:
        """Read the text on; returns the index after the first stop string completed in it, or None."""
        stop, fallback, num_matched = self.stop, self._fallback, self.num_matched
        first_end = None
        if not num_matched and stop[0] not in text:
            return None
        for index, char in enumerate(text):
            while num_matched and char != stop[num_matched]:
                num_matched = fallback[num_matched - 1]
            if char == stop[num_matched]:
                num_matched += 1
                if num_matched > len(fallback):
                    self._extend_fallback()
            if num_matched == len(stop):
                first_end = index + 1 if first_end is None else first_end
                num_matched = fallback[num_matched - 1]
        self.num_matched = num_matched
        return first_end

    def _extend_fallback(self) -> None:
        """Long stop strings cost nothing until the text follows them."""
        stop, fallback = self.stop, self._fallback
        index = len(fallback)
        length = fallback[-1]
        while length and stop[index] != stop[length]:
            length = fallback[length - 1]
        fallback.append(length + 1 if stop[index] == stop[length] else 0)
