"""Tokens that begin an element like one that stands in the array already, where elements are distinct.

Such a beginning may lead nowhere: after `[1, ` with `enum: [1, 12]` a `1` can still become 12, with `enum: [1, 2]` it
cannot; after `[{"a": 1}, {"a": ` likewise. The matcher tries each of the few tokens found here.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..bit_row import is_set, list_tokens
from .checks import read_elements
from .json_text import Frame, Mode, State

# An array of more elements than that is left to the checks of complete values.
MAX_NUM_SIBLINGS = 64
# Inside objects and arrays every allowed token is tried, unless there are more.
MAX_NUM_ALLOWED = 64
# How many tokens are tried for one mask; beyond them every one counts as leading on.
MAX_NUM_TRIED = 256
MAX_NUM_KNOWN = 4096
MAX_TOKEN_BYTES = 64
COMMAS = (b",", b", ")
Try = Callable[[int], bool]
# Texts that end the open element and require another one.
ENDS = {Mode.NUMBER: COMMAS, Mode.STRING: (b'"', *(b'"' + comma for comma in COMMAS))}


class Element(NamedTuple):
    """An element that is open or comes next.

    Attributes:
        frame: its array.
        start: the offset at which it begins, None when that is ahead.
        leads: texts that may precede it in a token.
        is_container: it is an object or array that is open.
    """

    frame: Frame
    start: int | None
    leads: tuple[bytes, ...]
    is_container: bool


class LookAhead:
    """Remembers which tokens led on; the text after them decides that alone, so rollbacks change nothing.

    Args:
        ids: bytes -> the tokens that are these bytes.
    """

    def __init__(self, token_bytes: Sequence[bytes], ids: Mapping[bytes, Sequence[int]]) -> None:
        self._token_bytes = token_bytes
        self._ids = ids
        self._known: dict[bytes, bool] = {}
        self._num_left = 0

    def start(self) -> None:
        """Begin a mask: its own number of tries."""
        self._num_left = MAX_NUM_TRIED
        if len(self._known) > MAX_NUM_KNOWN:
            self._known.clear()

    def find_wrong(
        self, words: np.ndarray, state: State, text: bytearray, try_token: Try
    ) -> list[int] | None:
        """Return the allowed tokens after which nothing is allowed; None where no element is open or ahead.

        Args:
            try_token: tells whether anything is allowed after a token.
        """
        doubtful = self._list_doubtful(words, state, text)
        return doubtful and [i for i in doubtful if not self._leads_on(i, text, try_token)]

    def goes_on(self, words: np.ndarray, state: State, text: bytearray, try_token: Try) -> bool:
        """Tell whether any of the allowed tokens leads on."""
        doubtful = self._list_doubtful(words, state, text)
        if not doubtful or np.bitwise_count(words).sum() > len(doubtful):
            return bool(words.any())
        # Long tokens come to a decision sooner.
        doubtful.sort(key=lambda i: -len(self._token_bytes[i]))
        return any(self._leads_on(i, text, try_token) for i in doubtful)

    def _list_doubtful(self, words: np.ndarray, state: State, text: bytearray) -> list[int] | None:
        element = find_element(state)
        if element is None:
            return None
        frame, start, leads, is_container = element
        siblings = read_elements(bytes(text[frame.start : len(text) if start is None else start]))
        # A scalar that is open may become the sibling of one that a token begins after it.
        if len(siblings) > MAX_NUM_SIBLINGS or not (siblings or state.mode in ENDS):
            return []
        if is_container or (start is None and any(isinstance(value, dict | list) for value in siblings)):
            is_few = np.count_nonzero(words) <= MAX_NUM_ALLOWED
            allowed = list_tokens(words) if is_few else []
            return allowed if len(allowed) <= MAX_NUM_ALLOWED else []
        written = b"" if start is None else bytes(text[start:])
        found = find_beginnings(self._ids, state.mode, written, leads, spell_scalars(siblings))
        return [i for i in dict.fromkeys(found) if is_set(words, i)]

    def _leads_on(self, token_id: int, text: bytearray, try_token: Try) -> bool:
        # A digest, since the text may be long and there are many tokens to remember.
        key = hashlib.blake2b(text + self._token_bytes[token_id], digest_size=16).digest()
        if key not in self._known:
            if not self._num_left:
                return True
            self._num_left -= 1
            self._known[key] = try_token(token_id)
        return self._known[key]


def find_element(state: State) -> Element | None:
    """Return the element of few possible values that is open or comes next, None where there is none."""
    frame = state.frame
    if frame is None or state.is_escaped:
        return None
    if not frame.is_object and frame.place is not None:
        if state.mode is Mode.AFTER and is_picked(frame.place.element(state.position + 1)):
            return Element(frame, None, COMMAS, False)
        if state.mode is Mode.VALUE and is_picked(state.place):
            return Element(frame, None, (b"", b" "), False)
        if state.mode in (Mode.STRING, Mode.NUMBER) and is_picked(state.place):
            return Element(frame, state.start, (b"",), False)
    while frame.parent is not None:
        if not frame.parent.is_object and is_picked(frame.place):
            return Element(frame.parent, frame.start, (b"",), True)
        frame = frame.parent
    return None


def is_picked(place: Any) -> bool:
    """Tell whether a place is one of an element that is unlike its neighbours and has few values to choose from."""
    return place is not None and place.has_few and any(check.is_distinct for check in place.checks)


def spell_scalars(siblings: Sequence[Any]) -> list[bytes]:
    """Return the ways to write strings and numbers."""
    found: list[bytes] = []
    for value in siblings:
        if isinstance(value, str):
            found.append(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_whole = value == int(value)
            found += [b"%d" % value, b"%d.0" % value] if is_whole else [json.dumps(value).encode()]
    return found


def find_beginnings(
    ids: Mapping[bytes, Sequence[int]],
    mode: Mode,
    written: bytes,
    leads: Sequence[bytes],
    spellings: Sequence[bytes],
) -> Iterator[int]:
    """Yield the tokens after which what is written may still become one of the spellings, or another has to follow.

    Args:
        ids: bytes -> the tokens that are these bytes.
    """
    ends = ENDS.get(mode, ())
    pieces = {*(lead for lead in leads if lead), *ends}
    for spelling in [*spellings, written + b'"' if mode is Mode.STRING else written] if ends else ():
        lengths = range(1, min(len(spelling), MAX_TOKEN_BYTES) + 1)
        pieces.update(end + spelling[:length] for end in ends for length in lengths)
    for spelling in spellings:
        if spelling.startswith(written):
            rest = spelling[len(written) :]
            lengths = range(1, min(len(rest), MAX_TOKEN_BYTES) + 1)
            pieces.update(lead + rest[:length] for lead in leads for length in lengths)
    for piece in pieces:
        yield from ids.get(piece, ())
