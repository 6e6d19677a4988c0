"""Tool calls in text, in the styles of the models: their grammar and their parser."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from app.api.tools.call_patterns import ValueEnd
from app.api.tools.styled_calls import Piece, StyledCalls, join_pieces
from grammar import GrammarCompiler, SchemaValidator, ToolStyle, Vocabulary, list_tool_styles, make_tool_spec
from tests.app.api.harness import Start
from tests.app.api.test_tools import CITY, TOOLS, collect
from tests.fakes import FakeEngine, FakeTokenizer
from tests.grammar.vocabularies import walk

TOOL_STYLES = list_tool_styles()
ARGUMENTS = '{"city": "a \\"}{ \\\\ b"}'
CITY_TEXT = json.loads(ARGUMENTS)["city"]
# Two calls after content, as each style writes them.
TEXTS = {
    "hermes": f'So < it.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3_json": f'So < it.\n{{"name": "weather", "parameters": {ARGUMENTS}}}\n'
    '<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}',
    "mistral": f'So < it.\n[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "clock", "arguments": {}}]',
    "deepseek_v3": "So < it.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "So < it.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "So < it.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral_v13": f"So < it.\n[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[ARGS]{{}}",
    "qwen3_coder": f"So < it.\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY_TEXT}\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "glm45": f"So < it.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY_TEXT}</arg_value>\n"
    "</tool_call>\n<tool_call>clock\n</tool_call>",
    "glm47": f"So < it.\n<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY_TEXT}</arg_value></tool_call>"
    "<tool_call>clock</tool_call>",
    "minimax": f'So < it.\n<tool_calls>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n'
    '{"name": "clock", "arguments": {}}\n</tool_calls>',
    "minimax_m2": 'So < it.\n<minimax:tool_call>\n<invoke name="weather">\n'
    f'<parameter name="city">{CITY_TEXT}</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n'
    "</minimax:tool_call>",
}
# These have either calls or text, or messages.
WHOLE = {
    "pythonic": f"[weather(city={ARGUMENTS[9:-1]}), clock()]",
    "openai": "<|channel|>analysis<|message|>So < it.\n<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
}
SPECIALS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
EOS = 256
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), b"<eos>", *[b""] * len(SPECIALS), b'"}', b'}\n</', b'":', b', "'],
    [EOS],
    {name: 257 + index for index, name in enumerate(SPECIALS)},
)
FORCED_CALLS = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]'
SCHEMAS = [("weather", CITY), ("clock", {"type": "object", "additionalProperties": False})]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY)


def tokenise(text: str, is_special: bool) -> list[int]:
    """Single bytes, with the special tokens as tokens or spelled out."""
    ids: list[int] = []
    while text:
        name = next((name for name in SPECIALS if is_special and text.startswith(name)), None)
        ids += [VOCABULARY.special_tokens[name]] if name else [*text[0].encode()]
        text = text[len(name) if name else 1 :]
    return ids


def make_parser(style: str, is_whole: bool = False) -> StyledCalls:
    return StyledCalls(TOOL_STYLES[style], dict(SCHEMAS), is_whole)


def is_accepted(compiler: GrammarCompiler, style: str, text: str, **options: Any) -> bool:
    compiled = compiler.compile(make_tool_spec(TOOL_STYLES[style], SCHEMAS, **options))
    verdicts = set()
    for is_special in (True, False):
        matcher = compiled.matcher()
        verdicts.add(all(map(matcher.accept_token, tokenise(text, is_special))) and matcher.is_completed())
    assert len(verdicts) == 1
    return verdicts.pop()


@pytest.mark.parametrize("style", TEXTS)
def test_the_grammar_takes_valid_calls_of_known_tools_only(compiler: GrammarCompiler, style: str) -> None:
    text = TEXTS[style]
    assert is_accepted(compiler, style, text)
    assert is_accepted(compiler, style, "only words, { and [ and <tool")
    for right, wrong in (("clock", "click"), ("city", "town"), ("{}", "{1}"), ("</function>", "")):
        assert right not in text or not is_accepted(compiler, style, text.replace(right, wrong))
    assert not is_accepted(compiler, style, text, is_parallel=False)


def read(parser: StyledCalls, text: str, size: int = 1, is_cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of a text that comes in pieces."""
    pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
    pieces += parser.close(is_cut)
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.call >= 0:
            name, arguments = (piece.name, "") if piece.call_id else calls.pop()
            calls.append((name, arguments + piece.text))
    content, reasoning = (
        "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("content", "reasoning")
    )
    return content, reasoning, calls


