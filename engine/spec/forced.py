"""ForcedDrafts: drafts from the text to which a grammar allows no alternative, and drafts cut to what it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from engine.messages import DraftTarget
from engine.spec.draft_planner import FORCED
from grammar import JumpForward, Matcher, Vocabulary, allocate_bitmask

# More allowed tokens cannot all be prefixes of one text, or continue it.
MAX_FORCED_TOKENS = 64


@runtime_checkable
class ForcingMatcher(Protocol):
    """A matcher that knows its forced text without looking at masks."""

    def forced_text(self) -> bytes:
        """Return the bytes that every continuation begins with."""


class ForcedDrafts:
    """Answers the scheduler's questions for drafts, on the grammar thread.

    Args:
        encode: text -> token ids, without special tokens.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self._bitmask = allocate_bitmask(1, vocabulary.size)  # used over and over
        self._jump = JumpForward(vocabulary, lambda text: encode(text.decode()))

    def answer(self, matcher: Matcher, target: DraftTarget) -> DraftTarget:
        """Return the forced tokens, or the target's drafts up to the first that is not allowed.

        The matcher is unchanged, unless it met one of its limits (`error`).
        """
        if matcher.is_terminated():
            return DraftTarget(target.handle, "", [])
        text = self._find_text(matcher)
        forced = self._split(text, target.tail) if text else []
        if forced:
            return DraftTarget(target.handle, FORCED, forced[: target.limit])
        return DraftTarget(target.handle, target.source, cut_to_allowed(matcher, target.token_ids))

    def _find_text(self, matcher: Matcher) -> bytes:
        if isinstance(matcher, ForcingMatcher):
            return matcher.forced_text()
        # Most states have many tokens, which is a choice; listing them would take most of the time.
        matcher.fill_next_token_bitmask(self._bitmask)
        if int(np.bitwise_count(self._bitmask).sum()) > MAX_FORCED_TOKENS:
            return b""
        return self._jump.find_text(matcher)

    def _split(self, forced: bytes, tail: Sequence[int]) -> list[int]:
        """Return the tokens of the forced text as the tokenizer splits it after `tail`.

        The last token is kept, although the real one may continue beyond the forced text: on the demo model's schemas
        30 % of the output came from forced drafts with it, 20 % without it.
        """
        pieces = self._vocabulary.token_bytes
        before = b"".join(pieces[token_id] for token_id in tail)
        try:
            prefix = before.decode()
        except UnicodeDecodeError:  # the tail begins or ends within a character
            prefix, before = "", b""
        token_ids = list(self._encode(prefix + forced.decode(errors="ignore")))
        start = num_bytes = 0
        while start < len(token_ids) and num_bytes < len(before):
            num_bytes += len(pieces[token_ids[start]])
            start += 1
        if num_bytes != len(before):  # a token spans the border
            token_ids, start = list(self._encode(forced.decode(errors="ignore"))), 0
        return token_ids[start:]


def cut_to_allowed(matcher: Matcher, token_ids: Sequence[int]) -> list[int]:
    """Return the tokens before the first that the grammar does not allow. The matcher is unchanged."""
    num_accepted = 0
    for token_id in token_ids:
        if matcher.is_terminated() or not matcher.accept_token(token_id):
            break
        num_accepted += 1
    if num_accepted:
        matcher.rollback(num_accepted)
    return list(token_ids[:num_accepted])
