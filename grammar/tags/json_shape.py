"""What is still open in a JSON text: enough to tell which tokens cannot complete it."""

import re
from typing import NamedTuple

_SIGN = re.compile(rb'[{}\[\]"\\]')


class JsonShape(NamedTuple):
    """Open brackets, and whether a string is open; meaningful only for texts known to be JSON."""

    depth: int
    is_in_string: bool
    is_escaped: bool = False

    def advance(self, data: bytes) -> "JsonShape":
        """Return the shape after some bytes more."""
        depth, is_in_string, is_escaped = self
        position = 0
        if is_escaped and data:
            position, is_escaped = 1, False
        while (found := _SIGN.search(data, position)) is not None:
            sign, position = found[0], found.end()
            if sign == b'"':
                is_in_string = not is_in_string
            elif is_in_string:
                if sign == b"\\":
                    is_escaped = position >= len(data)
                    position += 1
            elif sign in b"{[":
                depth += 1
            elif sign in b"}]":
                depth -= 1
        return JsonShape(depth, is_in_string, is_escaped)


START = JsonShape(0, False)
