"""Shield: what people write into a conversation stays text, also where it spells a special token.

A chat template is rendered to one text, in which `<|im_end|>` from a document would end the turn like the template's
own. So such spellings are replaced by marks before rendering; the marks are special tokens of a copy of the tokenizer,
and each becomes the ordinary tokens of what it stands for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import InvalidRequest

# Characters of private use, which no model was trained on; those that somebody does write are replaced, too.
FIRST_MARK, MAX_NUM_MARKS = 0xF0000, 1024
MARKS = "".join(chr(FIRST_MARK + index) for index in range(MAX_NUM_MARKS))
# Whoever writes these may know the template, and use its tokens.
TRUSTED_ROLES = ("system", "developer", "assistant")


class Shield:
    """Special tokens of one tokenizer, kept out of messages."""

    def __init__(self, backend: Any, special_tokens: Sequence[str]) -> None:
        # The longest first: one may begin with another.
        ordered = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, ordered), f"[{MARKS[0]}-{MARKS[-1]}]"]))
        self._backend = backend
        # made when they are first needed: a copy of a large vocabulary takes a second
        self._copies: tuple[Any, Any, dict[int, int]] | None = None
        self._making = threading.Lock()

    def replace(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """The messages with a mark in place of each spelling, and what the marks stand for."""
        spelled: dict[str, int] = {}

        def mark(found: re.Match[str]) -> str:
            number = spelled.setdefault(found[0], len(spelled))
            if number >= MAX_NUM_MARKS:
                raise InvalidRequest(f"messages spell more than {MAX_NUM_MARKS} special tokens", "messages")
            return MARKS[number]

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(mark, value)
            if isinstance(value, Mapping):
                return {key: walk(inner) for key, inner in value.items()}
            return [walk(inner) for inner in value] if isinstance(value, list | tuple) else value

        replaced = [
            {
                key: value if key == "role" or message["role"] in TRUSTED_ROLES else walk(value)
                for key, value in message.items()
            }
            for message in messages
        ]
        return replaced, list(spelled)

    def encode(self, text: str, spelled: Sequence[str]) -> list[int]:
        """Token ids of a rendered text with marks; what they stand for is ordinary text."""
        with self._making:
            if self._copies is None:
                self._copies = self._make_copies()
            marking, plain, numbers = self._copies
        token_ids: list[int] = []
        for token_id in marking.encode(text, add_special_tokens=False).ids:
            number = numbers.get(token_id)
            if number is None:
                token_ids.append(token_id)
            else:
                token_ids += plain.encode(spelled[number], add_special_tokens=False).ids
        return token_ids

    def _make_copies(self) -> tuple[Any, Any, dict[int, int]]:
        """A tokenizer that keeps marks whole, one that knows no special tokens, and id of a mark -> which one."""
        marking, plain = (Backend.from_str(self._backend.to_str()) for _ in range(2))
        marking.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
        plain.encode_special_tokens = True
        numbers = {cast(int, marking.token_to_id(mark)): number for number, mark in enumerate(MARKS)}
        return marking, plain, numbers
