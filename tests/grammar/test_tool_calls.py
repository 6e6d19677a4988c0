"""Tool calls as a grammar: whatever a model may write is a valid call, in each form, also where checks decide."""

import json
import random
import re
from typing import Any

import pytest

from app.api.tools.styled_calls import StyledCalls
from grammar import (
    GrammarCompiler,
    GrammarSpec,
    Matcher,
    SchemaValidator,
    ToolStyle,
    Vocabulary,
    find_tool_refusal,
    list_tool_styles,
    make_tool_spec,
)
from tests.effort import choose_count
from tests.grammar.vocabularies import (
    accepts,
    allowed_tokens,
    check_mask,
    make_byte_vocabulary,
    make_merged_vocabulary,
)

STYLES = list_tool_styles()
FORMS = ("hermes", "qwen3_coder", "glm45", "deepseek_v32", "seed_oss", "lfm2", "gemma4", "llama3_json", "openai")
TEXT_FORMS = ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32")
BYTES = make_byte_vocabulary()
MERGED = make_merged_vocabulary()
COMPILERS = {BYTES: GrammarCompiler(BYTES), MERGED: GrammarCompiler(MERGED)}


def read(style: str, schema: dict[str, Any], text: str) -> Any:
    parser = StyledCalls(STYLES[style], {"f": schema})
    pieces = [piece for piece in (*parser.feed(text), *parser.close()) if piece.call == 0]
    assert pieces, text
    return json.loads("".join(piece.text for piece in pieces))


def write(style: str, arguments: dict[str, str]) -> str:
    """Return a call of `f` with arguments as they are written."""
    form = STYLES[style]
    parts = [
        form.find_parameter(is_text=True).replace("{key}", key).replace("{value}", value)
        for key, value in arguments.items()
    ]
    return form.openings[0] + form.heads[0].replace("{name}", "f") + "".join(parts) + form.tail + form.end


def takes(style: str, schema: dict[str, Any], text: str, vocabulary: Vocabulary = BYTES) -> bool:
    spec = make_tool_spec(STYLES[style], [("f", schema)], is_forced=True)
    return accepts(COMPILERS[vocabulary].compile(spec).matcher(), vocabulary, text)


def make_object(child: Any, is_required: bool = True) -> dict[str, Any]:
    required = ["a"] if is_required else []
    return {"type": "object", "properties": {"a": child}, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("style", TEXT_FORMS)
@pytest.mark.parametrize(
    ("child", "rights", "wrongs"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb", "日本"], ["a", "abcd", ""]),
        ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
        ({"type": "string", "pattern": "^(?!x)"}, ["abc", "", "</"], ["xa"]),
        ({"type": "string", "pattern": "b.d"}, ["a bcd e"], ["b\nd", "bd"]),
        ({"type": "string", "format": "date"}, ["2026-11-28"], ["2026-13-01", "today"]),
        ({"type": "string", "format": "uri"}, ["https://a.b/c"], ["no uri at all"]),
        ({"type": "string", "not": {"enum": ["no"]}}, ["yes", "not"], ["no"]),
        ({"const": "only"}, ["only"], ["other"]),
    ],
)
def test_a_text_argument_keeps_to_its_schema_as_text(style: str, child: Any, rights: Any, wrongs: Any) -> None:
    schema = make_object(child)
    for vocabulary in (BYTES, MERGED):
        for text in rights:
            written = write(style, {"a": text})
            assert takes(style, schema, written, vocabulary), text
            assert read(style, schema, written) == {"a": text}
        assert not any(takes(style, schema, write(style, {"a": text}), vocabulary) for text in wrongs)


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    ("child", "meanings", "wrongs"),
    [
        ({"type": ["string", "null"]}, {"null": None, "None": None, "x": "x", "7": "7"}, []),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, {"123": 123, "ab": "ab"}, ["abc"]),
        ({"type": ["boolean", "string"]}, {"true": True, "False": False, "yes": "yes"}, []),
        ({"type": ["object", "string"], "minProperties": 1}, {'{"k": 1}': {"k": 1}, "{": "{"}, []),
        (True, {"1.5": 1.5, "[1]": [1], "text": "text"}, []),
        ({"anyOf": [{"type": "array", "uniqueItems": True}, {"const": "all"}]}, {"all": "all", "[1]": [1]}, ["[1, 1]"]),
    ],
)
def test_what_a_text_means_follows_the_schema(style: str, child: Any, meanings: Any, wrongs: Any) -> None:
    schema = make_object(child)
    for text, value in meanings.items():
        written = write(style, {"a": text})
        assert takes(style, schema, written)
        assert (found := read(style, schema, written)["a"]) == value and type(found) is type(value)
    assert not any(takes(style, schema, write(style, {"a": text})) for text in wrongs)


