"""Structural tags: accepted texts, tokens across their borders, and refusals."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import (
    GrammarCompiler,
    GrammarLimits,
    GrammarSpec,
    InvalidGrammar,
    PlanEntry,
    UnsupportedGrammar,
    Vocabulary,
)
from tests.grammar.vocabularies import (
    BYTES,
    CLOSED,
    SETTINGS,
    accepts,
    allowed_tokens,
    check_mask,
    check_texts,
)

EOS, CALL, PYTHON, OTHER = 256, 257, 258, 259
# Tokens that cross the borders of the tags below, in all the ways there are.
CROSSING = [
    *("<a", "<a>", "<a>x", ">x</", "x</a>", "</a>", "</a><", "a>b", "<t", "<t>{", ">{", '{"', '"}', '"}<'),
    *("}</", "}</t", "</t>", ">\n", "t>\n<t>", "}</t> so", "1}</t>", '":', ' "', '{"n"', ": 1", "12", "1}"),
    *("1<", "},", "}{", "[1]", "]<", "no", "n", "END", "E", "éE", "NDé", "é<", "<tool_call>", "\n{"),
    *('{"name": "', "}\n</tool_call>", "}}", "}}\n", "abend"),
]
VOCABULARY = Vocabulary(
    [*BYTES, b"<eos>", b"", b"", b"", *(text.encode() for text in CROSSING), b"\xc3", b"\xa9<", b""],
    [EOS],
    {"[CALL]": CALL, "<|python|>": PYTHON, "<eos>": EOS},
)
NUMBER = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {"type": "integer"}},
                                                "required": ["n"], "additionalProperties": False}}  # fmt: skip
A = {"type": "tag", "begin": "<a>", "content": {"type": "const_string", "value": "x"}, "end": "</a>"}
T = {"type": "tag", "begin": "<t>", "content": NUMBER, "end": "</t>"}
TEXT = {"type": "any_text"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [A, T]}


def const(text):
    return {"type": "const_string", "value": text}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(VOCABULARY)


def compile_format(compiler, part, **options):
    return compiler.compile(GrammarSpec.structural_tag({"type": "structural_tag", "format": part}, **options))


# Texts that xgrammar 0.2 accepts too, for the formats that it supports.
ACCEPTED = [
    (TRIGGERED, ["", "hi", "<a>x</a>", 'é<a>x</a>u<t>{"n": 1}</t>v'], ["<", "a<c", '<t>{"n": 1.5}</t>', "<a>x"]),
    (TRIGGERED | {"at_least_one": True}, ["<a>x</a>", '<a>x</a>t<t>{"n": 1}</t>'], ["", "hi", "t<a>x</a>"]),
    (TRIGGERED | {"stop_after_first": True}, ["", "hi", "t<a>x</a>"], ["t<a>x</a>t"]),
    (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, ["<a>x</a>"], ["", "<a>x</a>t", "t<a>x</a>"]),
    (TRIGGERED | {"excludes": ["no"]}, ["n", "<a>x</a>n"], ["ano", "<a>x</a>no"]),
    (TRIGGERED | {"tags": [{key: tag[key] for key in ("begin", "content", "end")} for tag in (A, T)]},
     ["hi<a>x</a>", 't<t>{"n": 1}</t>'], ["<a>y</a>"]),
    ({"type": "tags_with_separator", "tags": [A, T], "separator": ","},
     ["", "<a>x</a>", '<a>x</a>,<t>{"n": 1}</t>'], ["<a>x</a>,", "<a>x</a><a>x</a>"]),
    ({"type": "tags_with_separator", "tags": [A], "separator": ",", "at_least_one": True, "stop_after_first": True},
     ["<a>x</a>"], ["", "<a>x</a>,<a>x</a>"]),
    ({"type": "tag", "begin": "<t>", "content": TEXT, "end": "</t>"},
     ["<t>a</t>", "<t></t>"], ["<t>a</t>b</t>", "<t>a"]),
    ({"type": "tag", "begin": "<t>", "content": TEXT, "end": ["</t>", "!"]}, ["<t>a!", "<t>a</t>"], ["<t>a!!"]),
    ({"type": "tag", "begin": "<t>", "content": TRIGGERED, "end": "</t>"},
     ["<t>a</t>", "<t>a<a>x</a></t>"], ["<t>a<a>x</a>", "<t></t>a"]),
    (sequence(TEXT, const("END")), ["END", "abEND"], ["ab", "abENDc", "abENDcEND"]),
    (sequence(TEXT, A, {"type": "regex", "pattern": ".*"}, T),
     ['<a>x</a><t>{"n": 1}</t>', 'é<a>x</a>ab<t>{"n": 1}</t>'], ["<a>x</a>", '<a>y</a><t>{"n": 1}</t>']),
    (sequence({"type": "regex", "pattern": "[a-z]*"}, const("end")), ["abend", "end", "endend"], ["ab", "endx"]),
    (sequence({"type": "regex", "pattern": "[[&&~~]"}, const("end")), ["&end", "[end"], ["aend", "end"]),
    (sequence({"type": "optional", "content": A}, {"type": "star", "content": T}, const("!")),
     ["!", "<a>x</a>!", '<t>{"n": 1}</t><t>{"n": 2}</t>!'], ["", '<t>{"n": 1}</t><a>x</a>!']),
    ({"type": "repeat", "min": 1, "max": 2, "content": A}, ["<a>x</a>", "<a>x</a><a>x</a>"], ["", "<a>x</a>" * 3]),
    ({"type": "plus", "content": NUMBER}, ['{"n": 1}', '{"n": 1}{"n": 2}'], ["", '{"n": 1}{']),
    ({"type": "or", "elements": [A, T]}, ["<a>x</a>", '<t>{"n": 0}</t>'], ["", "<a>x</a><a>x</a>"]),
    ({"type": "dispatch", "rules": [["<a>", const("x")]]}, ["hi", "hi<a>xyo<a>x"], ["<a>y", "<a>"]),
    ({"type": "dispatch", "rules": [["<a>", const("x")]], "loop": False}, ["hi<a>x"], ["<a>xy"]),
    ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a", "ba"]),
]  # fmt: skip


@pytest.mark.parametrize(("part", "good", "bad"), ACCEPTED)
def test_formats_mean_what_they_mean_elsewhere(compiler, part, good, bad):
    check_texts(compiler, GrammarSpec.structural_tag({"format": part}), good, bad)


def takes(matcher, data):
    """Return, byte by byte, whether a text can be continued; the matcher is unchanged."""
    num_taken = 0
    for byte in data:
        if not matcher.accept_token(byte):
            break
        num_taken += 1
    matcher.rollback(num_taken)
    return num_taken == len(data)


@pytest.mark.parametrize(("part", "good", "bad"), ACCEPTED)
def test_a_token_is_allowed_exactly_where_its_bytes_are(compiler, part, good, bad):
    """Over tokens that cross every border there is, the mask and the matcher agree with single bytes."""
    compiled = compile_format(compiler, part)
    for text in good:
        matcher = compiled.matcher()
        for byte in [*text.encode(), None]:
            allowed = set(allowed_tokens(matcher, VOCABULARY))
            for token_id in range(260, VOCABULARY.size - 1):
                expected = takes(matcher, VOCABULARY.token_bytes[token_id])
                assert (token_id in allowed) == expected, (text, byte, VOCABULARY.token_bytes[token_id])
                assert matcher.accept_token(token_id) == expected
                matcher.rollback(int(expected))
            assert byte is None or matcher.accept_token(byte)


def formats():
    leaves = st.sampled_from([
        const("n"), const("12"), NUMBER,
        {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "string"}, "maxItems": 1}},
        {"type": "regex", "pattern": "(ab)+c?"}, {"type": "json_schema", "json_schema": {"enum": [1, 12, "a"]}},
    ])  # fmt: skip

    def compose(inner):
        tag = st.builds(
            lambda content, begin: {"type": "tag", "begin": begin, "content": content, "end": "</t>"},
            inner, st.sampled_from(["<t>", "<a>"]),
        )  # fmt: skip
        return (
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: sequence(*parts))
            | st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"type": "or", "elements": parts})
            | st.sampled_from(["star", "plus", "optional"]).flatmap(
                lambda kind: inner.map(lambda content: {"type": kind, "content": content})
            )
            | st.lists(tag, min_size=1, max_size=2).map(
                lambda tags: {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
            )
            | tag
        )

    return st.recursive(leaves, compose, max_leaves=5)


@settings(SETTINGS, max_examples=60)
@given(part=formats(), seed=st.integers(0, 1000))
def test_random_formats_allow_exactly_the_tokens_whose_bytes_they_take(compiler, part, seed):
    try:
        compiled = compile_format(compiler, part)
    except (UnsupportedGrammar, InvalidGrammar):
        return
    matcher, rng = compiled.matcher(), random.Random(seed)
    for _ in range(12):
        allowed = [i for i in allowed_tokens(matcher, VOCABULARY) if i != EOS]
        if matcher.error or not allowed:
            assert matcher.error or matcher.is_completed()
            return
        for token_id in rng.sample(range(260, VOCABULARY.size - 1), 15):
            assert (token_id in allowed) == takes(matcher, VOCABULARY.token_bytes[token_id])
        assert matcher.accept_token(rng.choice(allowed))


def test_free_text_is_utf8_and_ends_between_characters(compiler):
    matcher = compile_format(compiler, TEXT).matcher()
    assert not matcher.accept_token(0x80) and not matcher.accept_token(0xFF)
    assert matcher.accept_token(0xC3) and not matcher.accept_token(EOS)
    assert set(allowed_tokens(matcher, VOCABULARY)) == {*range(0x80, 0xC0), VOCABULARY.token_bytes.index(b"\xa9<")}
    assert matcher.accept_token(0xA9) and matcher.accept_token(EOS)


def test_a_special_token_stands_for_its_name_in_a_tag_and_nowhere_else(compiler):
    tag = {"type": "tag", "begin": "[CALL]", "content": NUMBER, "end": "<|python|>"}
    matcher = compile_format(compiler, {"type": "triggered_tags", "triggers": ["[CALL]"], "tags": [tag]}).matcher()
    assert not {PYTHON, OTHER} & set(allowed_tokens(matcher, VOCABULARY))
    for token_id in (*b"so [CA", CALL, *b'{"n": 1}'):
        assert token_id in allowed_tokens(matcher, VOCABULARY)
        assert matcher.accept_token(token_id)
    assert not matcher.is_completed() and not matcher.accept_token(CALL)
    assert {PYTHON, ord("<")} == set(allowed_tokens(matcher, VOCABULARY)) - {
        VOCABULARY.token_bytes.index(b"<a")
    } & {PYTHON, ord("<"), OTHER}
    assert matcher.accept_token(PYTHON) and matcher.accept_token(EOS)
    matcher.rollback(2)
    assert all(matcher.accept_token(byte) for byte in b"<|python|>")


def test_the_older_form_is_the_same_grammar(compiler):
    legacy = {"structures": [{"begin": "<t>", "schema": NUMBER["json_schema"], "end": "</t>"}], "triggers": ["<t"]}
    spec = GrammarSpec.structural_tag(json.dumps(legacy))
    compiled = check_texts(compiler, spec, ['< <t>{"n": 1}</t>'], ['<t>{"n": "1"}</t>'])
    assert compiled.plan[0] == PlanEntry("/triggers", "triggers", "structural_tag")
    assert PlanEntry("/structures/0/schema/properties/n", "type", "llguidance") in compiled.plan


@pytest.mark.parametrize(
    ("part", "pointer", "keyword"),
    [
        (T | {"content": {"type": "json_schema", "json_schema": {"items": {"$dynamicRef": "#a"}}}},
         "/format/content/json_schema/items", "$dynamicRef"),
        (T | {"content": {"type": "json_schema", "json_schema": True, "style": "qwen_xml"}},
         "/format/content", "style"),
        (TEXT | {"max_chars": 5}, "/format", "max_chars"),
        ({"type": "any_tokens"}, "/format", "any_tokens"),
        (sequence(TEXT, NUMBER), "/format/elements/0", "any_text"),
        ({"type": "token", "token": CALL}, "/format", "token"),
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
        ([], "Expected `object`, got `array`"),
        ({"format": {"type": "any_text"}, "x": 1}, "unknown field `x`"),
        ({"format": {"type": "text"}}, "at /format/type: Invalid value 'text'; choose from"),
        ({"format": {"type": "sequence", "elements": [{"value": "a"}]}}, "elements/0: .* required field `type`; choos"),
        ({"format": TRIGGERED | {"tags": ["<a>"]}}, "at /format/tags/0: Expected `object`, got `str`"),
        ({"format": TRIGGERED | {"tags": [TEXT]}}, "at /format/tags/0/type: Invalid value 'any_text'"),
        ({"format": {"type": "tag", "begin": "<"}}, "at /format: .* missing required field `content`"),
        ({"format": TEXT | {"exclude": []}}, "unknown field `exclude`"),
        ({"format": TRIGGERED | {"triggers": []}}, "at /format/triggers: Expected `array` of length >= 1"),
        ({"format": TRIGGERED | {"triggers": ["<b"]}}, "0 triggers fit '<a>'"),
        ({"format": TRIGGERED | {"triggers": ["<", "<a"]}}, "2 triggers fit"),
        ({"format": TRIGGERED | {"triggers": ["<a>", "<t>", "a<t>x"]}}, "can never be written"),
        ({"format": A | {"begin": {"token": CALL}}}, "at /format/begin: Expected `str`, got `object`"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": A}}, "allow nothing"),
        ({"format": T | {"content": NUMBER | {"json_schema": {"type": "x"}}}}, "/format/content: .*/type"),
        ({"format": T | {"content": {"type": "regex", "pattern": "("}}}, "/format/content/pattern: "),
        ({"structures": [{"begin": "<t>"}], "triggers": ["<"]}, "at /structures/0: .* missing required field `schema`"),
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
        compile_format(GrammarCompiler(VOCABULARY, limits), sequence(NUMBER, const("!"), NUMBER))


def test_a_choice_of_patterns_is_one_lexeme(compiler):
    parts = [sequence({"type": "regex", "pattern": f"[a-z]*{i}?"}, const("!")) for i in range(20)]
    compiled = compile_format(compiler, sequence(const("a"), {"type": "or", "elements": parts}))
    assert accepts(compiled.matcher(), VOCABULARY, "aab17!")
    assert not accepts(compiled.matcher(), VOCABULARY, "aab171!")


NUMERAL = {"type": "json_schema", "json_schema": {"type": "integer"}}
PATTERN = {"type": "regex", "pattern": "[{]*"}


@pytest.mark.parametrize(
    ("part", "place"),
    [
        (sequence(NUMERAL, const("1")), "/elements/0"), (sequence(PATTERN, NUMBER), "/elements/0"),
        (sequence({"type": "grammar", "grammar": 'root ::= "a"'}, NUMBER), "/elements/0"),
        ({"type": "star", "content": {"type": "star", "content": TEXT}}, "/content/content"),
        ({"type": "plus", "content": A | {"content": PATTERN, "end": ""}}, "/content/content"),
        (A | {"end": ["", "!"]}, ""),
    ],
)  # fmt: skip
def test_a_part_of_which_nothing_marks_the_end_is_refused(compiler, part, place):
    with pytest.raises(UnsupportedGrammar) as refusal:
        compile_format(compiler, part)
    assert refusal.value.pointer == f"/format{place}"


def test_tokens_that_begin_and_complete_a_checked_value_are_checked_too():
    tokens = [*BYTES, b"<eos>", b"<t>[1, 1]", b"<t>[1, 2]", b">[1, 1]</t>", b"[1, 2", b" 2]</t><t>[2, 2]"]
    vocabulary = Vocabulary(tokens, [256])
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}
    tag = T | {"content": {"type": "json_schema", "json_schema": schema}}
    compiled = compile_format(GrammarCompiler(vocabulary), {"type": "plus", "content": tag})
    for text, wrong, right in [(b"", 257, 258), (b"<t", 259, None), (b"<t>", 257, 260), (b"<t>[1,", 261, None)]:
        matcher = compiled.matcher()
        assert all(map(matcher.accept_token, text))
        allowed = allowed_tokens(matcher, vocabulary)
        assert wrong not in allowed and (right is None or right in allowed)
        assert not matcher.accept_token(wrong)
        if right is not None:
            assert matcher.accept_token(right)
            matcher.rollback(1)
        assert allowed_tokens(matcher, vocabulary) == allowed


def test_each_of_two_checked_values_is_checked(compiler):
    many = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    word = {"type": "regex", "pattern": "(ab)+c?"}
    compiled = compile_format(compiler, sequence(const("12"), many, word, const(":"), many))
    assert accepts(compiled.matcher(), VOCABULARY, "12[1]abababc:[2]")
    assert not accepts(compiled.matcher(), VOCABULARY, "12[1]abab:[2, 2]")


ENDS = [("</t>", {*b"<"}), ("<|python|>", {*b"<", PYTHON}), (["!", "</t>"], {*b"<!"})]


@pytest.mark.parametrize(("end", "firsts"), ENDS)
def test_a_text_in_a_tag_has_at_most_so_many_tokens(compiler, end, firsts):
    part = {"type": "tag", "begin": "<t>", "content": TEXT | {"max_tokens": 3}, "end": end}
    compiled = compile_format(compiler, sequence(const("a"), part))
    for start in (b"abc", b"a", "é".encode(), "日".encode(), b"ab\xc3"):
        matcher = compiled.matcher()
        assert all(map(matcher.accept_token, b"a<t>" + start + b"x" * (3 - len(start))))
        allowed = {i for i in check_mask(matcher, VOCABULARY) if i < 260}
        if start.endswith(b"\xc3"):
            assert allowed == {*range(0x80, 0xC0)} and matcher.accept_token(0xA9)
            allowed = {i for i in check_mask(matcher, VOCABULARY) if i < 260}
        assert allowed == firsts
        text = (end if isinstance(end, str) else end[0]).encode()
        assert all(map(matcher.accept_token, text)) and matcher.is_completed()
    short = compiled.matcher()
    assert all(map(short.accept_token, b"a<t>" + (end if isinstance(end, str) else end[1]).encode()))


def test_an_answer_may_be_a_text_of_so_many_tokens(compiler):
    matcher = compile_format(compiler, TEXT | {"max_tokens": 2}).matcher()
    assert all(map(matcher.accept_token, b"ab")) and check_mask(matcher, VOCABULARY) == {EOS}


FREE_TEXT = [["<tool_call>"], ["]", "<a>"], ['{"name": "', "<|x|>"], ["aab"], ["aa", "ba"], ["é!", "!?"]]


@pytest.mark.parametrize("patterns", FREE_TEXT)
def test_free_text_ends_at_its_first_pattern_in_every_form(compiler, patterns):
    """Compared with a search for the first pattern, over texts that hold whole and broken ones."""
    rules = [[pattern, const(str(number))] for number, pattern in enumerate(patterns)]
    compiled = compile_format(compiler, {"type": "dispatch", "rules": rules, "loop": True})
    pieces = [*patterns, *(p[:at] for p in patterns for at in range(1, len(p))), "x", "0", "1", "é", "\n"]
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 6)))
        assert accepts(compiled.matcher(), VOCABULARY, text) == follows(text, patterns), text


def follows(text, patterns):
    """Return whether each pattern that is found first is followed by its number."""
    while True:
        ends = [(text.find(each) + len(each), number) for number, each in enumerate(patterns) if each in text]
        if not ends:
            return True
        end, number = min(ends)
        if not text.startswith(str(number), end):
            return False
        text = text[end + 1 :]


@pytest.mark.parametrize("any_order", [False, True])
def test_a_property_may_have_the_name_that_a_grammar_gives_a_value(compiler, any_order):
    names = ["@v0", "@v1"]
    schema = {**CLOSED, "properties": {name: {"type": "null"} for name in names}, "required": names}
    value = {"type": "json_schema", "json_schema": schema, "any_order": any_order}
    compiled = compile_format(compiler, {"type": "tag", "begin": "<a>", "content": value, "end": "</a>"})
    text = f"<a>{json.dumps(dict.fromkeys(names))}</a>"
    assert accepts(compiled.matcher(), VOCABULARY, text)
    assert not accepts(compiled.matcher(), VOCABULARY, text.replace("@v1", "@v0v1"))
