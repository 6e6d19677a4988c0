"""The same language from several engines: walks over whole tokens, held against each other and against Python's re."""

import json
import random
import re

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import GrammarCompiler, GrammarSpec, InvalidGrammar, UnsupportedGrammar
from tests.grammar.schemas import NAMES, OPEN_OBJECTS
from tests.grammar.test_grammar_regex import PATTERNS
from tests.grammar.test_grammar_structural_tag import ACCEPTED, VOCABULARY
from tests.grammar.vocabularies import SETTINGS, accepts, allowed_tokens

# The end marker of backends/outlines_backend.py, which it cannot write.
MARKER = 3
VALUES = ["1", '"x"', "null", "{}", "[]", "2.5"]


def patterns() -> st.SearchStrategy[str]:
    """Patterns whose meaning Python and Rust share, over what the merged vocabulary has tokens for."""
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
@given(pattern=patterns(), seed=st.integers(0, 999))
def test_engines_allow_the_same_tokens_and_end_where_pythons_re_matches(merged_compiler, pattern, seed):
    specs = [GrammarSpec.regex(pattern), GrammarSpec.regex(pattern, backend="llguidance")]
    text, is_completed = walk_together(merged_compiler, specs, random.Random(seed))
    try:
        whole = text.decode()
    except UnicodeDecodeError:
        assert not is_completed
        return
    assert is_completed == (re.fullmatch(pattern, whole) is not None), whole


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_listed_pattern_walks_alike(merged_compiler, pattern):
    specs = [GrammarSpec.regex(pattern), GrammarSpec.regex(pattern, backend="llguidance")]
    for seed in range(3):
        walk_together(merged_compiler, specs, random.Random(seed))


@settings(SETTINGS, max_examples=40)
@given(
    choices=st.lists(st.text("abein tré日", min_size=1, max_size=8), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_choice_is_the_same_as_regex_lark_and_enum(merged_compiler, choices, seed):
    lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    specs = [
        GrammarSpec.choice(choices),
        GrammarSpec.choice(choices, backend="llguidance"),
        GrammarSpec.regex("|".join(re.escape(choice).replace(r"\ ", " ") for choice in choices)),
        GrammarSpec.lark(lark),
    ]
    text, is_completed = walk_together(merged_compiler, specs, random.Random(seed))
    assert is_completed == (text.decode(errors="replace") in choices)


@settings(SETTINGS, max_examples=40)
@given(pattern=patterns(), seed=st.integers(0, 999))
def test_a_pattern_alone_in_a_structural_tag_is_the_pattern(merged_compiler, pattern, seed):
    alone = GrammarSpec.regex(pattern)
    tag = {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": pattern}, "end": ""}
    specs = [alone, GrammarSpec.structural_tag({"type": "structural_tag", "format": tag})]
    walk_together(merged_compiler, specs, random.Random(seed))


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_alone_in_a_structural_tag_is_the_schema(merged_compiler, seed):
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"]}
    tag = {"type": "json_schema", "json_schema": schema}
    specs = [
        GrammarSpec.json_schema(schema),
        GrammarSpec.structural_tag({"type": "structural_tag", "format": tag}),
    ]
    walk_together(merged_compiler, specs, random.Random(seed), num_steps=40)


@settings(SETTINGS, max_examples=40)
@given(schema=OPEN_OBJECTS, names=st.lists(NAMES, min_size=1, max_size=3), data=st.data())
def test_both_orders_of_properties_refuse_the_same_spellings_of_names(byte_compiler, schema, names, data):
    """Names with escapes for what needs none: in the order of the schema as in any order."""
    fields = [f'"\\u{ord(name[0]):04x}{name[1:]}": {data.draw(st.sampled_from(VALUES))}' for name in names]
    text = f"{{{', '.join(fields)}}}"
    for order in ("schema", "any"):
        try:
            compiled = byte_compiler.compile(GrammarSpec.json_schema(schema, property_order=order))
        except (UnsupportedGrammar, InvalidGrammar):
            continue
        assert not accepts(compiled.matcher(), byte_compiler.vocabulary, text), order


@pytest.mark.parametrize(("part", "good", "bad"), ACCEPTED)
def test_structural_tags_read_as_xgrammar_reads_them(part, good, bad):
    """Held against xgrammar's own structural tags, byte by byte: the same verdict at the same byte."""
    tokens = [*VOCABULARY.token_bytes[:256], b""]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256], add_prefix_space=False
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    tags = {"type": "structural_tag", "format": part}
    theirs = compiler.compile_structural_tag(xgrammar.StructuralTag.from_json(tags))
    ours = GrammarCompiler(VOCABULARY, num_threads=1).compile(GrammarSpec.structural_tag(tags))
    for text in [*good, *bad]:
        first, second = ours.matcher(), xgrammar.GrammarMatcher(theirs)
        for byte in text.encode():
            is_accepted = first.accept_token(byte)
            assert second.accept_token(byte) == is_accepted, text
            if not is_accepted:
                break
        else:
            assert second.is_completed() == first.is_completed() == (text in good), text
