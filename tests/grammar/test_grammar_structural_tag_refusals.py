"""Structural tags that are refused: malformed, beyond what is enforced, or too large."""

import pytest

from grammar import (
    GrammarCompiler,
    GrammarLimits,
    GrammarSpec,
    InvalidGrammar,
    UnsupportedGrammar,
    Vocabulary,
)
from tests.grammar.test_grammar_structural_tag import (
    EOS,
    NUMBER,
    TEXT,
    TRIGGERED,
    VOCABULARY,
    A,
    T,
    compile_format,
    const,
    sequence,
)
from tests.grammar.vocabularies import allowed_tokens


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(VOCABULARY, num_threads=1)
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    ("part", "pointer", "keyword"),
    [
        (T | {"content": {"type": "json_schema", "json_schema": {"items": {"$dynamicRef": "#a"}}}},
         "/format/content/json_schema/items", "$dynamicRef"),
        (T | {"content": {"type": "json_schema", "json_schema": True, "style": "qwen_xml"}},
         "/format/content", "style"),
        (TEXT | {"max_tokens": 5}, "/format", "max_tokens"),
        ({"type": "any_tokens"}, "/format", "any_tokens"),
        (sequence(TEXT, NUMBER), "/format/elements/1", "any_text"),
        (sequence({"type": "regex", "pattern": "a*"}, TEXT), "/format/elements/0", "regex"),
        ({"type": "star", "content": {"type": "json_schema", "json_schema": True}}, "/format/content", "json_schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_its_place(compiler, part, pointer, keyword):
    with pytest.raises(UnsupportedGrammar) as refusal:
        compile_format(compiler, part)
    assert (refusal.value.pointer, refusal.value.keyword) == (pointer, keyword)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ("{", "not valid JSON"),
        ([], "an object, not list"),
        ({"format": {"type": "any_text"}, "x": 1}, "unknown key 'x'"),
        ({"format": {"type": "text"}}, "has type 'text'; choose from"),
        ({"format": {"begin": "<"}}, "/format has no type; choose from"),
        ({"format": {"type": "sequence", "elements": [{"value": "a"}]}}, "/format/elements/0 has no type"),
        ({"format": TRIGGERED | {"tags": ["<a>"]}}, "the format at /format/tags/0 is str"),
        ({"format": TRIGGERED | {"tags": [TEXT]}}, "/format/tags/0 has type 'any_text'; a tag is wanted"),
        ({"format": {"type": "tag", "begin": "<"}}, "lacks 'content'"),
        ({"format": TEXT | {"exclude": []}}, "unknown field 'exclude'"),
        ({"format": TRIGGERED | {"triggers": []}}, "at least one"),
        ({"format": TRIGGERED | {"triggers": ["<b"]}}, "0 triggers fit '<a>'"),
        ({"format": TRIGGERED | {"triggers": ["<", "<a"]}}, "2 triggers fit"),
        ({"format": TRIGGERED | {"triggers": ["<a>", "<t>", "a<t>x"]}}, "can never be written"),
        ({"format": {"type": "token", "token": EOS}}, "no EOS"),
        ({"format": {"type": "token", "token": "missing"}}, "0 tokens 'missing'"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": A}}, "allow nothing"),
        ({"format": T | {"content": NUMBER | {"json_schema": {"type": "x"}}}}, "/format/content: .*/type"),
        ({"format": T | {"content": {"type": "regex", "pattern": "("}}}, "/format/content/pattern: "),
        ({"structures": [{"begin": "<t>"}], "triggers": ["<"]}, "/structures/0 "),
        ({"structures": [{"begin": "<t>", "schema": [], "end": ""}], "triggers": ["<"]}, "/structures/0/schema: "),
    ],
)  # fmt: skip
def test_a_malformed_structural_tag_is_invalid_and_says_where(compiler, tags, words):
    with pytest.raises(InvalidGrammar, match=words):
        compiler.compile(GrammarSpec.structural_tag(tags))


def test_hostile_tags_are_refused_within_limits(compiler):
    part = A
    for _ in range(200):
        part = {"type": "optional", "content": part}
    with pytest.raises(InvalidGrammar, match="levels"):
        compile_format(compiler, part)
    part = A
    for _ in range(4):
        part = {"type": "repeat", "min": 0, "max": 256, "content": part}
    with pytest.raises(InvalidGrammar, match="more than 20000 parts"):
        compile_format(compiler, part)


def test_values_that_take_too_long_together_are_refused():
    limits = GrammarLimits(max_tags_s=0.0)
    with pytest.raises(InvalidGrammar, match="more than 0 s to compile"):
        compile_format(
            GrammarCompiler(VOCABULARY, limits, num_threads=1), sequence(NUMBER, const("!"), NUMBER)
        )


def test_of_thousands_of_tokens_that_may_end_a_value_the_shortest_are_tried():
    """They are enough to write any text; trying all of them would make every other request wait."""
    part = sequence({"type": "regex", "pattern": "[0-9]*"}, const("e"))
    tokens = [bytes([byte]) for byte in range(256)] + [b"%de" % number for number in range(3000)] + [b""]
    vocabulary = Vocabulary(tokens, [len(tokens) - 1])
    matcher = compile_format(GrammarCompiler(vocabulary, num_threads=1), part).matcher()
    assert [i for i in allowed_tokens(matcher, vocabulary) if 256 <= i < 3256] == list(range(256, 256 + 512))
    for byte in b"2999e":
        assert matcher.accept_token(byte)
    assert matcher.is_completed()


def test_a_text_that_can_be_read_in_too_many_ways_is_given_up_with_a_reason(compiler):
    parts = [sequence({"type": "regex", "pattern": f"[a-z]*{i}?"}, const("!")) for i in range(20)]
    matcher = compile_format(compiler, sequence(const("a"), {"type": "or", "elements": parts})).matcher()
    assert matcher.accept_token(ord("a"))
    assert "more than 16 ways" in matcher.error
    assert allowed_tokens(matcher, VOCABULARY) == []
    matcher.rollback(1)
    assert matcher.error is None