@pytest.mark.parametrize("style", TEXT_FORMS)
@pytest.mark.parametrize(
    ("more", "rights", "wrongs"),
    [
        ({"minProperties": 2}, [{"a": "x", "b": "1"}], [{"a": "x"}]),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"b": "1"}, {"a": "</function>"}], [{}]),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": "2"}, {"a": "x", "b": "3"}], [{"a": "x"}]),
        ({"patternProperties": {"^c": {"type": "integer"}}}, [{"c": "7"}], [{"c": "x"}]),
    ],
)
def test_keywords_about_all_arguments_are_checked_at_their_end(style: str, more: Any, rights: Any, wrongs: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["integer", "string"]}}, **more}
    if STYLES[style].other_parameter is None:
        assert all(takes(style, schema, write(style, each)) for each in rights)
        assert all(SchemaValidator(schema).is_valid(read(style, schema, write(style, each))) for each in rights)
    assert not any(takes(style, schema, write(style, each)) for each in wrongs)


@pytest.mark.parametrize("style", ["glm45", "qwen3_coder", "deepseek_v32"])
def test_texts_are_checked_where_their_marks_are_special_tokens(style: str) -> None:
    names = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜")
    specials = {name: 257 + number for number, name in enumerate(names)}
    vocabulary = Vocabulary([*BYTES.token_bytes[:256], b"<eos>", *[b""] * (len(names) + 1)], [256], specials)
    compiler = GrammarCompiler(vocabulary)
    for schema, right, wrong in (
        (make_object({"type": "string", "not": {"const": "no"}}), {"a": "yes"}, {"a": "no"}),
        (make_object({"type": "string", "maxLength": 3}), {"a": "yes"}, {"a": "long"}),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}, {"a": ""}, {}),
    ):
        spec = make_tool_spec(STYLES[style], [("f", schema)], is_forced=True)
        for arguments, is_right in ((right, True), (wrong, False)):
            parts = re.split(f"({'|'.join(map(re.escape, names))})", write(style, arguments))
            ids = [i for part in parts for i in ([specials[part]] if part in specials else part.encode())]
            matcher = compiler.compile(spec).matcher()
            assert (all(map(matcher.accept_token, ids)) and matcher.is_completed()) == is_right


HARD: dict[str, Any] = {
    "type": "object", "required": ["tags", "when"], "additionalProperties": False,
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "maxItems": 3},
        "when": {"type": "string", "pattern": "^[0-9]{2}$"}, "word": {"type": "string", "not": {"const": "no"}},
        "size": {"type": "number", "not": {"const": 3}}, "one": {"type": ["string", "null"], "maxLength": 4},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "$defs": {"deep": {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True, "maxItems": 2}}}},
}  # fmt: skip
EASY: dict[str, Any] = {
    "type": "object", "required": ["name"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string"}, "kind": {"enum": ["x y", "z"]}, "size": {"type": "integer", "maximum": 30},
        "on": {"type": "boolean"}, "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "map": {"type": "object", "properties": {"k": {"type": ["string", "null"]}}, "additionalProperties": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("style", FORMS)
@pytest.mark.parametrize("schema", [HARD, EASY], ids=["hard", "easy"])
def test_random_calls_are_valid(style: str, schema: dict[str, Any]) -> None:
    if find_tool_refusal(STYLES[style], schema) is not None:
        assert (style, schema) == ("gemma4", HARD)
        return
    spec, num_read = make_tool_spec(STYLES[style], [("f", schema)], is_forced=True, is_parallel=False), 0
    for seed in range(choose_count(6, 16)):
        vocabulary = (BYTES, MERGED)[seed % 2]
        compiled = COMPILERS[vocabulary].compile(spec)
        text = walk_to_end(compiled.matcher(), vocabulary, random.Random(seed), STYLES[style])
        if text is not None:
            assert SchemaValidator(schema).is_valid(read(style, schema, text)), text
            num_read += 1
    assert num_read > 1


def walk_to_end(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, form: ToolStyle) -> str | None:
    """Write a call by random tokens, with the marks behind values now and then; None for one that does not end."""
    after = "" if form.parameter is None else form.parameter.partition("{value}")[2]
    text, marks = b"", [mark.encode() for mark in (after, form.tail + form.end, '"', "'", form.quote) if mark]
    for _ in range(400):
        mark = rng.choice(marks)
        taken = next((at for at, byte in enumerate(mark) if not matcher.accept_token(byte)), len(mark))
        if taken == len(mark):
            text += mark
        else:
            matcher.rollback(taken)
            allowed = allowed_tokens(matcher, vocabulary)
            if not allowed:
                assert (matcher.error or "").startswith("dead end: no continuation satisfies")
                return None
            token_id = rng.choice(allowed)
            assert matcher.accept_token(token_id), (text, token_id)
            text += vocabulary.token_bytes[token_id]
        if matcher.is_completed() or matcher.is_terminated():
            return text.decode()
    return None


@pytest.mark.parametrize("style", ["hermes", "qwen3_coder"])
def test_masks_and_matcher_agree_beside_checked_values(style: str) -> None:
    # The bound of long numbers, and listed elements that are left, are facts of masks alone.
    properties = {name: child for name, child in HARD["properties"].items() if name not in ("size", "deep")}
    properties["tags"] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    spec = make_tool_spec(STYLES[style], [("f", HARD | {"properties": properties})])
    matcher, rng = COMPILERS[MERGED].compile(spec).matcher(), random.Random(5)
    opening = STYLES[style].openings[0] + STYLES[style].heads[0].replace("{name}", "f")
    for byte in opening.encode():
        assert matcher.accept_token(byte)
    for _ in range(choose_count(40, 80)):
        allowed = check_mask(matcher, MERGED)
        assert matcher.accept_token(rng.choice(sorted(allowed)))
        if matcher.is_terminated():
            break


@pytest.mark.parametrize("style", FORMS)
def test_arguments_come_in_any_order_each_at_most_once(style: str) -> None:
    schema = {**EASY, "properties": {"name": {"type": "integer"}, "size": {"type": "integer"}}}
    form = STYLES[style]
    if form.parameter is None:
        parts = {"n": '"name": 1', "s": '"size": 2'}
        begin, end, separator = "{", "}", ", "
    else:
        one = form.find_parameter(is_text=False)
        parts = {key[0]: one.replace("{key}", key).replace("{value}", "12"[key == "size"]) for key in ("name", "size")}
        begin, end, separator = "", "", form.parameter_separator
    head = form.openings[0] + form.heads[0].replace("{name}", "f")
    for order, is_right in (("ns", True), ("sn", True), ("n", True), ("s", False), ("nn", False), ("nsn", False)):
        text = head + begin + separator.join(parts[each] for each in order) + end + form.tail + form.end
        assert takes(style, schema, text) == is_right, order


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("['a\\'b', \"c'd\", 'e\\n']", ["a'b", "c'd", "e\n"]), ("['\\x']", None), ("['a\tb']", None), ("['a'", None),
        ("[]", []), ("['a', 1]", None),
    ],
)  # fmt: skip
def test_lists_in_python_are_what_python_reads(written: str, value: Any) -> None:
    schema = make_object({"type": "array", "items": {"type": "string"}})
    text = f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>"
    assert takes("lfm2", schema, text) == (value is not None)
    assert value is None or read("lfm2", schema, text) == {"a": value}


