"""Indexes of a vocabulary for structural tags: tokens by prefix, by substring, and tokens that are text."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np

from ..vocabulary import Vocabulary, make_mask
from .text import NUM_UTF8_STATES, follow_utf8

# Heads tried for one mask, the shortest; what is beyond is left out, since shorter tokens spell the same text.
MAX_NUM_HEADS = 512
# Ways to cut tokens at the end of one value; more would take seconds to look at.
MAX_NUM_CUTS = 100_000
# Stands between the tokens in one long text; no text in UTF-8 holds it.
_BORDER = b"\xff"


class TooManyCuts(Exception):
    """Too many tokens may contain the end of a value and the start of what follows it."""


class TagTokens:
    """One vocabulary, sorted; made once, read by all structural tags."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        pairs = sorted((data, index) for index, data in enumerate(vocabulary.token_bytes) if data)
        self._texts = [data for data, _ in pairs]
        self._ids = [index for _, index in pairs]
        self.max_num_bytes = max(map(len, self._texts), default=0)
        self._joined = _BORDER.join(self._texts)
        self._starts = np.array([0, *accumulate(len(data) + 1 for data in self._texts)], np.int64)[:-1]
        self.not_eos = ~vocabulary.eos_mask
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.special_names = {token_id: name.encode() for name, token_id in vocabulary.special_tokens.items()}
        self.text_masks = [self._make_text_mask(state) for state in range(NUM_UTF8_STATES)]

    def find_exact(self, data: bytes) -> list[int]:
        """Return the tokens with just these bytes."""
        start = bisect_left(self._texts, data)
        end = start
        while end < len(self._texts) and self._texts[end] == data:
            end += 1
        return self._ids[start:end]

    def find_beginning(self, prefix: bytes, measure: Callable[[bytes], int]) -> list[int]:
        """Return the tokens that are a prefix and then something that may stand there.

        Args:
            measure: how many bytes of a token may stand, the prefix among them; asked once for each that fails.
        """
        found = []
        at = bisect_left(self._texts, prefix)
        while at < len(self._texts) and (data := self._texts[at]).startswith(prefix):
            length = measure(data)
            if length == len(data):
                found.append(self._ids[at])
                at += 1
            else:
                # Whatever begins with the same bytes fails too.
                at = self._skip(data[: length + 1], at + 1)
        return found

    def _skip(self, prefix: bytes, start: int) -> int:
        """Return the place after all texts with a prefix."""
        return bisect_left(self._texts, True, lo=start, key=lambda text: not text.startswith(prefix))

    def find_holding(self, pattern: bytes) -> list[int]:
        """Return the tokens in which a pattern stands."""
        places = []
        at = self._joined.find(pattern)
        while at >= 0:
            places.append(at)
            at = self._joined.find(pattern, at + 1)
        owners = np.searchsorted(self._starts, places, side="right") - 1
        return [self._ids[owner] for owner in np.unique(owners)]

    def find_splits(
        self, first_bytes: frozenset[int], last_bytes: frozenset[int] | None, is_fine: Callable[[bytes], bool]
    ) -> Iterator[tuple[int, int]]:
        """Yield (token, length of its head) for every way to cut a token into a head and a rest, both not empty.

        Args:
            first_bytes: with what a rest begins.
            last_bytes: with what a head may end, None for any byte.
            is_fine: tells whether a rest may stand; asked once for each rest.
        """
        codes = np.frombuffer(self._joined, np.uint8)
        is_cut = np.isin(codes[1:], list(first_bytes)) & (codes[:-1] != _BORDER[0])
        if last_bytes is not None:
            is_cut &= np.isin(codes[:-1], list(last_bytes))
        places = np.flatnonzero(is_cut) + 1
        if len(places) > MAX_NUM_CUTS:
            raise TooManyCuts
        owners = np.searchsorted(self._starts, places, side="right") - 1
        verdicts: dict[bytes, bool] = {}
        for owner, at in zip(owners.tolist(), (places - self._starts[owners]).tolist(), strict=True):
            rest = self._texts[owner][at:]
            if rest not in verdicts:
                verdicts[rest] = is_fine(rest)
            if verdicts[rest]:
                yield self._ids[owner], at

    def _make_text_mask(self, state: int) -> np.ndarray:
        """Return the row of the tokens that keep to UTF-8 after `state`."""
        start, end = (
            bisect_left(self._texts, bytes((byte,))) for byte in ((0x80, 0xC0) if state else (0, 0))
        )
        if not state:
            end = len(self._texts)
        found = [self._ids[at] for at in range(start, end) if is_text(self._texts[at], state)]
        return make_mask(found, self.vocabulary.size)


def is_text(data: bytes, state: int) -> bool:
    """Tell whether some bytes keep to UTF-8 after a state; they may end in the middle of a character."""
    if not state and data.isascii():
        return True
    return follow_utf8(state, data) >= 0


class Straddles:
    """The tokens that may end a value and go on with what follows it, by what of them belongs to the value.

    Args:
        splits: (token, length of its head) as `TagTokens.find_splits` gives them.
        is_json: whether the value is JSON, so that its open brackets rule heads out.
    """

    def __init__(self, tokens: TagTokens, splits: Iterator[tuple[int, int]], is_json: bool) -> None:
        # token -> lengths of the heads at which it can be cut.
        self.cuts: dict[int, tuple[int, ...]] = {}
        self._heads: dict[bytes, list[int]] = {}
        self._is_json = is_json
        for index, at in splits:
            self.cuts[index] = (*self.cuts.get(index, ()), at)
            self._heads.setdefault(tokens.vocabulary.token_bytes[index][:at], []).append(index)
        self._chosen: dict[tuple[int, bool], list[tuple[bytes, list[int]]]] = {}
        # A dictionary entry, a tuple and a slot in a list, roughly.
        self.size_bytes = 300 * len(self._heads) + 200 * len(self.cuts)

    def find_heads(self, depth: int, is_in_string: bool) -> list[tuple[bytes, list[int]]]:
        """Return (head, tokens), sorted, for the heads that could complete a value with so much still open."""
        key = (depth, is_in_string) if self._is_json else (0, False)
        if key not in self._chosen:
            if len(self._chosen) > 64:
                self._chosen.clear()
            heads = [pair for pair in self._heads.items() if can_close(pair[0], *key)]
            heads.sort(key=lambda pair: len(pair[0]))
            self._chosen[key] = sorted(heads[:MAX_NUM_HEADS])
        return self._chosen[key]


def can_close(head: bytes, depth: int, is_in_string: bool) -> bool:
    """Tell whether some bytes hold as many closing brackets and quotes as are open."""
    return head.count(b"}") + head.count(b"]") >= depth and (not is_in_string or b'"' in head)
