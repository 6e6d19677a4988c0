"""Random walks over generated schemas with residual keywords: dead ends, and texts that are not valid.

    python -m tests.measure.dead_ends [--num 4000]

The schemas and the walks are the same each time. Printed are the counts; the exit status is 1 for an invalid text.
"""

import argparse
import json
from collections import Counter
from random import Random
from typing import Any

from grammar import GrammarCompiler, GrammarError, GrammarSpec, SchemaValidator
from tests.grammar.vocabularies import make_merged_vocabulary, walk

NAMES = ["a", "b", "ab", "c"]
VALUES = [{"const": "in"}, {"const": 1}, {"type": "null"}, {"maximum": 4}, {"enum": ["in", "x"]}]
SCALARS = [
    *({"type": name} for name in ("string", "boolean", "number", "integer")),
    {"type": ["string", "null"]},
    {"enum": ["in", "out", 1]},
    {"enum": ["x", None, True]},
    {"const": "in"},
    {"type": "string", "pattern": "^(?!a)[a-c]{1,4}$"},
    {"type": "integer", "minimum": -2, "maximum": 9},
    {"type": "integer", "minimum": 0, "maximum": 30, "not": {"multipleOf": 2}},
    {"type": "integer", "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    {"type": "string", "not": {"enum": ["in", "out"]}},
    {"oneOf": [{"type": ["string", "null"]}, {"enum": ["in", None]}]},
    {"not": {"type": ["null", "object"]}},
]


def make_condition(rng: Random) -> dict[str, Any]:
    """Return what an `if`, a `not` or a branch of `oneOf` asks of an object."""
    name = rng.choice(NAMES)
    required = {"required": rng.sample(NAMES, rng.randint(1, 2))}
    value = {"properties": {name: rng.choice(VALUES)}}
    return rng.choice([required, value, {**value, "required": [name]}])


def make_demand(rng: Random) -> dict[str, Any]:
    """Return what a condition may demand of an object."""
    name = rng.choice(NAMES)
    demands = [
        {"required": [name]}, {"properties": {name: rng.choice(SCALARS)}}, {"not": {"required": [name]}},
    ]
    return rng.choice(demands)


def make_object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    schema = {"type": "object", "properties": {name: make_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.6:
        schema["additionalProperties"] = False
    if rng.random() < 0.4:
        schema["required"] = names[:1]
    keywords: list[dict[str, Any]] = [
        {"if": make_condition(rng), "then": make_demand(rng), "else": make_demand(rng)},
        {"dependentRequired": {rng.choice(NAMES): [rng.choice(NAMES)]}},
        {"dependentSchemas": {rng.choice(NAMES): make_demand(rng)}},
        {"not": make_condition(rng)},
        {"oneOf": [make_condition(rng) for _ in range(rng.randint(2, 3))]},
        {"minProperties": rng.randint(1, 3)},
        {"maxProperties": rng.randint(0, 2)},
        {"propertyNames": rng.choice([{"enum": NAMES[:2]}, {"pattern": "^[ab]"}, {"not": {"const": "a"}}])},
    ]
    return {**schema, **rng.choice(keywords), **rng.choice(keywords)}


def make_array(rng: Random, depth: int) -> dict[str, Any]:
    bounds = {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 5)}
    counts = {"minContains": rng.randint(0, 2), "maxContains": rng.randint(2, 3)}
    keywords = [{"uniqueItems": True}, {"contains": rng.choice(SCALARS), **counts}, {"not": {"maxItems": 0}}]
    return {"type": "array", "items": make_schema(rng, depth - 1), **bounds, **rng.choice(keywords)}


def make_schema(rng: Random, depth: int) -> dict[str, Any]:
    """Return a schema, nested at most so deep."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(SCALARS)
    return make_object(rng, depth) if rng.random() < 0.6 else make_array(rng, depth)


def count_walks(num: int, num_walks: int) -> Counter[str]:
    """Walk through so many schemas; the names of the counts say what is counted."""
    compiler, counts = GrammarCompiler(make_merged_vocabulary()), Counter[str]()
    for number in range(num):
        rng = Random(number)
        schema = make_object(rng, 2) if rng.random() < 0.6 else make_array(rng, 2)
        try:
            compiled = compiler.compile(GrammarSpec.json_schema(schema))
        except GrammarError:
            counts["schemas that nothing satisfies"] += 1
            continue
        matchers = [compiled.matcher() for _ in range(num_walks)]
        texts = [
            walk(matcher, compiler.vocabulary, Random(seed), 30, True)
            for seed, matcher in enumerate(matchers)
        ]
        validator = SchemaValidator(schema)
        finished = [json.loads(text) for text in texts if text is not None]
        counts["texts"] += len(finished)
        counts["invalid texts"] += sum(not validator.is_valid(value) for value in finished)
        counts["schemas with a dead end"] += any(matcher.error is not None for matcher in matchers)
    return counts


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=4000, help="schemas (4000)")
    options = parser.parse_args()
    counts = count_walks(options.num, num_walks=4)
    print(f"{options.num} schemas: {', '.join(f'{number} {name}' for name, number in counts.items())}")
    return int(counts["invalid texts"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