@pytest.mark.parametrize("style", TEXTS)
def test_content_and_calls_are_separated_whatever_the_pieces(style: str) -> None:
    for size in (1, 3, 1000):
        expected = ("So < it.\n", "", [("weather", ARGUMENTS), ("clock", "{}")])
        assert read(make_parser(style), TEXTS[style], size) == expected
    parser = make_parser(style)
    parts = [piece for char in TEXTS[style] for piece in parser.feed(char) if piece.call >= 0]
    assert len(parts) >= len(ARGUMENTS if TOOL_STYLES[style].parameter is None else CITY_TEXT)


RICH: dict[str, Any] = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {
        "city": {"type": "string", "description": "any text"}, "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"}, "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "ok": {"type": "boolean"}, "when": {"type": ["string", "null"]},
    },
    "$defs": {"days": {"type": "integer", "minimum": 1}},
}
# One call of a tool `f` with these arguments, as the documented format of each style has it.
VALUES = {"city": 'a </b>\n"c"', "unit": "C", "days": 3, "tags": ["</x>", "\n"], "ok": True, "when": None}
WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n"
    '<parameter=city>\na </b>\n"c"\n</parameter>\n<parameter=unit>\nC\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n"
    '<parameter=tags>\n["</x>", "\\n"]\n</parameter>\n<parameter=ok>\ntrue\n</parameter>\n'
    "<parameter=when>\nnull\n</parameter>\n</function>\n</tool_call>",
    "glm45": '<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>a </b>\n"c"</arg_value>\n<arg_key>unit</arg_key>\n'
    "<arg_value>C</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n"
    '<arg_value>["</x>", "\\n"]</arg_value>\n<arg_key>ok</arg_key>\n<arg_value>true</arg_value>\n'
    "<arg_key>when</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">a </b>\n"c"</parameter>\n'
    '<parameter name="unit">C</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="tags">["</x>", "\\n"]</parameter>\n<parameter name="ok">true</parameter>\n'
    '<parameter name="when">null</parameter>\n</invoke>\n</minimax:tool_call>',
    "pythonic": '[f(city="a </b>\\n\\"c\\"", unit="C", days=3, tags=["</x>", "\\n"], ok=True, when=null)]',
}


@pytest.mark.parametrize("style", WRITTEN)
def test_arguments_written_one_by_one_keep_to_the_whole_schema(compiler: GrammarCompiler, style: str) -> None:
    compiled = compiler.compile(make_tool_spec(TOOL_STYLES[style], [("f", RICH)]))

    def takes(text: str) -> bool:
        matcher = compiled.matcher()
        return all(map(matcher.accept_token, text.encode())) and matcher.is_completed()

    text = WRITTEN[style]
    assert takes(text)
    wrongs = (("3", "0"), ("3", '"3"'), ('["</x>", ', '["\\n", '), ("C", "K"), ("days", "city"))
    for right, wrong in wrongs:
        assert right in text and not takes(text.replace(right, wrong)), (right, wrong)
    for size in (1, 2, 1000):
        content, _, ((name, arguments),) = read(StyledCalls(TOOL_STYLES[style], {"f": RICH}), text, size)
        assert (content, name, json.loads(arguments)) == ("", "f", VALUES)


def test_a_whole_answer_is_calls_or_text(compiler: GrammarCompiler) -> None:
    calls = [("weather", ARGUMENTS), ("clock", "{}")]
    for style, text in WHOLE.items():
        assert is_accepted(compiler, style, text)
        assert not is_accepted(compiler, style, text.replace("weather", "news"))
        assert not is_accepted(compiler, style, text.replace("city", "town"))
    final = "<|channel|>final<|message|>Hello [x]"
    for style, text, expected in (
        ("pythonic", WHOLE["pythonic"], ("", "", calls)),
        ("pythonic", "Hello [clock()]", ("Hello [clock()]", "", [])),
        ("openai", WHOLE["openai"], ("", "So < it.\n", calls[:1])),
        ("openai", WHOLE["openai"].partition("<|channel|>comm")[0] + final, ("Hello [x]", "So < it.\n", [])),
        ("openai", final, ("Hello [x]", "", [])),
    ):
        assert is_accepted(compiler, style, text)
        for size in (1, 7, 1000):
            assert read(make_parser(style), text, size) == expected


@pytest.mark.parametrize("style", TEXTS)
def test_a_text_cut_anywhere_loses_no_content_and_shows_nothing_of_a_call(style: str) -> None:
    text, said = TEXTS[style], "So < it.\n"
    mark = next(mark for mark in TOOL_STYLES[style].marks if text.startswith(mark, len(said)))
    for length in range(len(text)):
        words, _, calls = read(make_parser(style), text[:length], 1000, is_cut=True)
        assert all(ARGUMENTS.startswith(arguments) or arguments in ("", "{}") for _, arguments in calls)
        # the model is free to write anything until the mark is complete
        assert words == (text[:length] if length < len(said + mark) else said)
        if not calls:
            assert read(make_parser(style), text[:length], 1000)[0] == text[:length]


