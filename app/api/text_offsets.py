"""Offsets of the tokens of a text completion in the text that clients see.

The bytes of one character share its offset. A token that shows nothing, such as a special token, has the offset of the
next one. A stop string that the text leaves out is counted, so that a stream and a whole reply have the same offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine import Tokenizer


class TextOffsets:
    """Counts along one output, which may come in pieces.

    Args:
        tokenizer: None puts every token at the start.
        start: how much text stands before the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        start: int = 0,
    ) -> None:
        self._text = None if tokenizer is None else tokenizer.make_text(prompt_token_ids, skip_special_tokens)
        self._place = start

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """The places of the next tokens."""
        places = []
        for token_id in token_ids:
            places.append(self._place)
            if self._text is not None:
                self._place += len(self._text.feed_token(token_id))
        return places


def find_prompt_offsets(tokenizer: Tokenizer | None, echo: str, token_ids: Iterable[int]) -> list[int]:
    """The places of a prompt's tokens in the prompt as it is repeated."""
    if tokenizer is None:
        return [0 for _ in token_ids]
    text, place, places = tokenizer.make_text(), 0, []
    for token_id in token_ids:
        places.append(min(place, len(echo)))
        shown = text.feed_token(token_id)
        piece = tokenizer.token_piece(token_id)
        # a special token shows only where the client has written it out
        if not shown and isinstance(piece, str) and echo.startswith(piece, place):
            shown = piece
        place += len(shown)
    return places
