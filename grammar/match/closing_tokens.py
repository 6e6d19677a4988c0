"""Finds the tokens that can complete a JSON value; residual checks need to look only at those."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..bitmask import BITS
from ..vocabulary import Vocabulary

# Text before or at the start of a value, which completes no value. A number ends only at the next character.
_OPENER = re.compile(rb'[\s:,\[{]*(?:"[^"]*|[-+.eE0-9]+)?')
# Text outside strings: structure, numbers, and the letters of true, false and null.
_OUTSIDE = re.compile(rb'[\s:,\[\]{}0-9+\-.Etruefalsn]*(?:"|$)')
# The same text up to a bracket that closes a value; anything may follow.
_CLOSER = re.compile(rb"[\s:,\[\]{}0-9+\-.Etruefalsn]*[\]}]")
# The rest of a string, if no escape is open, with the quote that ends it.
_ENDING = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_DELIMITER = re.compile(rb"[^0-9+\-.eE]")
# Tokens with more brackets than that are looked at wherever as many are needed.
MAX_NUM_CLOSERS = 8


class TokenClass:
    """Some tokens of a vocabulary, the shortest first, gathered from a bitmask row without reading all of it."""

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids: list[int] = token_ids.tolist()
        self._bits = BITS[token_ids & 31]
        self._words = token_ids >> 5

    def find(self, words: np.ndarray) -> list[int]:
        """Return the tokens of the class that a row, int32 [words], allows."""
        found = words.take(self._words)
        found &= self._bits
        return [self.token_ids[position] for position in found.nonzero()[0].tolist()]


class ClosingTokens:
    """The tokens that may complete a value, by class; of each, those with a number of brackets to be closed first.

    class          where the text stands                tokens
    quote          inside a string that is checked      those that end a string
    far quote      inside another string                those that end it and complete something behind it
    escaped quote  inside any string, after a backslash those with a quote
    delimiter      inside a number that is checked      those with anything but digits and signs of numbers
    any            elsewhere                            those that complete a value begun before or in them

    Attributes:
        prefixes: token that ends a string in which no escape is open -> what stands before the quote.
        by_ending: such a prefix without needless escapes -> its tokens; b"\\" -> those of which it is not known.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.token_bytes = vocabulary.token_bytes
        self.eos_mask = vocabulary.eos_mask
        classes: dict[str, Callable[[bytes], Any]] = {
            "quote": _ENDING.match, "delimiter": _DELIMITER.search, "far quote": reaches_far,
            "escaped quote": lambda token: b'"' in token, "any": is_closing,
        }
        order = sorted(range(vocabulary.size), key=lambda index: len(self.token_bytes[index]))
        self._members = {
            name: np.array([i for i in order if test(self.token_bytes[i])], np.int64)
            for name, test in classes.items()
        }
        self._num_closers = np.array([token.count(b"}") + token.count(b"]") for token in self.token_bytes])
        self._classes: dict[tuple[str, int], TokenClass] = {}
        quoted: list[int] = self._members["quote"].tolist()
        self.prefixes = {token_id: split_ending(self.token_bytes[token_id])[0] for token_id in quoted}
        self.by_ending: dict[bytes, list[int]] = {}
        for token_id, prefix in self.prefixes.items():
            self.by_ending.setdefault(spell_again(prefix) if b"\\" in prefix else prefix, []).append(token_id)

    def get_class(self, name: str, num_closers: int) -> TokenClass:
        """Return the tokens of a class that close at least so many brackets."""
        key = name, min(num_closers, MAX_NUM_CLOSERS)
        found = self._classes.get(key)
        if found is None:
            members = self._members[name]
            found = self._classes[key] = TokenClass(members[self._num_closers[members] >= key[1]])
        return found


def split_ending(token: bytes) -> tuple[bytes, bytes]:
    """Return what stands before and behind the quote that ends a string, for a token that has one."""
    found = _ENDING.match(token)
    assert found is not None, "only tokens that end a string are split"
    return found[1], token[found.end() :]


def spell(text: str) -> bytes:
    """Return a string's inside as JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


def spell_again(prefix: bytes) -> bytes:
    try:
        return spell(json.loads(b'"' + prefix + b'"'))
    except ValueError:
        return b"\\"


def reaches_far(token: bytes) -> bool:
    """Return whether a token may end a string and complete something after it."""
    return _ENDING.match(token) is not None and not _OPENER.fullmatch(split_ending(token)[1])


def is_closing(token: bytes) -> bool:
    """Return whether a token may complete a value, begun before it or in it."""
    if _CLOSER.match(token) is not None:
        return True
    return _OUTSIDE.match(token) is not None and not _OPENER.fullmatch(token)
