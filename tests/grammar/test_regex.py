"""Regular expressions, and languages that several engines read: all agree, and Python's re with them."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import GrammarSpec
from tests.grammar.vocabularies import SETTINGS, accepts

PATTERNS = [
    *(r"\d+(\.\d+)?", "a(bc)?", "[a-z]+(, [a-z]+)*", ".*", "a.*é", "é+", "(ab)+", "(ab|abc)(c|d)?", "|a"),
    *("[^a]{1,3}", r"[^\n\"]*", "(a|b)*abb", "a{2,4}b{0,2}", "a{3}", "a{2,}", "(a*)*b", "x?y?z?", r"\x41\u00e9"),
    *(r"\w+@\w+\.com", "日(本|記)?", r"\[\]\{\}\(\)\\\.", r"[\]\-a]+", "(?P<year>[0-9]{4})-(?:0[1-9]|1[0-2])"),
]
TEXTS = [
    *("", "a", "ab", "abc", "abcd", "abb", "aabb", "aab", "aaaa", "b", "1", "1.5", "12.50", "1.", "é", "éé"),
    *("aé", "a\né", "aaé", "cab, ab", "ab, ", "abab", "aba", "日", "日本", "日記", "日本本", "x", "xz", "zx"),
    *("Aé", "me@x.com", "me@x.co", "[]{}()\\.", "]-a", "2024-07", "2024-13", "\n", "bb\n", "0", "٣"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_engine_and_pythons_re_agree(byte_compiler, pattern):
    compiled = byte_compiler.compile(GrammarSpec.regex(pattern))
    for text in TEXTS:
        expected = re.fullmatch(pattern, text) is not None
        assert accepts(compiled.matcher(), byte_compiler.vocabulary, text) == expected, text


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (GrammarSpec.regex("[0-9]{4}"), "llguidance"), (GrammarSpec.choice(["yes", "no"]), "outlines_core"),
        (GrammarSpec.choice(["a\x03"]), "llguidance"),
        (GrammarSpec.choice([f"text {number}" for number in range(2_000)]), "llguidance"),
    ],
)
def test_small_choices_go_to_outlines_and_all_else_to_llguidance(byte_compiler, spec, backend):
    assert byte_compiler.compile(spec).backend == backend


@settings(SETTINGS, max_examples=40)
@given(choices=st.lists(st.text('abein tré日.|("', min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_choice_is_the_same_as_regex_lark_and_enum(merged_compiler, choices):
    lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    specs = [
        GrammarSpec.choice(choices), GrammarSpec.choice(choices, backend="llguidance"), GrammarSpec.lark(lark),
        GrammarSpec.regex("|".join(re.escape(choice).replace(r"\ ", " ") for choice in choices)),
    ]
    for text in {*choices, *(choice[:-1] for choice in choices), *(choice + "a" for choice in choices)}:
        for spec in specs:
            matcher = merged_compiler.compile(spec).matcher()
            assert accepts(matcher, merged_compiler.vocabulary, text) == (text in choices), (spec.kind, text)
