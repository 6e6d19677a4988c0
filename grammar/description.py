"""Reads what a request describes as JSON into classes of msgspec, and says where it is malformed."""

import re
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from .errors import InvalidGrammar


class Malformed(InvalidGrammar):
    """A description that does not fit its class.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, what: str, pointer: str, reason: str, hint: str = "") -> None:
        super().__init__(f"the {what} is malformed at {pointer or '#'}: {reason}{hint}", pointer)
        self.reason = reason


def read_description(value: Any, kind: type[Struct], what: str) -> dict[str, Any]:
    """Return a value as JSON with all its defaults.

    Raises:
        Malformed: it does not fit the class.
    """
    try:
        found: dict[str, Any] = to_builtins(convert(value, kind))
        return found
    except ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        pointer = re.sub(r"[.\[]+", "/", path.replace("]", "").rstrip("`"))
        raise Malformed(what, pointer, reason) from error
    except RecursionError as error:
        raise InvalidGrammar(f"the {what} is nested too deeply") from error
