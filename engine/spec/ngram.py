"""NgramProposer: proposes what followed the last tokens where they occurred earlier in the request."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

# Tokens of a prompt that one call indexes; about 0.4 us each.
MAX_INDEXED_TOKENS = 4096
# Later places of an n-gram replace the oldest, so that a lookup is O(1).
MAX_PLACES = 8


class NgramIndex:
    """The places of every n-gram of one growing sequence."""

    def __init__(self, token_ids: Sequence[int], width: int) -> None:
        self.token_ids = token_ids
        self.width = width
        self._num_indexed = 0  # n-grams that end before this token
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, end: int) -> bool:
        """Index the n-grams that end before token `end`. Returns False if tokens are left for the next call."""
        token_ids, width, places = self.token_ids, self.width, self._places
        start = max(self._num_indexed, width - 1)
        stop = min(end, start + MAX_INDEXED_TOKENS)
        for place in range(start, stop):
            found = places.setdefault(tuple(token_ids[place - width + 1 : place + 1]), [])
            found.append(place + 1)
            if len(found) > MAX_PLACES:
                del found[0]
        self._num_indexed = max(self._num_indexed, stop)
        return stop >= end

    def find(self, ngram: tuple[int, ...]) -> list[int]:
        return self._places.get(ngram, [])


def count_match(left: Sequence[int], left_end: int, right: Sequence[int], right_end: int, limit: int) -> int:
    """Return how many tokens before two places are equal, at most `limit`."""
    limit = min(limit, left_end, right_end)
    count = 0
    while count < limit and left[left_end - 1 - count] == right[right_end - 1 - count]:
        count += 1
    return count


class NgramProposer:
    """Prompt lookup: the longest n-gram counts, the latest of equals. Source: Saxena, 2023 (prompt lookup decoding)."""

    name = "ngram"

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high
        self._indices: dict[int, NgramIndex] = {}  # by handle

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        token_ids = request.token_ids
        if len(token_ids) <= self._low:
            return ()
        index = self._indices.get(request.handle)
        if index is None:
            index = self._indices[request.handle] = NgramIndex(token_ids, self._low)
        num_tokens = len(token_ids)
        # The n-gram at the end is looked up before it is indexed.
        if not index.extend(num_tokens - 1):
            return ()
        best, best_length = -1, 0
        for place in reversed(index.find(tuple(token_ids[-self._low :]))):
            length = count_match(token_ids, place, token_ids, num_tokens, self._high)
            if length > best_length:
                best, best_length = place, length
            if best_length == self._high:
                break
        return () if best < 0 else continue_from(token_ids, best, limit)

    def forget(self, request: Request) -> None:
        self._indices.pop(request.handle, None)


def continue_from(token_ids: Sequence[int], place: int, limit: int) -> list[int]:
    """Return the `limit` tokens from `place` on; past the end of the sequence, the distance repeats as a period."""
    drafts = list(token_ids[place : place + limit])
    period = len(token_ids) - place
    while len(drafts) < limit:
        drafts.append(drafts[len(drafts) - period])
    return drafts