def test_names_of_128_characters_and_long_numbers() -> None:
    name, schema = "n" * 128, make_object({"type": "number"})
    spec = make_tool_spec(STYLES["hermes"], [(name, schema)], is_forced=True)
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": '
    matcher = COMPILERS[BYTES].compile(spec).matcher()
    assert all(map(matcher.accept_token, text.encode()))
    for _ in range(24):
        assert matcher.accept_token(ord("1"))
    allowed = allowed_tokens(matcher, BYTES)
    assert ord("1") not in allowed and ord("}") in allowed


def test_equal_schemas_are_written_once_and_tools_share_a_description() -> None:
    child = {"type": "array", "items": {"type": "string"}}
    tools = [(f"f{i}", make_object(child | {"description": f"the list {i}"})) for i in range(64)]
    for style in ("hermes", "llama3_json", "qwen3_coder", "kimi_k2"):
        grammar = COMPILERS[BYTES].compile(make_tool_spec(STYLES[style], tools)).program.grammar
        assert grammar.count('"array"') == 1


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"name": "Bob", "age": 3}', True), ('{"name": "f", "parameters": {"a": 1}}', True),
        ('{"name":"f","parameters":{"a":1}}', True), ('{"name": "f", "parameters": {"a": "x"}}', False),
        ('{"name":"f","parameters":{"b":1}}', False), ("I do not know.", True),
    ],
)  # fmt: skip
def test_llama_s_answers_may_be_json_and_its_calls_are_enforced_in_both_spellings(text: str, is_right: bool) -> None:
    spec = make_tool_spec(STYLES["llama3_json"], [("f", make_object({"type": "integer"}))])
    assert accepts(COMPILERS[BYTES].compile(spec).matcher(), BYTES, text) == is_right


@pytest.mark.parametrize("text", ["&", "a"])
def test_the_pattern_of_an_answer_is_read_as_alone(text: str) -> None:
    answer = GrammarSpec.regex("[a&&b]")
    spec = make_tool_spec(STYLES["hermes"], [("f", make_object({"type": "integer"}))], answer=answer)
    assert accepts(COMPILERS[BYTES].compile(answer).matcher(), BYTES, text)
    assert accepts(COMPILERS[BYTES].compile(spec).matcher(), BYTES, text)
