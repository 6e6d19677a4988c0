"""Confidence of each value, from the log-probabilities of the value's own tokens.

The figure is exp(mean log-probability) of the model's distribution before the grammar mask. It is
relative: it ranks the fields of a record, it is not a calibrated probability of being right.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.extraction.json_spans import Leaf
from engine import TokenLogprobs

# Under the mask exactly one token has probability one, up to float32 rounding.
FORCED_MASKED_LOGPROB = -1e-6
# A token the model itself was that sure of says something, forced or not.
CERTAIN_LOGPROB = -1e-4


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One output token: its half-open character range in the text and its log-probability before the mask."""

    start: int
    end: int
    logprob: float
    is_forced: bool


def score_tokens(
    text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], feed_token: Callable[[int], str]
) -> list[ScoredToken]:
    """Place the output's tokens in its text; `feed_token` decodes one after the other."""
    pieces = [position.token.decoded_token for position in logprobs]
    if "".join(pieces).startswith(text) and text:
        lengths = [len(piece) for piece in pieces]
    else:
        # A character made of several tokens has no text before the last of them.
        lengths = [len(feed_token(token_id)) for token_id, _ in zip(token_ids, logprobs, strict=False)]
    ends = [min(end, len(text)) for end in accumulate(lengths)]
    starts = [0, *ends[:-1]]
    return [
        ScoredToken(start, end, position.token.logprob, _is_forced(position))
        for start, end, position in zip(starts, ends, logprobs, strict=True)
    ]


def find_free(leaves: Iterable[Leaf], tokens: Sequence[ScoredToken]) -> Iterator[tuple[Leaf, list[int]]]:
    """Yield each value with the numbers of its tokens that the model chose; what the schema decided is left out."""
    starts, ends = [token.start for token in tokens], [token.end for token in tokens]
    for leaf in leaves:
        inside = range(bisect_right(ends, leaf.start), bisect_left(starts, leaf.end))
        if free := [at for at in inside if tokens[at].end > tokens[at].start and not tokens[at].is_forced]:
            yield leaf, free


def field_confidence(leaves: Iterable[Leaf], tokens: Sequence[ScoredToken]) -> dict[str, float]:
    """Confidence by JSON pointer; values that the schema alone decided are left out."""
    return {
        leaf.pointer: round(math.exp(sum(tokens[at].logprob for at in free) / len(free)), 4)
        for leaf, free in find_free(leaves, tokens)
    }


def _is_forced(position: TokenLogprobs) -> bool:
    masked = position.token.masked_logprob
    return masked is not None and masked >= FORCED_MASKED_LOGPROB and position.token.logprob < CERTAIN_LOGPROB
