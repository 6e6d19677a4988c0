"""StopStrings: finds the first stop string in a text stream and never releases a part of it.

The result does not depend on how the text is split. The match is the stop string that ends first; of several that
end at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the longest suffix of the text that may still become a stop string.

    Args:
        stops: non-empty stop strings.
        include_in_output: release the stop string, too.
        min_tokens: a stop string completed before this many tokens counts as ordinary text.
    """

    __slots__ = ("_held", "_include_in_output", "_matches", "_min_tokens", "first_chars")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False, min_tokens: int = 0) -> None:
        self._matches = [_PrefixMatch(stop) for stop in dict.fromkeys(stops)]
        self.first_chars = frozenset(stop[0] for stop in stops)
        self._include_in_output = include_in_output
        self._min_tokens = min_tokens
        self._held = ""

    @property
    def is_idle(self) -> bool:
        """Whether no text is held back."""
        return not self._held

    def feed(self, text: str, num_tokens: int = 0) -> tuple[str, str | None]:
        """Add text; `num_tokens` is the number of output tokens up to its end.

        Returns the text that can be released, and the stop string found, which ends the stream.
        """
        if not self._held and self.first_chars.isdisjoint(text):
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
        """Return the text still held back, at the end of a stream without a match."""
        held, self._held = self._held, ""
        return held

    def _cut(self, buffer: str, end: int, negative_length: int, stop: str) -> tuple[str, str]:
        stop_end = len(self._held) + end
        self._held = ""
        return buffer[: stop_end if self._include_in_output else stop_end + negative_length], stop


class _PrefixMatch:
    """Tracks the longest prefix of one stop string that ends the text, in constant time per character (KMP)."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # For each prefix matched so far: length of its longest proper prefix that is also its suffix.
        self._fallback = [0]

    def advance(self, text: str) -> int | None:
        """Add text; returns the index after the first complete match in it, or None."""
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
        """Extend the table by one entry. It grows on demand, so long stop strings cost nothing until they match."""
        stop, fallback = self.stop, self._fallback
        index = len(fallback)
        length = fallback[-1]
        while length and stop[index] != stop[length]:
            length = fallback[length - 1]
        fallback.append(length + 1 if stop[index] == stop[length] else 0)
