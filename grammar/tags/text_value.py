"""An argument that a model writes as text: what it means under its schema, and the check of one that may be invalid."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Matcher, OuterMatcher
from ..bitmask import clear_bits
from ..match.closing_tokens import TokenClass
from ..validator import SchemaValidator

MAX_NUM_TRIED = 64  # endings that are validated for one mask
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
# Names of templates in literals of Python.
_NAMES = re.compile(r"\b(?:true|false|null)\b")
_SPELT = {"true": "True", "false": "False", "null": "None"}
_NAMES_OF_PYTHON = re.compile(r"\b(?:True|False|None)\b")
_JSON = {name: spelling for spelling, name in _SPELT.items()}
# The name of a property in Gemma's notation.
_KEY = re.compile(r"(?<=[{,])([^{}\[\],:\"]+):")


def read_words(text: str) -> Any:
    """Return the value other than a string that a text spells; the text itself if it spells none."""
    if text in WORDS:
        return WORDS[text]
    if _NUMBER.fullmatch(text) is not None or text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return read_python(text)
    return text


def read_python(text: str) -> Any:
    """Return the value of a literal of Python, also with JSON's names; the text itself if it is none."""
    outside = re.split(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", text)
    spelt = [_NAMES.sub(lambda m: _SPELT[m[0]], each) if i % 2 == 0 else each for i, each in enumerate(outside)]
    try:
        found = ast.literal_eval("".join(spelt))
        json.dumps(found, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return found


def read_gemma(text: str, quote: str) -> Any:
    """Return the value of a literal in Gemma's notation; the text itself if it is none."""
    parts = text.split(quote)
    spelt = [
        json.dumps(part) if place % 2 else _NAMES_OF_PYTHON.sub(lambda m: _JSON[m[0]], _KEY.sub(r'"\1":', part))
        for place, part in enumerate(parts)
    ]
    try:
        return json.loads("".join(spelt))
    except (ValueError, RecursionError):
        return text


def interpret(text: str, is_valid: Callable[[Any], bool]) -> Any:
    """Return what a text means under a schema: another value than a string if that is valid, else a string."""
    value = read_words(text)
    return value if not isinstance(value, str) and is_valid(value) else text


@dataclass(frozen=True, slots=True)
class TextCheck:
    """The check of a text value.

    Attributes:
        end: the text behind the value.
        validator: of its schema.
        tokens: those that may complete the end, the shortest first.
        spellings: the bytes of each token, of a special one its name.
        is_string: the text is a string, whatever it spells.
    """

    end: bytes
    validator: SchemaValidator
    tokens: TokenClass
    spellings: tuple[bytes, ...]
    is_string: bool

    def find_end(self, text: bytes) -> int:
        """Return where the value ends that begins a text, -1 if it does not."""
        return text.find(self.end)

    def passes(self, text: bytes) -> bool:
        """Return whether a whole value is valid."""
        try:
            meant = text.decode() if self.is_string else interpret(text.decode(), self.validator.is_valid)
        except UnicodeDecodeError:
            return False
        return self.validator.is_valid(meant)


class TextMatcher(OuterMatcher):
    """Follows a text value to its end; a token that ends an invalid one is refused."""

    def __init__(self, inner: Matcher, check: TextCheck) -> None:
        super().__init__(inner)
        self._check = check
        self._text = b""
        self._history: list[bytes] = []
        self._verdicts: dict[bytes, bool] = {}

    @classmethod
    def start_inside(cls, inner: Matcher, check: TextCheck, text: bytes) -> "TextMatcher | None":
        """Return a matcher after the first bytes of a value inside a longer text; None if they break the check."""
        matcher = cls(inner, check)
        matcher._text = text
        return matcher if matcher._is_fine(text) else None

    @property
    def is_value_complete(self) -> bool:
        return self._check.find_end(self._text) >= 0

    def _is_fine(self, text: bytes) -> bool:
        at = self._check.find_end(text)
        if at < 0:
            return True
        value = text[:at]
        if value not in self._verdicts:
            self._verdicts[value] = self._check.passes(value)
        return self._verdicts[value]

    def _take(self, token_id: int) -> bool:
        text = self._text + self._check.spellings[token_id]
        if not self._is_fine(text) or not self.inner.accept_token(token_id):
            return False
        self._history.append(self._text)
        self._text = text
        return True

    def _take_back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        self._text = self._history[-num_tokens]
        del self._history[-num_tokens:]

    def write_row(self, words: np.ndarray) -> None:
        """Clear the tokens that would end an invalid text; those beyond a number of different texts are cleared too."""
        end, tokens = self._check.end, self._check.spellings
        keep = self._text[-len(end) + 1 :] if len(end) > 1 else b""
        candidates = [i for i in self._check.tokens.find(words) if end in keep + tokens[i]]
        tried, wrong = set[bytes](), []
        for token_id in candidates:
            text = self._text + tokens[token_id]
            tried.add(text[: self._check.find_end(text)])
            if len(tried) > MAX_NUM_TRIED or not self._is_fine(text):
                wrong.append(token_id)
        clear_bits(words, wrong)
