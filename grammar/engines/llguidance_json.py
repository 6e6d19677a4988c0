"""JSON schemas in llguidance's own format: a Lark grammar, and the schemas it calls with the options for each."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

# Forced tokens would allow one tokenisation of a forced text and forbid the others; llguidance has no tokenizer here.
HEADER = '%llguidance {"no_forcing": true}\n'
# Set every option, because a schema could set missing ones under "x-guidance".
_OPTIONS: Any = {
    "coerce_one_of": False,
    "lenient": False,
    "json_allow_general_unicode_escapes": False,
}
# Header of each schema beside the Lark grammar.
NAMED = '{"name": "'
_SHORT_ESCAPES = 'nrbtf\\"'
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (",", ":")}
# Unbounded whitespace would let a model write newlines forever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def make_json_grammar(
    lark: str, schemas: Sequence[dict[str, Any]], whitespace: str, has_open_names: bool
) -> str:
    """Return the grammar of a Lark grammar and the schemas that it calls `@v0` and so on.

    Args:
        lark: "" for one schema alone, compiled in a tenth of the time. Its masks force tokens, so it serves only to see
            whether llguidance takes it.
        has_open_names: an object may have both listed names and others. Then strings hold short escapes only:
            llguidance takes any other escape in a name, which could repeat a listed one.
    """
    options = make_options(whitespace, has_open_names)
    parts = [json.dumps({"lark_grammar": HEADER + lark})] if lark else []
    for number, schema in enumerate(schemas):
        body = json.dumps(schema, ensure_ascii=False)[1:-1]
        separator = ", " if body else ""
        parts.append(f'{NAMED}v{number}", "json_schema": {{{body}{separator}"x-guidance": {options}}}}}')
    return f'{{"grammars": [{", ".join(parts)}]}}'


@cache
def make_options(whitespace: str, has_open_names: bool) -> str:
    """Return, as JSON, how llguidance is to write JSON."""
    item_separator, key_separator = SEPARATORS[whitespace]
    options = {**_OPTIONS, "item_separator": item_separator, "key_separator": key_separator}
    options["whitespace_flexible"] = whitespace == "any"
    if whitespace == "any":
        options["whitespace_pattern"] = _WHITESPACE
    if has_open_names:
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    return json.dumps(options)


def rename_grammars(text: str, name: str) -> list[str]:
    """Return the grammars of a text that `make_json_grammar` wrote, the first one under a name, as parts of another."""
    decoder, start = json.JSONDecoder(), len('{"grammars": [')
    parts: list[str] = []
    while text[start] in "{,":
        start += 2 * (text[start] == ",")
        found, end = decoder.raw_decode(text, start)
        if not parts:
            lark = found["lark_grammar"].removeprefix(HEADER)
            parts.append(json.dumps({"name": name, "lark_grammar": re.sub(r"@v(\d+)", rf"@{name}v\1", lark)}))
        else:
            parts.append(f'{{"name": "{name}{text[start + len(NAMED) : end]}')
        start = end
    return parts
