"""The tokens of a vocabulary as pieces of JSON strings, and the tables that only some grammars need."""

from functools import cached_property

from ..vocabulary import Vocabulary, make_mask
from .closing_tokens import ClosingTokens

_SPACES = b" \t\r\n"
# Longer pieces are not looked for; shorter tokens spell the same text.
MAX_PIECE_BYTES = 32


class StringTokens:
    """The tokens of a vocabulary as pieces of JSON strings.

    Attributes:
        whole: piece -> the tokens that are this piece.
        closing: piece -> the tokens in which a quote follows this piece.
        quoted: bitmask row of the tokens that begin with a quote.
        contents: token -> content, for tokens that are one quote, perhaps after whitespace, and some content.
        mixed: bitmask row of the other tokens with a quote that is not all of their end.
        several: bitmask row of the tokens with more than one quote.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.whole: dict[bytes, list[int]] = {}
        self.closing: dict[bytes, list[int]] = {}
        self.contents: dict[int, bytes] = {}
        mixed, several = [], []
        for token_id, token in enumerate(vocabulary.token_bytes):
            if not token:
                continue
            self.whole.setdefault(token, []).append(token_id)
            position, num_quotes = token.find(b'"'), token.count(b'"')
            is_led = not token[: max(position, 0)].strip(_SPACES)
            if num_quotes == 1 and is_led and position + 1 < len(token):
                self.contents[token_id] = token[position + 1 :]
            elif num_quotes > 1 or 0 <= position < len(token) - 1:
                mixed.append(token_id)
            if num_quotes > 1:
                several.append(token_id)
            while position >= 0:
                self.closing.setdefault(token[:position], []).append(token_id)
                position = token.find(b'"', position + 1)
        self.quoted = make_mask(self.closing.get(b"", []), vocabulary.size)
        self.mixed = make_mask(mixed, vocabulary.size)
        self.several = make_mask(several, vocabulary.size)


class TokenTables:
    """The tables of one vocabulary, made when first asked for: 100,000 tokens take a tenth of a second for each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def closing(self) -> ClosingTokens:
        """The tables for residual checks."""
        return ClosingTokens(self._vocabulary)

    @cached_property
    def strings(self) -> StringTokens:
        """The tables for quotations."""
        return StringTokens(self._vocabulary)
