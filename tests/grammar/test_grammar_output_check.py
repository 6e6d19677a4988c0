"""The check after the end agrees with the grammars on what they let through, and finds what they would not."""

import random
import time

import pytest

from grammar import GrammarSpec, OutputCheck
from tests.grammar.vocabularies import walk

SPECS = {
    "json_schema": (GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
                    "[1, 2]", ["[1, 1]", "[1", '["a"]']),
    "json_object": (GrammarSpec.json_object(), '{"a": 1}', ["[]", "{"]),
    "regex": (GrammarSpec.regex(r"[a-c]+(\.[0-9]{2})?"), "ab.12", ["ab.1", "d", "ab\n"]),
    "choice": (GrammarSpec.choice(["yes", "no"]), "yes", ["ye", "maybe", ""]),
    "csv": (GrammarSpec.csv({"s, t": "string", "n": "integer", "k": ["a", 'b"']}), '"s, t",n,k\n"x,y",1,"b"""\n,-2,a',
            ["s,n,k", '"s, t",n,k\nx,1', '"s, t",n,k\nx,1.5,a', '"s, t",n,k\nx,1,c', '"s, t",n,k\n"x,1,a']),
    "csv without quotes": (GrammarSpec.csv({"n": "number", "d": "date"}, False, ";", False),
                           "1.5;2024-02-29", ["1.5;2023-02-29", "1,2024-02-29", "1.5"]),
    "xml": (GrammarSpec.xml({"name": "a", "children": [{"name": "b", "text": "integer", "max": 2}]}), "<a><b>1</b></a>",
            ["<a/>", "<a><b>x</b></a>", "<a>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_good_texts_pass_and_others_are_told_why_not(name):
    spec, good, bad = SPECS[name]
    check = OutputCheck(spec)
    assert check.checks and check.first_error(good) is None
    assert all(check.first_error(text) for text in bad)


@pytest.mark.parametrize("name", SPECS)
def test_whatever_a_grammar_lets_through_passes(merged_compiler, name):
    spec, check = SPECS[name][0], OutputCheck(SPECS[name][0])
    for seed in range(6):
        matcher = merged_compiler.compile(spec).matcher()
        text = walk(matcher, merged_compiler.vocabulary, random.Random(seed), num_free=20)
        assert text is None or check.first_error(text.decode()) is None, text


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.ebnf('root ::= "a"'),
        GrammarSpec.lark('start: "a"'),
        GrammarSpec.regex(r"\p{Lu}+"),
        GrammarSpec.regex("[a&&b]"),
        GrammarSpec.structural_tag({"format": {"type": "any_text"}}),
    ],
    ids=lambda spec: spec.kind,
)
def test_what_cannot_be_read_otherwise_is_said_not_to_be_checked(spec):
    check = OutputCheck(spec)
    assert not check.checks and check.first_error("anything") is None


@pytest.mark.parametrize("pattern", ["(a+)+b", "(.*a){30}", "(?:a|a)*b"])
def test_a_hostile_pattern_is_checked_in_no_time(pattern):
    text = "a" * 20 + "!" * 20_000
    tree = GrammarSpec.xml({"name": "a", "text": {"pattern": pattern}})
    for spec, written in ((GrammarSpec.regex(pattern), text), (tree, f"<a>{text}</a>")):
        start = time.process_time()
        assert OutputCheck(spec).first_error(written) is not None
        assert time.process_time() - start < 2, "it went back and tried again"


def test_beyond_ascii_a_shorthand_is_not_judged():
    check = OutputCheck(GrammarSpec.regex(r"\d+"))
    assert check.first_error("12") is None and check.first_error("x") is not None
    assert check.first_error("\u0661") is None  # a digit to the engines, none to JSON Schema
