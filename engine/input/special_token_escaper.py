"""SpecialTokenEscaper: special tokens that users spell out in messages stay ordinary text.

A chat template is rendered to one string, in which `<|im_end|>` from a document would end the turn like the template's
own. Each such spelling is therefore replaced by a placeholder character before rendering. A copy of the tokenizer has
the placeholders as special tokens, and each placeholder is encoded as the ordinary tokens of the text it replaced.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import InvalidRequest

# Private-use characters, which no model was trained on. Those that a message contains are replaced as well.
FIRST_PLACEHOLDER, MAX_NUM_PLACEHOLDERS = 0xF0000, 1024
PLACEHOLDERS = "".join(chr(FIRST_PLACEHOLDER + index) for index in range(MAX_NUM_PLACEHOLDERS))
# The developer and the model write these messages, and may use the template's special tokens on purpose.
TRUSTED_ROLES = ("system", "developer", "assistant")


class SpecialTokenEscaper:
    """Replaces the special tokens of one tokenizer in messages, and encodes the rendered result."""

    def __init__(self, backend: Any, special_tokens: Sequence[str]) -> None:
        self._spellings = {*filter(None, special_tokens), *PLACEHOLDERS}
        # The lengths of those that begin with a character, longest first: one may begin with another.
        lengths: dict[str, set[int]] = {}
        for each in self._spellings:
            lengths.setdefault(each[0], set()).add(len(each))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        # A pattern of all spellings would take a second to compile for a vocabulary of Gemma.
        self._firsts = re.compile(f"[{re.escape(''.join(self._lengths))}]")
        self._backend = backend
        # Made on first use: copying a large vocabulary takes a second.
        self._copies: tuple[Any, Any, dict[int, int]] | None = None
        self._copies_lock = threading.Lock()

    def escape(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages with placeholders, and the text that each placeholder replaced."""
        numbers: dict[str, int] = {}

        def replace(text: str) -> str:
            parts, end = [], 0
            for found in self._firsts.finditer(text):
                start = found.start()
                if start < end or (length := self._measure(text, start)) == 0:
                    continue
                number = numbers.setdefault(text[start : start + length], len(numbers))
                if number >= MAX_NUM_PLACEHOLDERS:
                    raise InvalidRequest(
                        f"messages contain more than {MAX_NUM_PLACEHOLDERS} different special tokens", "messages"
                    )
                parts += [text[end:start], PLACEHOLDERS[number]]
                end = start + length
            return "".join(parts) + text[end:] if parts else text

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return replace(value)
            if isinstance(value, Mapping):
                return {key: walk(inner) for key, inner in value.items()}
            return [walk(inner) for inner in value] if isinstance(value, list | tuple) else value

        escaped = [
            {
                key: value if key == "role" or message["role"] in TRUSTED_ROLES else walk(value)
                for key, value in message.items()
            }
            for message in messages
        ]
        return escaped, list(numbers)

    def _measure(self, text: str, start: int) -> int:
        """Return the length of the longest spelling at a place of the text; 0 if there is none."""
        lengths = self._lengths[text[start]]
        return next((each for each in lengths if text[start : start + each] in self._spellings), 0)

    def encode(self, text: str, replaced: Sequence[str]) -> list[int]:
        """Return the token ids of a rendered text; each placeholder is encoded as the text it replaced."""
        with self._copies_lock:
            if self._copies is None:
                self._copies = self._make_copies()
            escaping, plain, numbers = self._copies
        token_ids: list[int] = []
        for token_id in escaping.encode(text, add_special_tokens=False).ids:
            number = numbers.get(token_id)
            if number is None:
                token_ids.append(token_id)
            else:
                token_ids += plain.encode(replaced[number], add_special_tokens=False).ids
        return token_ids

    def _make_copies(self) -> tuple[Any, Any, dict[int, int]]:
        """Return a tokenizer that knows the placeholders, one without special tokens, and token id -> placeholder."""
        escaping, plain = (Backend.from_str(self._backend.to_str()) for _ in range(2))
        escaping.add_special_tokens(
            [AddedToken(placeholder, normalized=False) for placeholder in PLACEHOLDERS]
        )
        plain.encode_special_tokens = True
        numbers = {
            cast(int, escaping.token_to_id(placeholder)): number
            for number, placeholder in enumerate(PLACEHOLDERS)
        }
        return escaping, plain, numbers