@pytest.mark.parametrize("style", [*WHOLE, "forced", "hermes"])
def test_a_cut_answer_that_has_to_be_a_call_has_no_content(style: str) -> None:
    texts = WHOLE | {"hermes": TEXTS["hermes"].removeprefix("So < it.\n"), "forced": FORCED_CALLS}
    text, said = texts[style], "So < it.\n<|end|"  # a special token is one token, so the last of these are free text
    for length in range(len(text) + 1):
        bare = StyledCalls(ToolStyle.bare(True), dict(SCHEMAS))
        parser = bare if style == "forced" else make_parser(style, style == "hermes")
        words, reasoning, _ = read(parser, text[:length], 1000, is_cut=True)
        assert (words, said.startswith(reasoning)) == ("", True), text[:length]


@pytest.mark.parametrize("style", TEXTS)
def test_whatever_the_grammar_lets_through_is_read_as_valid_calls(compiler: GrammarCompiler, style: str) -> None:
    """Random texts that are led into a call by its first mark: every call is complete and its arguments are valid."""
    compiled = compiler.compile(make_tool_spec(TOOL_STYLES[style], SCHEMAS))
    num_calls = 0
    for seed in range(8):
        matcher, rng = compiled.matcher(), random.Random(seed)
        mark = TOOL_STYLES[style].marks[0].encode()
        mark += b'weather", ' if style == "llama3_json" else b""
        assert all(map(matcher.accept_token, mark))
        text = mark + (walk(matcher, VOCABULARY, rng, num_free=0) or b"")
        _, _, calls = read(make_parser(style), text.decode(), 1000)
        for name, arguments in calls:
            assert SchemaValidator(dict(SCHEMAS)[name]).is_valid(json.loads(arguments))
        num_calls += len(calls)
    assert num_calls


@dataclass
class StyledTokenizer(FakeTokenizer):
    """A chat template that writes calls in one of the styles."""

    style: str = "hermes"
    knows_tools: bool = True

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return write_calls(TOOL_STYLES[self.style], [(call["function"], call["id"]) for call in calls])


