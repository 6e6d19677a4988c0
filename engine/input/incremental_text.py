"""Incremental detokenisation: token ids in, new text out, never part of a character.

IncrementalText concatenates the exact bytes of the tokens (TokenPieces). WindowedText supports any other decoder
by decoding a short window twice. Both continue the prompt as `decode(prompt + output)` would: a tokenizer that drops
the space at the start of a text keeps it if the prompt has visible text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


def _make_byte_alphabet() -> dict[str, int]:
    """Return printable character -> byte, the table of byte-level BPE (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _make_byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TextRule:
    """How a tokenizer turns tokens into text."""

    is_byte_level: bool
    space_mark: str = ""  # the character that stands for a space; "" in byte-level tokenizers
    has_byte_tokens: bool = False  # <0xNN> is a byte
    num_stripped: int = 0  # spaces dropped at the very start of a text
    drops_first_marks: bool = False  # the first token loses all its space marks (Metaspace)

    def make_bytes(self, token: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token is stored as plain text
                return token.encode()
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(self.space_mark, " ").encode()


def read_text_rule(decoder: Mapping[str, Any] | None) -> TextRule | None:
    """Return the rule of a decoder described in `tokenizer.json`; None if its kind is not supported."""
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return TextRule(is_byte_level=True)
    if kinds == ["Metaspace"]:
        drops_first_marks = parts[0].get("prepend_scheme", "always") != "never"
        return TextRule(False, space_mark=parts[0]["replacement"], drops_first_marks=drops_first_marks)
    return _read_replace_rule(parts, kinds)


def _read_replace_rule(parts: list[Mapping[str, Any]], kinds: list[str]) -> TextRule | None:
    plain, with_bytes = ["Replace"], ["Replace", "ByteFallback"]
    strip = parts[-1] if kinds[-2:] == ["Fuse", "Strip"] else None
    if (kinds[:-1] if strip else kinds) not in (plain, [*plain, "Fuse"], with_bytes, [*with_bytes, "Fuse"]):
        return None
    mark = parts[0]["pattern"].get("String", "")
    if len(mark) != 1 or parts[0]["content"] != " ":
        return None
    if strip and (strip["content"] != " " or strip["stop"] != 0):
        return None
    return TextRule(
        is_byte_level=False, space_mark=mark, has_byte_tokens="ByteFallback" in kinds,
        num_stripped=strip["start"] if strip else 0,
    )


class TokenPieces(dict[int, str | bytes]):
    """Token id -> its piece: str for whole characters, bytes for a part of one, "" for nothing.

    Filled on demand; at most one entry per token of the vocabulary.
    """

    def __init__(
        self, rule: TextRule, id_to_token: Callable[[int], str | None], skipped_ids: Container[int] = ()
    ) -> None:
        super().__init__()
        self.rule = rule
        self._id_to_token = id_to_token
        self._skipped_ids = skipped_ids
        # First characters of stop strings -> tokens that are known to have none of them.
        self.find_quiet = lru_cache(maxsize=64)(lambda _: set[int]())

    def __missing__(self, token_id: int) -> str | bytes:
        token = None if token_id in self._skipped_ids else self._id_to_token(token_id)
        if token is None:  # skipped, or padding of the model's vocabulary: never a part of the text
            return ""
        data = self.rule.make_bytes(token)
        is_byte_token = self.rule.has_byte_tokens and _BYTE_TOKEN.fullmatch(token)
        piece = data if is_byte_token else _decode_if_whole(data)
        self[token_id] = piece
        return piece

    def make_first_piece(self, token_id: int) -> str | bytes:
        """Return the piece of a token at the start of a text."""
        if not self.rule.drops_first_marks:
            return self[token_id]
        return (self._id_to_token(token_id) or "").replace(self.rule.space_mark, "")


def _decode_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


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

    Attributes:
        is_settled: the text of the next token depends on no earlier one.
    """

    __slots__ = ("_errors", "_is_at_start", "_num_stripped", "_pending", "_pieces", "is_settled")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = ()) -> None:
        rule = pieces.rule
        is_at_start = not any(map(pieces.__getitem__, reversed(prompt_token_ids)))
        self._pieces = pieces
        self._errors = "troupe.replace_each_byte" if rule.has_byte_tokens else "replace"
        self._pending = self._read_open_character(prompt_token_ids)
        self._is_at_start = is_at_start and rule.drops_first_marks
        self._num_stripped = rule.num_stripped if is_at_start else 0
        self.is_settled = self._has_settled()

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        if self.is_settled:
            try:
                return "".join(map(self._pieces.__getitem__, token_ids))  # type: ignore[arg-type]
            except TypeError:  # one of them is a part of a character
                pass
        return "".join(map(self.feed_token, token_ids))

    def feed_token(self, token_id: int) -> str:
        """Like `feed`, for one token. Called for every token of every request."""
        piece = self._pieces[token_id]
        if self.is_settled and piece.__class__ is str:
            return piece  # type: ignore[return-value]
        return self._join(token_id, piece)

    def find_quiet(self, characters: frozenset[str]) -> set[int]:
        """Return the tokens that are known to have none of these characters; the caller adds more."""
        return self._pieces.find_quiet(characters)

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
        self.is_settled = self._has_settled()
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
    is_settled = False

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_NUM_WINDOW_PROMPT_TOKENS:])
        self._num_read = len(self._window)
        self._shown = decode(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        return "".join(map(self.feed_token, token_ids))

    def find_quiet(self, characters: frozenset[str]) -> set[int]:
        """Return a set that stays empty: what a token adds depends on those before it."""
        return set()

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
