"""Regular expressions, and languages that several engines read: all agree, and Python's re with them."""

import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import GrammarSpec
from tests.grammar.vocabularies import SETTINGS, accepts, allowed_tokens

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


def matches(compiler, pattern, text, backend):
    compiled = compiler.compile(GrammarSpec.regex(pattern, backend=backend))
    return accepts(compiled.matcher(), compiler.vocabulary, text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_engines_and_pythons_re_agree(byte_compiler, pattern):
    for text in TEXTS:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(byte_compiler, pattern, text, "llguidance") == expected, text


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


# The end marker of engines/by_name.py, which it cannot write.
MARKER = 3
def patterns() -> st.SearchStrategy[str]:
    atoms = [
        *("a", "the", "é", "日", "[a-z]", "[^a-y]", "[0-9]", r"\d", r"[\w.]", r"\.", ".", "[é-日]", "ab|abc"),
        *("(?:true|false)", "[aeiou]{2}", "0+", "x*?", r"[^\s]", "(?P<n>in|ing)", r"\x41", r"\u00e9", "😀?"),
    ]

    def compose(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        repeat = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"])
        return (
            st.builds("(?:{}|{})".format, inner, inner)
            | st.builds("(?:{})(?:{})".format, inner, inner)
            | st.builds("(?:{}){}".format, inner, repeat)
        )

    # A name may stand only once in a pattern.
    return st.recursive(st.sampled_from(atoms), compose, max_leaves=5).filter(lambda p: p.count("?P<n>") <= 1)


def walk_together(compiler, specs, rng, num_steps=12):
    """Take random tokens that the first engine allows; all engines allow the same. Returns the text and its end."""
    matchers = [compiler.compile(spec).matcher() for spec in specs]
    vocabulary, text = compiler.vocabulary, b""
    for _ in range(num_steps):
        masks = [[i for i in allowed_tokens(matcher, vocabulary) if i != MARKER] for matcher in matchers]
        assert all(mask == masks[0] for mask in masks), text
        going_on = [token_id for token_id in masks[0] if token_id not in vocabulary.eos_token_ids]
        if not going_on:
            break
        token_id = rng.choice(going_on)
        assert all(matcher.accept_token(token_id) for matcher in matchers)
        text += vocabulary.token_bytes[token_id]
    (is_completed,) = {matcher.is_completed() for matcher in matchers}
    return text, is_completed


@settings(SETTINGS, max_examples=60)
@given(
    pattern=patterns() | st.sampled_from(PATTERNS), seed=st.integers(0, 999),
    texts=st.lists(st.text("abcé.0日", max_size=6), min_size=6, max_size=6),
)
def test_engines_allow_the_same_tokens_and_end_where_pythons_re_matches(merged_compiler, pattern, seed, texts):
    """The pattern alone in a structural tag is the pattern too."""
    for backend, written in itertools.product((None, "llguidance"), texts):
        expected = re.fullmatch(pattern, written) is not None
        assert matches(merged_compiler, pattern, written, backend) == expected, written
    tag = {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": pattern}, "end": ""}
    specs = [GrammarSpec.regex(pattern), GrammarSpec.regex(pattern, backend="llguidance")]
    specs.append(GrammarSpec.structural_tag({"type": "structural_tag", "format": tag}))
    text, is_completed = walk_together(merged_compiler, specs, random.Random(seed))
    try:
        whole = text.decode()
    except UnicodeDecodeError:
        assert not is_completed
        return
    assert is_completed == (re.fullmatch(pattern, whole) is not None), whole


@settings(SETTINGS, max_examples=40)
@given(
    choices=st.lists(st.text('abein tré日.|("', min_size=1, max_size=8), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_choice_is_the_same_as_regex_lark_and_enum(merged_compiler, choices, seed):
    lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    specs = [
        GrammarSpec.choice(choices), GrammarSpec.choice(choices, backend="llguidance"),
        GrammarSpec.regex("|".join(re.escape(choice).replace(r"\ ", " ") for choice in choices)),
        GrammarSpec.lark(lark),
    ]
    text, is_completed = walk_together(merged_compiler, specs, random.Random(seed))
    assert is_completed == (text.decode(errors="replace") in choices)
