"""JSON schemas in llguidance's own format: a Lark grammar, and the schemas it calls with the options for each."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

# Forced tokens would allow one tokenisation of a forced text and forbid the others; llguidance has no tokenizer here.
HEADER = '%llguidance {"no_forcing": true}\n'
# Set every option, because a schema could set missing ones under "x-guidance".
_OPTIONS: Any = {"coerce_one_of": False, "lenient": False, "json_allow_general_unicode_escapes": False}
_BEGIN, _END = '{"grammars": [', "]}"
_SHORT_ESCAPES = 'nrbtf\\"'
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (",", ":")}
# Unbounded whitespace would let a model write newlines forever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def make_json_grammar(
    lark: str, schemas: Sequence[str], whitespace: str, has_open_names: bool, name: str = ""
) -> str:
    """Return the grammar of a Lark grammar and the schemas that it calls `@{name}v0` and so on.

    Args:
        lark: "" for one schema alone, compiled in a tenth of the time. Its masks force tokens, so it serves only to see
            whether llguidance takes it.
        schemas: each a JSON object, without white space around it.
        has_open_names: an object may have both listed names and others. Then strings hold short escapes only:
            llguidance takes any other escape in a name, which could repeat a listed one.
        name: of the Lark grammar, by which another one calls it.
    """
    options = make_options(whitespace, has_open_names)
    names = [f"{name}v{number}" for number in range(len(schemas))]
    parts = []
    if name and lark == f"start: @{name}v0":
        names = [name]  # a part that is called by its name needs no rules of its own
    elif lark:
        parts.append(json.dumps({"name": name, "lark_grammar": HEADER + lark}))
    for each, schema in zip(names, schemas, strict=True):
        body = f"{schema[:-1]}, " if schema != "{}" else "{"
        parts.append(f'{{"name": "{each}", "json_schema": {body}"x-guidance": {options}}}}}')
    return join_grammars(parts)


def is_flexible(whitespace: str) -> bool:
    """Return whether white space may stand between values or not."""
    return whitespace not in ("spaced", "compact")


def find_pattern(whitespace: str) -> str:
    """Return the pattern of the white space that may stand between values."""
    return WHITESPACE if whitespace == "any" else whitespace


@cache
def make_options(whitespace: str, has_open_names: bool) -> str:
    """Return, as JSON, how llguidance is to write JSON."""
    item_separator, key_separator = SEPARATORS.get(whitespace, SEPARATORS["any"])
    options = {**_OPTIONS, "item_separator": item_separator, "key_separator": key_separator}
    options["whitespace_flexible"] = is_flexible(whitespace)
    if is_flexible(whitespace):
        options["whitespace_pattern"] = find_pattern(whitespace)
    if has_open_names:
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    return json.dumps(options)


def join_grammars(parts: Sequence[str]) -> str:
    """Return one text of several grammars, of which the first is the start."""
    return f"{_BEGIN}{', '.join(parts)}{_END}"


def join_lark(lark: str, grammars: Iterable[str]) -> str:
    """Return the text of a Lark grammar, and of the grammars that it calls."""
    called = (grammar.removeprefix(_BEGIN).removesuffix(_END) for grammar in grammars)
    return join_grammars([json.dumps({"lark_grammar": HEADER + lark}), *called])
