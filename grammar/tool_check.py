"""Whether the schema of a tool can be enforced in a style: asked where no model's vocabulary is at hand."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .compiler import GrammarCompiler
from .errors import UnsupportedGrammar
from .tags.argument_writer import is_surely_enforced
from .tags.tool_calls import make_tool_spec
from .tags.tool_styles import ToolStyle
from .vocabulary import Vocabulary


def find_tool_refusal(style: ToolStyle, schema: Mapping[str, Any]) -> UnsupportedGrammar | None:
    """Return why a schema of arguments cannot be enforced, None if it can.

    Raises:
        InvalidGrammar: nothing satisfies it.
    """
    if is_surely_enforced(style, schema):
        return None
    try:
        _make_compiler().compile(make_tool_spec(style, [("f", schema)], is_forced=True))
    except UnsupportedGrammar as error:
        pointer = error.pointer.removeprefix("/tools/0/parameters")
        return UnsupportedGrammar(pointer, error.keyword, error.reason)
    return None


@lru_cache(1)
def _make_compiler() -> GrammarCompiler:
    """Return a compiler of texts that are written byte by byte."""
    return GrammarCompiler(Vocabulary([*(bytes((byte,)) for byte in range(256)), b"", b""], (256,)))