def write_calls(style: ToolStyle, calls: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Write calls in a style whose values other than strings are JSON."""
    written = []
    for number, (function, call_id) in enumerate(calls):
        arguments = json.dumps(function["arguments"])
        if style.parameter is not None:
            pairs = function["arguments"].items()
            arguments = style.parameter_separator.join(
                style.find_parameter(isinstance(value, str)).replace("{key}", key).replace(
                    "{value}", value if isinstance(value, str) and style.writes_text else json.dumps(value)
                )
                for key, value in pairs
            )
        head = style.heads[0].replace("{name}", function["name"]).replace("{index}", str(number))
        written.append((head + arguments + style.tail).replace("{id}", call_id))
    if not written:
        return ""
    if style.separator is None:
        return "\n".join(style.openings[0] + each + style.end for each in written)
    return style.openings[0] + style.separator.join(written) + style.end


@pytest.mark.parametrize("style", TEXTS)
async def test_auto_is_enforced_and_streams_arguments_as_they_come(start: Start, style: str) -> None:
    server = await start(FakeEngine(record=TEXTS[style], tokenizer=StyledTokenizer(style=style)))
    status, reply = await server.chat(tools=TOOLS)
    assert status == 200, reply
    params = server.engine.requests[-1].params
    assert (params.grammar.kind, params.skip_special_tokens) == ("tool_calls", False)
    message = reply["choices"][0]["message"]
    assert (message["content"], reply["choices"][0]["finish_reason"]) == ("So < it.\n", "tool_calls")
    made = ({"name": "weather", "arguments": ARGUMENTS}, {"name": "clock", "arguments": "{}"})
    assert [call["function"] for call in message["tool_calls"]] == [*made]
    chunks = await server.chat_chunks(tools=TOOLS, tool_choice="auto")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert len(parts) > 10
    words, calls, end = collect(chunks)
    assert (words, end) == ("So < it.\n", "tool_calls")
    assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]


ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}


@pytest.mark.parametrize("style", [*TEXTS, "pythonic"])
async def test_beside_a_response_format_the_answer_is_calls_or_what_it_describes(
    start: Start, compiler: GrammarCompiler, style: str
) -> None:
    text = (TEXTS | WHOLE)[style].removeprefix("So < it.\n")
    text = text.replace(f'{{"name": "weather", "parameters": {ARGUMENTS}}}\n', "")  # without a mark it is an answer
    server = await start(FakeEngine(record=text, tokenizer=StyledTokenizer(style=style)))
    fields = {"tools": TOOLS, "response_format": ANSWER}
    status, reply = await server.chat(**fields)
    assert status == 200, reply
    message = reply["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]][-1] == "clock"
    server.engine.record = ARGUMENTS
    status, reply = await server.chat(**fields)
    message = reply["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message, reply["structured"]["valid"]) == (ARGUMENTS, False, True)
    compiled = compiler.compile(server.engine.requests[-1].params.grammar)
    for answer, is_right in ((text, True), (ARGUMENTS, True), ("{}", False), (f"x{text}", False)):
        matcher = compiled.matcher()
        is_taken = all(map(matcher.accept_token, answer.encode())) and matcher.is_completed()
        assert is_taken == is_right, answer


async def test_a_forced_tool_wins_over_a_response_format_and_other_constraints_are_refused(start: Start) -> None:
    server = await start(FakeEngine(record="x", tokenizer=StyledTokenizer()))
    await server.chat(tools=TOOLS, tool_choice="required", response_format=ANSWER)
    forced = server.engine.requests[-1].params.grammar
    await server.chat(tools=TOOLS, tool_choice="required")
    assert forced == server.engine.requests[-1].params.grammar
    status, reply = await server.chat(tools=TOOLS, structured_outputs={"csv": {"columns": {"a": "integer"}}})
    assert (status, reply["error"]["param"]) == (400, "tool_choice")


async def test_a_parser_that_is_named_is_used_whatever_the_template_writes(start: Start) -> None:
    server = await start(
        FakeEngine(record=WHOLE["openai"], tokenizer=FakeTokenizer(knows_tools=True)), tool_call_parser="gpt-oss"
    )
    _, reply = await server.chat(tools=TOOLS)
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "So < it.\n")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}


async def test_one_call_is_all_when_parallel_calls_are_off(start: Start) -> None:
    server = await start(FakeEngine(record="x", tokenizer=StyledTokenizer()))
    await server.chat(tools=TOOLS, parallel_tool_calls=False)
    spec = server.engine.requests[-1].params.grammar
    assert json.loads(spec.text)["is_parallel"] is False


@pytest.mark.parametrize(
    ("text", "quotes", "end"),
    [
        ('{"a": "}\\"", "b": [1]} x', ('"',), 22), ('"a" x', ('"',), 3),
        ("7<x>", ('<|"|>',), 1), ("7<|", ('<|"|>',), 1), ('<|"|>a<|"|>,', ('<|"|>',), 11), ("'a\\'', 5", ("'", '"'), 5),
        ("[1, {'b': \"]\"}], 5", ("'", '"'), 15),
    ],
)
def test_a_value_ends_where_its_language_says(text: str, quotes: tuple[str, ...], end: int) -> None:
    whole, single = ValueEnd(quotes), ValueEnd(quotes)
    assert whole.find(text, 0) == end
    at = 0
    for length in range(1, len(text) + 1):
        at = at if single.is_ended else single.find(text[:length], at)
    assert (at, single.is_ended) == (end, whole.is_ended) and whole.is_ended != (text == "7<|")


def test_pieces_of_one_call_are_joined_and_others_are_not() -> None:
    more = (Piece("function", '{"a"', 0), Piece("function", ": 1}", 0))
    said = (Piece("content", "x"), Piece("content", "y"))
    pieces = [*said, Piece("function", "", 0, "id", "f"), *more, Piece("function", "", 1, "id", "g"), *said]
    assert join_pieces(pieces) == [
        Piece("content", "xy"), Piece("function", '{"a": 1}', 0, "id", "f"), Piece("function", "", 1, "id", "g"),
        Piece("content", "xy"),
    ]


@pytest.mark.parametrize(("path", "field"), [("/v1/messages", "content"), ("/v1/responses", "output")])
async def test_text_between_calls_is_in_its_place_whole_and_as_a_stream(start: Start, path: str, field: str) -> None:
    text = f"{TEXTS['hermes']}\nDone."
    server = await start(FakeEngine(record=text, tokenizer=StyledTokenizer()))
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS]
    body: dict[str, Any] = {"model": "fake", "input": "hi", "tools": tools}
    if path == "/v1/messages":
        shown = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS]
        body = {"model": "fake", "max_tokens": 999, "messages": [{"role": "user", "content": "hi"}], "tools": shown}
    _, reply = await server.post(path, body)
    kinds = [block["type"] for block in reply[field]]
    assert len(kinds) == 4 and kinds[0] == kinds[3] and kinds[1] == kinds[2]
    raw = (await server.stream(path, body)).decode()
    opened = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    names = ("content_block_start", "response.output_item.added")
    started = [event.get("content_block") or event["item"] for event in opened if event["type"] in names]
    assert [block["type"] for block in started] == kinds
