"""Regular expressions, and languages that several engines read: all agree, and Python's re with them."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import GrammarSpec, SchemaValidator
from grammar.output_check import OutputCheck
from tests.grammar.vocabularies import SETTINGS, accepts

PATTERNS = [
    *(r"\d+(\.\d+)?", "a(bc)?", "[a-z]+(, [a-z]+)*", ".*", "a.*é", "é+", "(ab)+", "(ab|abc)(c|d)?", "|a"),
    *("[^a]{1,3}", r"[^\n\"]*", "(a|b)*abb", "a{2,4}b{0,2}", "a{3}", "a{2,}", "(a*)*b", "x?y?z?", r"\x41\u00e9"),
    *(r"\w+@\w+\.com", "日(本|記)?", r"\[\]\{\}\(\)\\\.", r"[\]\-a]+", "(?P<year>[0-9]{4})-(?:0[1-9]|1[0-2])"),
    *("[^[]{1,2}", "[a&&b]+", "[a~~b]+", "[+--]", "[--a]", "[a-z&&[^b]]", "[]a-]+", "[^]a]"),
]
TEXTS = [
    *("", "a", "ab", "abc", "abcd", "abb", "aabb", "aab", "aaaa", "b", "1", "1.5", "12.50", "1.", "é", "éé"),
    *("aé", "a\né", "aaé", "cab, ab", "ab, ", "abab", "aba", "日", "日本", "日記", "日本本", "x", "xz", "zx"),
    *("Aé", "me@x.com", "me@x.co", "[]{}()\\.", "]-a", "2024-07", "2024-13", "\n", "bb\n", "0", "٣"),
    *("[", "[[", "&", "~", "+", ",", "-", "a]", "&]", "]a-"),
]


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_engine_and_pythons_re_agree(byte_compiler, pattern):
    compiled, check = byte_compiler.compile(GrammarSpec.regex(pattern)), OutputCheck(GrammarSpec.regex(pattern))
    for text in TEXTS:
        expected = re.fullmatch(pattern, text) is not None
        assert accepts(compiled.matcher(), byte_compiler.vocabulary, text) == expected, text
        assert check.is_valid(text) in (expected, None), text


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


SIGNS = {*"abAz0-[&~+,./\x01\b\0\r\u2028\x85\ufeffé٣😀"}
WORDS = {
    *("", "[a", "a]", "[[", "b]", "&]", ":]", "AA", "A0", "A&0", "AB1", "w-.", "//<", "/-<", "a{", "aa{", "a{,3}"),
    *("aa", "aaa", "ab", "a[b", "é ", "a{2, 3}"),
}
# The texts out of SIGNS and WORDS that Node 20 matches, under the flag u where that takes the pattern.
ECMA: dict[str, set[str]] = {
    r"[^[]{2}": {"a]", "b]", "&]", ":]", "AA", "A0", "é ", "a{", "aa", "ab"},
    r"[a-z[\]]{2}": {"[a", "a]", "[[", "b]", "aa", "ab"}, r"[A-Z&&0-9]{3}": {"A&0", "AB1"},
    r"[a~~b]": {"a", "b", "~"}, r"[+--]": {"-", "+", ","}, r"[--a]": {"a", "A", "0", "-", "[", ".", "/"},
    r"[a-z&&[^b]]": {"a]", "b]", "&]"}, r"[^&&]": SIGNS - {*"&"}, r"[[:alpha:]]": {"a]", ":]"},
    r"[\w-.]+": {"a", "b", "A", "z", "0", "-", ".", "AA", "A0", "AB1", "w-.", "aa", "aaa", "ab"},
    r"[a-\s]": {"a", "-", "\r", "\u2028", "\ufeff"}, r"[]?": {""}, r"a[]|b": {"b"}, r"[^]": SIGNS - {*""},
    r"\cA": {"\x01"}, r"[\cA\b\0]": {"\x01", "\x08", "\x00"}, r"\ud83d\ude00": {"😀"},
    r"\u{1F600}|[\u{41}]": {"A", "😀"}, r"\u0041\x41": {"AA"}, r"\/[\/\-]\<": {"//<", "/-<"}, r"a{": {"a{"},
    r"a{,3}": {"a{,3}"}, r"a{2, 3}": {"a{2, 3}"}, r"a{2}{": {"aa{"}, r".": SIGNS - {*"\r\u2028"},
    r"[^\s]": SIGNS - {*"\r\u2028\ufeff"}, r"\S[\s]": {"é "}, r"[^\W]|[^\D]": {"a", "b", "A", "z", "0"},
    r"\p{Lu}[\P{L}]": {"A0"}, r"(?:^a|b$)": {"a", "b"}, r"(?<n>a)b": {"ab"}, r"(?=a[[]).*": {"a[b"},
    r"(?![[&&]).": SIGNS - {*"[&\r\u2028"}, r"(?!a)[[&&]": {"[", "&"},
}


@pytest.mark.parametrize("pattern", ECMA)
def test_patterns_of_schemas_mean_what_they_mean_in_ecma_262(byte_compiler, pattern):
    schemas = [
        {"type": "string", "pattern": f"^(?:{pattern})$"},
        # As a check, beside a list, in names, and after a look-ahead.
        {"not": {"not": {"type": "string", "pattern": f"^(?:{pattern})$"}}},
        {"enum": sorted(SIGNS | WORDS), "pattern": f"^(?:{pattern})$"},
        {"type": "string", "pattern": f"^(?=(?:{pattern})$)"},
        {"patternProperties": {f"^(?:{pattern})$": {"type": "null"}}, "additionalProperties": False},
    ]
    for number, schema in enumerate(schemas):
        compiled, validator = byte_compiler.compile(GrammarSpec.json_schema(schema)), SchemaValidator(schema)
        is_first = number == 0 and "(?" not in pattern
        assert not is_first or "residual" not in {entry.enforced_by for entry in compiled.plan}
        for text in sorted(SIGNS | WORDS):
            if number == 4 and text in ("\x01", "\0"):
                continue  # Names with long escapes are not written.
            value = {text: None} if number == 4 else text
            found = validator.is_valid(value), accepts(
                compiled.matcher(), byte_compiler.vocabulary, json.dumps(value, ensure_ascii=False)
            )
            assert found == (text in ECMA[pattern],) * 2, (schema, text)
