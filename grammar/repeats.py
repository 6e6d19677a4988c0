"""Tokens that begin an element like one that stands in the array already, where elements are distinct.

Such a beginning may lead nowhere: after `[1, ` with `enum: [1, 12]` a `1` can still become 12, with `enum: [1, 2]` it
cannot. The matcher tries each of the few tokens found here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .json_text import Mode, State
from .residual_checks import read_elements

# An array of more elements than that is left to the checks of complete values.
MAX_NUM_SIBLINGS = 64
# How many different beginnings are followed for one mask; beyond them every one counts as leading on.
MAX_NUM_TRIED = 256
COMMAS = (b",", b", ")
# What ends an element that is open and demands another one.
ENDS = {Mode.NUMBER: COMMAS, Mode.STRING: (b'"', *(b'"' + comma for comma in COMMAS))}


def find_element(state: State) -> tuple[Any, int | None, tuple[bytes, ...]]:
    """Return the place of the scalar element that is open or comes next, None where there is none.

    Returns also the offset at which it begins, None when that is ahead, and what may stand before it in a token.
    """
    frame = state.frame
    if frame is None or frame.is_object or frame.site is None or state.is_escaped:
        return None, None, ()
    if state.mode is Mode.AFTER:
        return frame.site.element(state.place + 1), None, COMMAS
    if state.mode is Mode.VALUE:
        return state.site, None, (b"", b" ")
    return (state.site, state.start, (b"",)) if state.mode in (Mode.STRING, Mode.NUMBER) else (None, None, ())


def spell_elements(before: bytes) -> list[bytes]:
    """Return the ways to write the strings and numbers of an array so far."""
    found: list[bytes] = []
    for value in read_elements(before)[: MAX_NUM_SIBLINGS + 1]:
        if isinstance(value, str):
            found.append(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_whole = value == int(value)
            found += [b"%d" % value, b"%d.0" % value] if is_whole else [json.dumps(value).encode()]
    return found if len(found) <= 2 * MAX_NUM_SIBLINGS else []


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
    for spelling in [*spellings, written + b'"' if mode is Mode.STRING else written]:
        pieces.update(end + spelling[:length] for end in ends for length in range(1, len(spelling) + 1))
    for spelling in spellings:
        if spelling.startswith(written):
            rest = spelling[len(written) :]
            pieces.update(lead + rest[:length] for lead in leads for length in range(1, len(rest) + 1))
    for piece in pieces:
        yield from ids.get(piece, ())
