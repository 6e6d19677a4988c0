"""Follows a JSON text byte by byte and reports each completed value with its place. The text must be valid JSON.

States are immutable, so trying a token out costs nothing to undo.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from ..schema.places import Place

# Further away than any token reaches.
FAR = 1 << 20
_SPACE = frozenset(b" \t\r\n")
_NUMBER = frozenset(b"-+.eE0123456789")
_LETTERS = frozenset(b"rueals")
_LITERALS = {ord("t"): b"true", ord("f"): b"false", ord("n"): b"null"}


class Mode(IntEnum):
    """The construct that the next byte belongs to."""

    VALUE = 0  # a value is about to begin, or an empty array to end
    KEY = 1  # a property name is about to begin, or an object to end
    STRING = 2
    NAME = 3
    NUMBER = 4
    LITERAL = 5
    AFTER = 6  # after a value
    END = 7  # after the whole text


_IN_STRING = (Mode.STRING, Mode.NAME)
_STRING_STOP = re.compile(rb'["\\]')


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An object or array that is open.

    Attributes:
        start: offset of its opening bracket.
        index: its own place in the container around it.
        num_closers: how many brackets have to be closed before a checked value can be complete.
    """

    parent: "Frame | None"
    is_object: bool
    start: int
    place: Place | None
    index: int
    num_closers: int


class State(NamedTuple):
    """A position in a JSON text.

    Attributes:
        frame: the innermost open container.
        start: offset of the scalar being read.
        place: place of the value, or of the name, being read or about to be read.
        position: of that value in its array.
        is_escaped: the next byte belongs to an escape.
    """

    mode: Mode
    frame: Frame | None
    start: int
    place: Place | None
    position: int = 0
    is_escaped: bool = False


# Called with a place, the text of the value complete there, and what gives the text from the bracket around it to
# the value; False stops the walk.
CheckValue = Callable[[Place, bytes, Callable[[], bytes]], bool]


def begin(root: Place | None) -> State:
    return State(Mode.VALUE, None, 0, root)


def advance(state: State, text: bytearray, token: bytes, check: CheckValue) -> State | None:
    """Return the state after a token, None if `check` rejects a value that the token completes.

    Bytes after the complete JSON text are skipped.

    Args:
        text: everything before the token.
    """
    walk, position = _Walk(text, token, check), 0
    while position < len(token) and state.mode is not Mode.END:
        if state.mode in _IN_STRING and not state.is_escaped:
            stop = _STRING_STOP.search(token, position)
            if stop is None:
                return state
            position = stop.start()
        found = walk.step(state, token[position], len(text) + position)
        if found is None:
            return None
        state = found
        position += 1
    return state


class _Walk(NamedTuple):
    """A token after a text, and the check of the values that it completes."""

    text: bytearray
    token: bytes
    check: CheckValue

    def read(self, start: int, end: int) -> bytes:
        split = len(self.text)
        if start >= split:
            return self.token[start - split : end - split]
        return bytes(self.text[start:end]) + self.token[: max(end - split, 0)]

    def is_fine(self, place: Place | None, start: int, end: int, frame: Frame | None) -> bool:
        if place is None or not place.checks:
            return True
        return self.check(place, self.read(start, end), partial(self.read, frame.start if frame else start, start))

    def step(self, state: State, byte: int, offset: int) -> State | None:
        """Take one byte; in a string, and not escaped, it is a quote or a backslash."""
        mode = state.mode
        if mode is Mode.STRING or mode is Mode.NAME:
            if state.is_escaped or byte == 0x5C:
                return state._replace(is_escaped=not state.is_escaped)
            return self.end_string(state, offset + 1)
        if mode is Mode.LITERAL or mode is Mode.NUMBER:
            if byte in (_LETTERS if mode is Mode.LITERAL else _NUMBER):
                return state
            if mode is Mode.NUMBER and not self.is_fine(state.place, state.start, offset, state.frame):
                return None
            state = after(state.frame, state.position)
            if state.mode is Mode.END:
                return state
        return self.step_between(state, byte, offset)

    def step_between(self, state: State, byte: int, offset: int) -> State | None:
        """Take a byte outside strings, numbers and literals."""
        frame = state.frame
        if byte in _SPACE or byte == 0x3A:
            return state
        if byte == 0x22:
            if state.mode is not Mode.KEY:
                return State(Mode.STRING, frame, offset, state.place, state.position)
            assert frame is not None, "names stand only in objects"
            return State(Mode.NAME, frame, offset, frame.place and frame.place.names)
        if byte == 0x7B or byte == 0x5B:
            return _open(state, byte == 0x7B, offset)
        if byte == 0x7D or byte == 0x5D:
            assert frame is not None, "a bracket is closed only where one is open"
            is_fine = self.is_fine(frame.place, frame.start, offset + 1, frame.parent)
            return after(frame.parent, frame.index) if is_fine else None
        if byte == 0x2C:
            assert frame is not None, "commas stand only in containers"
            if frame.is_object:
                return State(Mode.KEY, frame, offset, None)
            index = state.position + 1
            return State(Mode.VALUE, frame, offset, frame.place and frame.place.element(index), index)
        literal = _LITERALS.get(byte)
        if literal is not None and state.place is not None and state.place.checks:
            # The first letter selects the literal, while several are possible.
            before = partial(self.read, frame.start if frame else offset, offset)
            if not self.check(state.place, literal, before):
                return None
        mode = Mode.NUMBER if literal is None else Mode.LITERAL
        return State(mode, frame, offset, state.place, state.position)

    def end_string(self, state: State, end: int) -> State | None:
        frame = state.frame
        if not self.is_fine(state.place, state.start, end, frame):
            return None
        if state.mode is Mode.STRING:
            return after(frame, state.position)
        assert frame is not None, "names stand only in objects"
        if frame.place is None:
            return State(Mode.VALUE, frame, end, None)
        return State(Mode.VALUE, frame, end, frame.place.member(json.loads(self.read(state.start, end))))


def _open(state: State, is_object: bool, offset: int) -> State:
    place, outer = state.place, state.frame
    num_closers = outer.num_closers + 1 if outer else FAR
    if place is not None:
        num_closers = 0 if place.has_children else min(num_closers, 1 if place.checks else FAR)
    frame = Frame(outer, is_object, offset, place, state.position, num_closers)
    if is_object:
        return State(Mode.KEY, frame, offset, None)
    return State(Mode.VALUE, frame, offset, place and place.element(0))


def after(frame: Frame | None, index: int) -> State:
    """Return the state after a value."""
    return State(Mode.END if frame is None else Mode.AFTER, frame, 0, None, index)
