"""Incremental detokenisation: token ids in, new text out, never half a character.

IncrementalText joins the exact bytes of the tokens (see token_pieces). WindowedText works for any other
decoder by decoding a short window twice. Both continue the prompt: a tokenizer that drops the space at the
start of a text drops it only when nothing visible stands before, as `decode(prompt + output)` would.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence

from engine.core.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_NUM_WINDOW_PROMPT_TOKENS = 6
_MAX_HELD_TOKENS = 8  # a character has at most four bytes: whatever is longer is broken, and is shown as such


class NoPieces(Mapping[int, str]):
    """No token adds anything."""

    def __getitem__(self, token_id: int) -> str:
        return ""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[int]:
        return iter(())


NO_PIECES = NoPieces()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler of byte-fallback tokenizers: one U+FFFD for each byte, not for each broken run."""
    assert isinstance(error, UnicodeDecodeError), "the handler decodes only"
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("troupe.replace_each_byte", _replace_each_byte)


class IncrementalText:
    """The text of one output, token by token.

    Fed with any ids, the deltas join to the tokenizer's own decode. One case differs on purpose: where a run
    of <0xNN> tokens holds characters and then breaks, decode calls the whole run broken, but those characters
    have been shown by then, and rightly so.
    """

    __slots__ = ("_errors", "_is_at_start", "_num_stripped", "_pending", "is_settled", "pieces")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        rule = pieces.rule
        is_at_start = not any(pieces[token_id] for token_id in reversed(prompt_token_ids))
        self.pieces = pieces
        self._errors = "troupe.replace_each_byte" if rule.has_byte_tokens else "replace"
        self._pending = self._read_open_character(prompt_token_ids)
        self._is_at_start = is_at_start and rule.drops_first_marks
        self._num_stripped = rule.num_stripped if is_at_start else 0
        self.is_settled = self._has_settled()

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is open."""
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    def feed_token(self, token_id: int) -> str:
        """The same for one token; it runs for every token of every request."""
        piece = self.pieces[token_id]
        if self.is_settled and piece.__class__ is str:
            return piece  # type: ignore[return-value]
        return self._join(token_id, piece)

    def finish(self) -> str:
        """What is left of an open character, as U+FFFD."""
        data, self._pending = self._pending, b""
        return codecs.utf_8_decode(data, self._errors, True)[0]

    def _has_settled(self) -> bool:
        return not (self._pending or self._is_at_start or self._num_stripped)

    def _join(self, token_id: int, piece: str | bytes) -> str:
        if not piece:
            return ""
        if self._is_at_start:
            piece = self.pieces.make_first_piece(token_id)
            self._is_at_start = False
        if isinstance(piece, str):
            text = self.finish() + piece
        else:
            data = self._pending + piece
            text, num_used = codecs.utf_8_decode(data, self._errors, False)
            self._pending = data[num_used:]
        if self._num_stripped and text:
            text = self._strip(text)
        self.is_settled = self._has_settled()
        return text

    def _strip(self, text: str) -> str:
        num_spaces = len(text) - len(text.lstrip(" "))
        num_dropped = min(num_spaces, self._num_stripped)
        self._num_stripped = self._num_stripped - num_dropped if num_spaces == len(text) else 0
        return text[num_dropped:]

    def _read_open_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The bytes of a character that the prompt begins and the output may complete."""
        data = b""
        for token_id in reversed(prompt_token_ids):
            piece = self.pieces[token_id]
            if (piece and isinstance(piece, str)) or len(data) >= _MAX_CHARACTER_BYTES:
                break
            if isinstance(piece, bytes):
                data = piece + data
        return data[codecs.utf_8_decode(data, "replace", False)[1] :]


class WindowedText:
    """The same for any decoder: what a window of tokens says now, less what it said before.

    Source: the two-offset scheme of Hugging Face's text-generation-inference.
    """

    __slots__ = ("_decode", "_num_read", "_shown", "_window")

    pieces = NO_PIECES
    is_settled = False

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_NUM_WINDOW_PROMPT_TOKENS:])
        self._num_read = len(self._window)
        self._shown = decode(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is open."""
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """What is still held back."""
        text = self._decode(self._window)[len(self._shown) :]
        self._advance()
        return text

    def feed_token(self, token_id: int) -> str:
        """The same for one token."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_full = len(self._window) - self._num_read >= _MAX_HELD_TOKENS
        if len(text) <= len(self._shown):  # skipped tokens, or a decoder that leaves out open characters
            if is_full:
                del self._window[self._num_read]
            return ""
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        delta = text[len(self._shown) :]
        self._advance()
        return delta

    def _advance(self) -> None:
        """Keep the tokens just shown as the context of the next ones."""
        if self._num_read < len(self._window):
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._shown = self._decode(self._window)
