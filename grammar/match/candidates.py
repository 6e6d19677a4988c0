"""Which tokens may complete a checked value in a state of a text: a class of ClosingTokens and the brackets needed."""

from typing import cast

from ..schema.places import Place
from .json_text import FAR, Mode, State

Kind = tuple[str, int]


def find_string_place(state: State) -> Place | None:
    """Return the place of the string that is open, which may be a property name."""
    if state.mode is Mode.NAME:
        return cast(Place | None, state.frame and state.frame.place and state.frame.place.names)
    return cast(Place | None, state.place)


def find_far_kind(state: State) -> Kind | None:
    """Return which tokens may complete a value around the string that is open, None where no token reaches it."""
    num_closers = state.frame.num_closers if state.frame else 0
    return None if num_closers >= FAR else ("far quote", num_closers)


def find_kind(state: State) -> Kind | None:
    """Return which tokens may complete a checked value, None where none can."""
    if state.mode is Mode.END:
        return None
    num_closers = state.frame.num_closers if state.frame else 0
    in_string = state.mode in (Mode.STRING, Mode.NAME)
    place = find_string_place(state) if in_string else state.place
    is_checked = place is not None and bool(place.checks)
    if in_string and is_checked:
        return "escaped quote" if state.is_escaped else "quote", 0
    if state.mode is Mode.NUMBER and is_checked:
        return "delimiter", 0
    if num_closers >= FAR:
        return None
    if not in_string:
        return "any", num_closers
    return "escaped quote" if state.is_escaped else "far quote", num_closers
