"""TokenPieces: the text or bytes that each token adds, according to the tokenizer's decoder.

Nearly all language models use one of three context-free decoders, so text is a plain concatenation:

    ByteLevel                                  GPT-2, Llama 3, Qwen: every character of a token names one byte
    Replace ▁ → space, ByteFallback [, Strip]  Llama 2, Mistral 7B, Gemma: <0xNN> is one byte of a character
    Metaspace                                  other sentencepiece conversions

TextRule, read from the decoder, gives a token's exact bytes for streaming text and for grammar vocabularies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
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
        """Return the exact bytes of one token, special or not."""
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
        is_byte_level=False,
        space_mark=mark,
        has_byte_tokens="ByteFallback" in kinds,
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
