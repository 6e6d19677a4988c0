"""A text to quote from: which JSON strings are parts of it, and which tokens continue one.

A quotation begins and ends at a border of a word, and not with whitespace. A border is where not both neighbours
are letters, digits, marks or underscores, or where one is of a script that is written without spaces. Quotations
are spelt as json.dumps(ensure_ascii=False) spells them, and hold no control character without a short escape:
those are not written in every schema (schema/exactness.py).
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..schema.grounding import Lengths
from .string_tokens import MAX_PIECE_BYTES, StringTokens

# Han, kana, Thai, Lao, Tibetan, Myanmar, Khmer: a border is on either side of each character.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
SPACE, LETTER, UNSPACED, OTHER = range(4)


class SourceText:
    """The text in its JSON spelling, with the places where quotations may begin and end.

    Attributes:
        spelling: the text as the inside of a JSON string.
    """

    def __init__(self, text: str, tokens: StringTokens) -> None:
        text = text.rstrip()
        self._tokens = tokens
        table = {character: (spell(character), classify(character)) for character in set(text)}
        pieces = [table[character] for character in text]
        self.spelling = b"".join(piece for piece, _ in pieces)
        lengths = np.fromiter((len(piece) for piece, _ in pieces), np.int64, len(text))
        # [characters + 1]: where each character begins in the spelling.
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        classes = np.fromiter((kind for _, kind in pieces), np.int8, len(text))
        is_start, is_end = find_borders(classes)
        starts = np.flatnonzero(is_start)
        self._starts = starts.tolist()
        self._start_offsets = frozenset(offsets[starts].tolist())
        # [characters + 1]: the first end at or after each place; beyond the text where there is none.
        ends = np.where(is_end, np.arange(len(text) + 1), len(text) + 1)
        self._next_end = np.minimum.accumulate(ends[::-1])[::-1].tolist()
        # [characters + 1]: the first character at or after each place that no quotation holds.
        is_wall = [piece.startswith(b"\\u") for piece, _ in pieces]
        walls = np.where([*is_wall, True], np.arange(len(text) + 1), len(text))
        self._next_wall = np.minimum.accumulate(walls[::-1])[::-1].tolist()
        # Byte of the spelling -> the first character that begins there or later.
        self._characters = np.searchsorted(offsets, np.arange(len(self.spelling) + 1)).tolist()
        self._offsets = offsets.tolist()

    def iterate_places(self, content: bytes, lengths: Lengths) -> Iterator[tuple[int, int]]:
        """Yield (first character, offset after it) of each place at which a string that begins so can go on.

        An empty string that may be left at that has no place; see `is_open`.
        """
        if not content:
            for start in self._starts:
                if self._fits(start, start, lengths):
                    yield start, self._offsets[start]
            return
        position = self.spelling.find(content)
        while position >= 0:
            if position in self._start_offsets:
                start, end = self._characters[position], position + len(content)
                if self._fits(start, self._characters[end], lengths):
                    yield start, end
            position = self.spelling.find(content, position + 1)

    def is_open(self, content: bytes, lengths: Lengths) -> bool:
        """Return whether a string that begins so can become a quotation, or is an empty one."""
        return (not content and not lengths.least) or any(True for _ in self.iterate_places(content, lengths))

    def is_quotation(self, content: bytes, lengths: Lengths) -> bool:
        """Return whether this is the whole inside of a quotation; the empty one is, unless it is too short."""
        if not content:
            return not lengths.least
        return any(self.is_end(start, end, lengths) for start, end in self.iterate_places(content, lengths))

    def is_end(self, start: int, offset: int, lengths: Lengths) -> bool:
        """Return whether a quotation from a character on may end at an offset of the spelling."""
        end = self._characters[offset]
        if (
            self._offsets[end] != offset
            or self._next_end[end] != end
            or not start < end <= self._next_wall[start]
        ):
            return False
        return end - start >= lengths.least and (lengths.most is None or end - start <= lengths.most)

    def find_tokens(self, content: bytes, lengths: Lengths) -> "Continuation":
        """Return the tokens that continue this content."""
        whole, closing = self._tokens.whole, self._tokens.closing
        pieces: set[bytes] = set()
        endings: set[bytes] = set()
        can_close = False
        for start, offset in self.iterate_places(content, lengths):
            can_close = can_close or self.is_end(start, offset, lengths)
            for end in range(offset + 1, min(offset + MAX_PIECE_BYTES, len(self.spelling)) + 1):
                piece = self.spelling[offset:end]
                if (
                    piece in whole
                    and piece not in pieces
                    and self._fits(start, self._characters[end], lengths)
                ):
                    pieces.add(piece)
                if piece in closing and piece not in endings and self.is_end(start, end, lengths):
                    endings.add(piece)
        token_ids = {token_id for piece in pieces for token_id in whole[piece]}
        token_ids.update(token_id for piece in endings for token_id in closing[piece])
        return Continuation(token_ids, can_close)

    def _fits(self, start: int, reached: int, lengths: Lengths) -> bool:
        """Return whether a quotation from `start` that has reached a character can still end."""
        shortest = start + (lengths.least or 1)
        if shortest > reached:
            reached = shortest
        if reached > self._next_wall[start]:
            return False
        end: int = self._next_end[reached]
        return end <= self._next_wall[start] and (lengths.most is None or end - start <= lengths.most)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The possible continuations inside a quotation.

    Attributes:
        token_ids: tokens that are more of it, or more of it and then a quote.
        can_close: a quote may come at once.
    """

    token_ids: set[int]
    can_close: bool


def spell(character: str) -> bytes:
    """Return a character as a JSON string holds it."""
    return b"\\u007f" if character == "\x7f" else json.dumps(character, ensure_ascii=False)[1:-1].encode()


def classify(character: str) -> int:
    """Return what a character means to borders."""
    if character.isspace():
        return SPACE
    if _UNSPACED.match(character):
        return UNSPACED
    is_letter = character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
    return LETTER if is_letter else OTHER


def find_borders(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (may a quotation begin at a character, [n]; may one end before it, [n + 1])."""
    is_border = np.ones(len(classes) + 1, bool)
    is_border[1:-1] = (classes[:-1] != LETTER) | (classes[1:] != LETTER)
    is_start = is_border[:-1] & (classes != SPACE)
    is_end = np.zeros(len(classes) + 1, bool)
    is_end[1:] = is_border[1:] & (classes != SPACE)
    return is_start, is_end
