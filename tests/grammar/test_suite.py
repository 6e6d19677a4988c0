"""The JSON-Schema-Test-Suite, draft 2020-12: no invalid instance is accepted, and no fewer tests come out right."""

import json
from collections import Counter
from pathlib import Path

import pytest

from grammar import GrammarError, GrammarSpec
from tests.grammar.vocabularies import accepts

SUITE = Path(__file__).parents[2].parent / "shared" / "data" / "json_schema_test_suite" / "draft2020-12"
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":")}


def judge(test, compiled, vocabulary):
    """Return how a test comes out; in each spelling, every byte of an instance has to be accepted, and its end."""
    verdicts = {
        accepts(each.matcher(), vocabulary, json.dumps(test["data"], separators=separators, ensure_ascii=False))
        for each, separators in zip(compiled, SEPARATORS.values(), strict=True)
    }
    return "right" if verdicts == {test["valid"]} else "valid refused" if test["valid"] else "invalid accepted"


@pytest.mark.skipif(not any(SUITE.glob("*.json")), reason="the JSON-Schema-Test-Suite is not beside the repository")
def test_no_schema_accepts_an_invalid_instance(byte_compiler):
    counts = Counter()
    # The optional tests lie in folders.
    for group in (group for path in sorted(SUITE.glob("*.json")) for group in json.loads(path.read_text("utf-8"))):
        try:
            compiled = [byte_compiler.compile(GrammarSpec.json_schema(group["schema"], each)) for each in SEPARATORS]
        except GrammarError:
            counts["schema refused"] += len(group["tests"])
            continue
        for test in group["tests"]:
            outcome = judge(test, compiled, byte_compiler.vocabulary)
            assert outcome != "invalid accepted", (group["description"], test["description"])
            counts[outcome] += 1
    # Of the others 18 belong to schemas that forbid everything, which are refused.
    assert counts["right"] >= 1197, counts
