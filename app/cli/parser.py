"""Parser: an ArgumentParser whose complaints are one line, with a hint where there is one."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from app.config import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise, instead of printing the usage and leaving."""
        raise UsageError(self._explain(message))

    def _explain(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            return message
        flag = unknown.group(1)
        close = difflib.get_close_matches(flag.split("=")[0], self._option_string_actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"unknown argument {flag}{hint} (--help lists them all)"
