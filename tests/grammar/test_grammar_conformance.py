"""The official JSON Schema test suite, draft 2020-12: nothing invalid is accepted unless it was refused."""

import json
from collections import Counter
from pathlib import Path

import pytest

from grammar import GrammarError, GrammarSpec
from tests.grammar.vocabularies import accepts

SUITE = Path(__file__).parents[2].parent / "shared" / "data" / "json_schema_test_suite" / "draft2020-12"
FILES = sorted(SUITE.glob("*.json"))

pytestmark = pytest.mark.skipif(not FILES, reason="the JSON-Schema-Test-Suite is not beside the repository")
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":")}


def judge(compiler, group):
    """Return (kind, description) of each test of a group."""
    try:
        compiled = {ws: compiler.compile(GrammarSpec.json_schema(group["schema"], ws)) for ws in SEPARATORS}
    except GrammarError:
        return [("refused group", group["description"])]
    results = []
    for test in group["tests"]:
        texts = {
            ws: json.dumps(test["data"], separators=s, ensure_ascii=False) for ws, s in SEPARATORS.items()
        }
        found = {accepts(compiled[ws].matcher(), compiler.vocabulary, text) for ws, text in texts.items()}
        assert len(found) == 1, "whitespace alone made a difference"
        kind = "correct" if found == {test["valid"]} else "too permissive" if True in found else "too strict"
        results.append((kind, f"{group['description']}: {test['description']}"))
    return results


def test_no_schema_accepts_an_invalid_instance(byte_compiler, capsys):
    results = [
        (file.stem, kind, description)
        for file in FILES
        for group in json.loads(file.read_text())
        for kind, description in judge(byte_compiler, group)
    ]
    counts = Counter(kind for _, kind, _ in results)
    with capsys.disabled():
        print(f"\nJSON-Schema-Test-Suite 2020-12: {dict(counts)}")
    assert [result for result in results if result[1] == "too permissive"] == []
    assert counts["correct"] >= 1150
