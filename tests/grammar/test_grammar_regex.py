"""Regular expressions and choices: outlines-core, llguidance and Python's re agree."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar import GrammarSpec
from grammar.regex.size import estimate_num_states
from tests.grammar.vocabularies import SETTINGS, accepts

PATTERNS = [
    *(r"\d+(\.\d+)?", "a(bc)?", "[a-z]+(, [a-z]+)*", ".*", "a.*é", "é+", "(ab)+", "(ab|abc)(c|d)?"),
    *("[^a]{1,3}", r"[^\n\"]*", "(a|b)*abb", "a{2,4}b{0,2}", "a{3}", "a{2,}", "(a*)*b", "x?y?z?"),
    *(
        r"\w+@\w+\.com",
        "日(本|記)?",
        r"\[\]\{\}\(\)\\\.",
        r"[\]\-a]+",
        "(?P<year>[0-9]{4})-(?:0[1-9]|1[0-2])",
    ),
    *(r"\x41\u00e9", "|a"),
]
TEXTS = [
    *("", "a", "ab", "abc", "abcd", "abb", "aabb", "aab", "aaaa", "b", "1", "1.5", "12.50", "1.", "é", "éé"),
    *("aé", "a\né", "aaé", "cab, ab", "ab, ", "abab", "aba", "日", "日本", "日記", "日本本", "x", "xz", "zx"),
    *("Aé", "me@x.com", "me@x.co", "[]{}()\\.", "]-a", "2024-07", "2024-13", "\n", "bb\n", "0", "٣"),
]


def matches(compiler, pattern, text, backend):
    compiled = compiler.compile(GrammarSpec.regex(pattern, backend=backend))
    return accepts(compiled.matcher(), compiler.vocabulary, text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_engines_and_pythons_re_agree(byte_compiler, pattern):
    for text in TEXTS:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(byte_compiler, pattern, text, "outlines_core") == expected, text
        assert matches(byte_compiler, pattern, text, "llguidance") == expected, text


def atoms() -> st.SearchStrategy[str]:
    """Return patterns whose meaning Python and Rust share."""
    letters = st.sampled_from(["a", "b", "é", "[ab]", "[^a]", "[b-é]", ".", r"\.", "[a-c]"])

    def compose(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        repeat = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"])
        return (
            st.builds("({}|{})".format, inner, inner)
            | st.builds("{}{}".format, inner, inner)
            | st.builds("(?:{}){}".format, inner, repeat)
        )

    return st.recursive(letters, compose, max_leaves=6)


@SETTINGS
@given(pattern=atoms(), texts=st.lists(st.text("abcé.", max_size=6), min_size=6, max_size=6))
def test_random_patterns_mean_the_same_everywhere(byte_compiler, pattern, texts):
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(byte_compiler, pattern, text, None) == expected, text
        assert matches(byte_compiler, pattern, text, "llguidance") == expected, text


@pytest.mark.parametrize("backend", ["outlines_core", "llguidance"])
@SETTINGS
@given(choices=st.lists(st.text(max_size=5), min_size=1, max_size=5).filter(any))
def test_a_choice_accepts_its_texts_and_no_others(byte_compiler, backend, choices):
    choices = [choice for choice in choices if "\x03" not in choice]
    if not any(choices):
        return
    compiled = byte_compiler.compile(GrammarSpec.choice(choices, backend=backend))
    for choice in choices:
        for text in (choice, choice + "x", choice[:-1], "y" + choice):
            expected = text in choices
            assert accepts(compiled.matcher(), byte_compiler.vocabulary, text) == expected, text


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [
        (r"[0-9]{4}-[0-9]{2}", "outlines_core"),
        ("(a|b)+", "outlines_core"),
        ("^abc$", "llguidance"),
        ("(?i)abc", "llguidance"),
        (r"\p{Lu}+", "llguidance"),
        (r"a\x03b", "llguidance"),
        ("(a|b)*a(a|b){14}", "llguidance"),
        (".{0,5000}", "llguidance"),
    ],
)
def test_outlines_gets_what_it_can_build_and_llguidance_the_rest(byte_compiler, pattern, backend):
    assert byte_compiler.compile(GrammarSpec.regex(pattern)).backend == backend


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("abc", 4, 10),
        (".{0,50}", 500, 1_500),
        ("[a-z]{1,40}@[a-z]{1,40}", 80, 120),
        (r"\w{1,20}", 6_000, 8_000),
    ],
)
def test_the_size_estimate_is_of_the_right_order(pattern, least, most):
    assert least <= estimate_num_states(pattern, 100_000) <= most


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){14}", "a{2000}", "(?i)a", "^a", "[[:alpha:]]", "[a&&b]", "a\x03"]
)
def test_patterns_too_large_or_unknown_have_no_estimate(pattern):
    assert estimate_num_states(pattern, 100_000) is None
