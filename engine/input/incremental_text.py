"""Incremental detokenisation: token ids in, new text out, never part of a character.

IncrementalText concatenates the exact bytes of the tokens (see token_pieces). WindowedText supports any other decoder
by decoding a short window twice. Both continue the prompt as `decode(prompt + output)` would: a tokenizer that drops
the space at the start of a text keeps it if the prompt has visible text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from engine.input.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_NUM_WINDOW_PROMPT_TOKENS = 6
# A character has at most four bytes, so a longer run is invalid UTF-8; its text is released as it is.
_MAX_HELD_TOKENS = 8


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler of byte-fallback tokenizers: one U+FFFD per invalid byte, not per invalid run."""
    assert isinstance(error, UnicodeDecodeError), "the handler decodes only"
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("troupe.replace_each_byte", _replace_each_byte)


class IncrementalText:
    """Decodes one output stream token by token.

    The deltas concatenate to the tokenizer's own decode, with one exception. When a run of <0xNN> tokens begins with
    valid characters and then becomes invalid, decode replaces the whole run, but the characters were already shown.
    """

    __slots__ = ("_errors", "_is_at_start", "_is_settled", "_num_stripped", "_pending", "_pieces")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        rule = pieces.rule
        is_at_start = not any(pieces[token_id] for token_id in reversed(prompt_token_ids))
        self._pieces = pieces
        self._errors = "troupe.replace_each_byte" if rule.has_byte_tokens else "replace"
        self._pending = self._read_open_character(prompt_token_ids)
        self._is_at_start = is_at_start and rule.drops_first_marks
        self._num_stripped = rule.num_stripped if is_at_start else 0
        self._is_settled = self._has_settled()

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    def feed_token(self, token_id: int) -> str:
        """Like `feed`, for one token. Called for every token of every request."""
        piece = self._pieces[token_id]
        if self._is_settled and piece.__class__ is str:
            return piece  # type: ignore[return-value]
        return self._join(token_id, piece)

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character at the end."""
        data, self._pending = self._pending, b""
        return codecs.utf_8_decode(data, self._errors, True)[0]

    def _has_settled(self) -> bool:
        return not (self._pending or self._is_at_start or self._num_stripped)

    def _join(self, token_id: int, piece: str | bytes) -> str:
        if not piece:
            return ""
        if self._is_at_start:
            piece = self._pieces.make_first_piece(token_id)
            self._is_at_start = False
        if isinstance(piece, str):
            text = self.finish() + piece
        else:
            data = self._pending + piece
            text, num_used = codecs.utf_8_decode(data, self._errors, False)
            self._pending = data[num_used:]
        if self._num_stripped and text:
            text = self._strip(text)
        self._is_settled = self._has_settled()
        return text

    def _strip(self, text: str) -> str:
        num_spaces = len(text) - len(text.lstrip(" "))
        num_dropped = min(num_spaces, self._num_stripped)
        self._num_stripped = self._num_stripped - num_dropped if num_spaces == len(text) else 0
        return text[num_dropped:]

    def _read_open_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the end of the prompt."""
        data = b""
        for token_id in reversed(prompt_token_ids):
            piece = self._pieces[token_id]
            if (piece and isinstance(piece, str)) or len(data) >= _MAX_CHARACTER_BYTES:
                break
            if isinstance(piece, bytes):
                data = piece + data
        return data[codecs.utf_8_decode(data, "replace", False)[1] :]


class WindowedText:
    """Like IncrementalText for any decoder: the text of a token window, minus what was shown before.

    Source: the two-offset scheme of Hugging Face's text-generation-inference.
    """

    __slots__ = ("_decode", "_num_read", "_shown", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_NUM_WINDOW_PROMPT_TOKENS:])
        self._num_read = len(self._window)
        self._shown = decode(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text that is still held back."""
        text = self._decode(self._window)[len(self._shown) :]
        self._advance()
        return text

    def feed_token(self, token_id: int) -> str:
        """Like `feed`, for one token."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_full = len(self._window) - self._num_read >= _MAX_HELD_TOKENS
        if len(text) <= len(self._shown):  # skipped tokens, or a decoder that omits incomplete characters
            if is_full:
                del self._window[self._num_read]
            return ""
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        delta = text[len(self._shown) :]
        self._advance()
        return delta

    def _advance(self) -> None:
        """Keep the tokens just shown as context for the next ones."""
        if self._num_read < len(self._window):
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._shown = self._decode(self._window)
