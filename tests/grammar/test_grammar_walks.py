"""Whatever random tokens the mask allows, the finished text is valid for the schema."""

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from grammar import GrammarSpec, InvalidGrammar, SchemaValidator, UnsupportedGrammar
from tests.grammar.schemas import OPEN_OBJECTS, SCHEMAS
from tests.grammar.vocabularies import SETTINGS, accepts, walk


def find_at(schema: Any, pointer: str) -> Any:
    """Follow a JSON pointer."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema


def is_finite(value: Any) -> bool:
    """Tell whether all numbers fit a double: JSON has 1e999, Python reads infinity."""
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def respell(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value with one more property in one of its objects, its name written with an escape."""
    objects = [value]
    for node in objects:
        objects.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
    for node in [node for node in objects if isinstance(node, dict)]:
        for name, added in itertools.product(["a", "b", "ab", "x y"], ["x", 7.5, None, {}]):
            node["@"] = added
            text = json.dumps(value, ensure_ascii=False)
            yield text.replace('"@"', f'"\\u{ord(name[0]):04x}{name[1:]}"')
        del node["@"]


def make_spec(schema: Any, **options: Any) -> GrammarSpec | None:
    """Return the spec, None for the malformed ones among the random schemas."""
    try:
        return GrammarSpec.json_schema(schema, **options)
    except InvalidGrammar:
        return None


@pytest.mark.parametrize(
    "options",
    [{"whitespace": "spaced"}, {"whitespace": "compact"}, {"whitespace": "any"}, {"backend": "xgrammar"}],
    ids=lambda options: "-".join(options.values()),
)
@settings(SETTINGS, max_examples=150)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_a_schema_allows_is_valid_and_what_it_refuses_is_named(merged_compiler, options, schema, seed):
    spec = make_spec(schema, **options)
    if spec is None:
        return event("malformed")
    try:
        compiled = merged_compiler.compile(spec)
    except UnsupportedGrammar as refusal:
        assert "backend" in options or refusal.keyword in find_at(schema, refusal.pointer), refusal
        return event(f"refused: {refusal.keyword}")
    except InvalidGrammar as error:
        assert re.search("no text satisfies|first token|cannot be compiled", str(error))
        return event("contradiction")
    event(compiled.backend)
    text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), num_free=25)
    if text is None or not is_finite(value := json.loads(text)):
        return event("unfinished or infinite")
    assert SchemaValidator(schema).first_error(value) is None, (text, compiled.backend)
    return None


@settings(SETTINGS, max_examples=150)
@given(schema=OPEN_OBJECTS, seed=st.integers(0, 2**32))
def test_a_listed_name_cannot_be_written_again_with_an_escape(merged_compiler, schema, seed):
    try:
        compiled = merged_compiler.compile(GrammarSpec.json_schema(schema))
    except (UnsupportedGrammar, InvalidGrammar):
        return
    text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), num_free=15)
    for respelt in respell(json.loads(text)) if text is not None else ():
        if accepts(compiled.matcher(), merged_compiler.vocabulary, respelt):
            assert SchemaValidator(schema).first_error(json.loads(respelt)) is None, respelt
