"""What a client sends, or has a model write, is read in time in proportion to its length, whatever it is made of."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from typing import Any

import pytest

from app import json_text
from app.api.body_decoder import BodyDecoder
from app.api.completions import TextOffsets
from app.api.errors import ApiError, scrub
from app.api.messages import read_messages
from app.api.tools.styled_calls import StyledCalls
from app.extraction.candidates import bind_amounts
from app.extraction.chunks import cut
from app.extraction.csv_table import read_csv
from app.extraction.decoding import decode_text
from app.extraction.export import export
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import scan
from app.extraction.readers.layout import Run, lay_out
from app.extraction.sources import UnreadableSource, parse_rows
from app.extraction.verbatim import list_spellings
from app.json_text import ValueCounter, check_json, load_json
from app.reasoning import ReasoningSplitter, Thinking
from app.ui.chat.conversation import answer_message, fence, user_message
from app.ui.chat.conversation import lay_out as lay_out_chat
from engine import EngineConfig
from engine.front.stop_strings import StopStrings
from engine.input.tokenizer import Tokenizer
from grammar import GrammarError, GrammarSpec, list_tool_styles, read_spec
from grammar.regex.dialects import read_classes, read_ecma
from grammar.regex.text import remove_assertions
from grammar.tags.gbnf_rules import read_gbnf
from tests.effort import choose_count

# A reader is quick if the large text takes that long.
SIZE, FACTOR, LIMIT, QUICK_S = 6_000, 4, 9, 0.004
# Readers in C: their quadratic time shows only in long texts.
LONG = 200_000
SIGNS = [
    "\n", " ", "\r\n", "\t \n", ".", "-", "'", '"', "\\", "*", "#", "|", ";", ",", "a", "a ", "aé",
    "e\u0301", "日", "1", "1,",
]
JSON_PARTS = ["{", "[", '{"a":', '"a",', "[]", "{},", '"\\', '"\\u', '\\"', '{"a":1,"a":1},', "}", "0", "\ud800"]
CSV_PARTS = [
    "a;b\n", '"', '"a', '""', "sep=;\n", "a,b;c|d\n", "1;2;3\n;;\n", "\n\na;", '"\n', "\0", "a\0", "\xff", "é\xe9"
]
NUMBERS = [
    "- ", "((", "- a\n", "fifty ", "fifty-", "1 ", "1.", "1 000 ", "−1", "(1", "1)", "’1", "$1", "EUR ",
    "1e9", "10:30", "at 1.30 ", "1000 ", "2026-", "1/1/", "12 March ", "12 mar", "1 de de ", "月1",
    "2026-03-12 ",
]
MARKS = [
    "<", "</", "<think>", "</think>", "<tool_call>", "<tool_call>\n{",
    '<tool_call>{"name": "f", "arguments": {"a": ', "<|", "<|channel|>", "<|channel|>final",
    "<|start|>assistant", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{", "<function=f>",
    "<function=f>\n<parameter=a>\n", "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>",
    "<arg_key>a</arg_key>", '{"name": "f", "parameters": {', "[f(a=", "functions.f:0", "<invoke name=f>",
    "stop", "sto", "ststo",
]
PATTERNS = [
    "(", "(?:", "[", "[^", "\\d", "\\p{L}", "a{1,", "a*", "(?=", "^", "$", "a|", "[[:", "(?<a>", "\\",
    "//", "/a/", "(a)",
]
RULES = [
    "a ::= b\n", "a: b\n", "root ::= ", '"a" ', '"\\', "[a-", "( ", "{1,2}", "# ", "// ", "%json ",
    "::=", "a | ", "<[1]> ",
]
RECORD: list[Any] = [1, -1, 1000, "1", "a", "aa", "2026-03-12", "10:30", "12 mar 1", "1,000", ["1", "1", "a"]]
VALUES: dict[str, Any] = {"d": {"type": "string", "format": "date"}, "n": {"type": "number"}, "i": {"type": "integer"}}


def in_pieces(feed: Callable[[str], Any], text: str, size: int = 6) -> None:
    for at in range(0, len(text), size):
        feed(text[at : at + size])


def count(text: str) -> None:
    counter = ValueCounter()
    in_pieces(lambda piece: counter.feed(piece.encode("utf-8", "surrogatepass")), text, 512)


def parse_json(text: str) -> None:
    load_json(text)
    load_json(f"[{text}1]")


def read_call(text: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    read_messages([{"role": "assistant", "tool_calls": [call]}])


def read_keys(text: str) -> None:
    """A line of JSONL, and a record, with as many keys as there are characters."""
    keys = {f"{text[:2]}{n}": n for n in range(len(text) // 8 + 1)}
    parse_rows(json.dumps(keys).encode(), "a.jsonl")
    line = json.dumps(keys)[:-1] + f', "{next(iter(keys))}": 1}}'
    parse_rows(line.encode(), "a.jsonl")
    export([{"source": "a", "valid": True, "record": keys}], "csv")


def read_columns(text: str) -> None:
    """A table with as many columns as there are characters, most without a name of their own."""
    read_csv(f"{text[0]}," * (len(text) // 8) + "\n" + "1," * (len(text) // 8), "a.csv", lambda *_: None)


def show_chat(text: str) -> None:
    lay_out_chat([user_message(text), answer_message(text)])


def split_thoughts(text: str) -> None:
    for thinking in (Thinking(False), Thinking(True), Thinking(False, has_channels=True)):
        splitter = ReasoningSplitter(thinking)
        in_pieces(splitter.feed, text)


def read_calls(text: str) -> None:
    for style in list_tool_styles().values():
        parser = StyledCalls(style, {"f": {"properties": {"a": {"type": "string"}}}}, text[2] in "<[{")
        in_pieces(parser.feed, text, 30)
        parser.close()


def find_stops(text: str) -> None:
    stops = StopStrings(["stop", "ststop", "a" * 100 + "b", " " * 100 + "!"])
    in_pieces(stops.feed, text)


@cache
def load_tokenizer() -> Tokenizer:
    return Tokenizer(EngineConfig().model)


def render(text: str) -> None:
    load_tokenizer().encode_chat([{"role": "user", "content": text}])


def find_offsets(text: str) -> None:
    tokenizer = load_tokenizer()
    TextOffsets(tokenizer, [], False).take(tokenizer.encode(text))


def lay_out_page(text: str) -> None:
    """Runs at places that the characters choose: one line, one column, or a grid."""
    runs = []
    for number in range(len(text) // 8):
        step = ord(text[number % len(text)]) % 7
        grid, row, column = (number % 50 * 12.0, number // 50 * 9.0), (number * 12.0, 0.0), (0.0, number * 9.0)
        left, top = grid if step > 3 else row if step else column
        run = Run((left, top, left + 5, top + 8))
        run.add("a", run.box)
        runs.append(run)
    lay_out(runs)


def ground(text: str) -> None:
    bind_amounts({"properties": json.loads(json.dumps(VALUES))}, text)
    list_spellings(text)


def show(text: str) -> None:
    find_evidence(scan(json.dumps(RECORD) + " ").leaves, text)


def read_schema(text: str) -> None:
    for pattern in (text, f"^{text}$"):
        GrammarSpec.json_schema({"type": "string", "pattern": pattern, "title": text})
    GrammarSpec.json_schema(text)


def translate(text: str) -> None:
    for read in (read_ecma, read_classes):
        remove_assertions(read(text))


def read_grammar(text: str) -> None:
    for kind in ("regex", "grammar", "ebnf", "lark"):
        with suppress(GrammarError):
            read_spec(kind, text)
    with suppress(GrammarError):
        read_gbnf(text)


READERS: Mapping[str, tuple[Callable[[str], Any], list[str], int]] = {
    "json": (parse_json, JSON_PARTS, LONG), "values": (count, JSON_PARTS, LONG),
    "form": (lambda text: json_text.parse_json(text.encode(), ("rows",)), JSON_PARTS, LONG),
    "checks": (lambda text: check_json({text[:9]: [text] * 3}), JSON_PARTS, LONG),
    "arguments": (read_call, JSON_PARTS, SIZE),
    "jsonl": (lambda text: parse_rows(text.encode("utf-8", "replace"), "a.jsonl"), JSON_PARTS, LONG),
    "keys": (read_keys, ["a"], SIZE),
    "csv": (lambda text: parse_rows(text.encode("latin-1", "replace"), "a.csv"), CSV_PARTS, SIZE),
    "columns": (read_columns, [" "], SIZE),
    "encoding": (lambda text: decode_text(text.encode("latin-1", "replace"), "a"), CSV_PARTS, LONG),
    "utf-16": (lambda text: decode_text(text.encode("utf-16-le", "replace"), "a"), CSV_PARTS, LONG),
    "page of a PDF": (lay_out_page, ["ab", "abcdefg"], SIZE), "reasoning": (split_thoughts, MARKS, SIZE),
    "calls": (read_calls, MARKS, SIZE // 2), "stops": (find_stops, MARKS, SIZE),
    "prompt": (render, MARKS, SIZE), "offsets": (find_offsets, [], SIZE),
    "amounts": (ground, NUMBERS, SIZE // 3), "evidence": (show, NUMBERS, SIZE // 3),
    "parts": (lambda text: cut(text, 300), NUMBERS, SIZE), "record": (scan, JSON_PARTS, SIZE),
    "fence": (fence, ["`", "``` "], LONG), "chat": (show_chat, ["\\(", "\\[", "$", "`", "a ", "<tool_call>"], SIZE),
    "schema": (read_schema, [*JSON_PARTS, *PATTERNS], SIZE),
    "pattern": (translate, [*PATTERNS, "[:a", "(?=[", "[\\"], SIZE),
    "grammar": (read_grammar, [*PATTERNS, *RULES], SIZE),
    "errors": (scrub, ["/", "/a", "a.", "a[1]", "C:\\", "0x"], SIZE),
    "gzip": (lambda text: BodyDecoder("gzip").feed(text.encode("utf-8", "replace")), [], LONG),
}


def measure(read: Callable[[str], Any], text: str) -> float:
    begun = time.thread_time()
    with suppress(ApiError, GrammarError, UnreadableSource, ValueError, RecursionError, re.error):
        read(text)
    return time.thread_time() - begun


@pytest.mark.parametrize("name", READERS)
def test_a_text_four_times_as_long_takes_about_four_times_as_long(name: str) -> None:
    read, families, size = READERS[name]
    measure(read, "5 a")  # what is made once
    for family in dict.fromkeys([*SIGNS[:: choose_count(3, 1)], *families]):
        small, large = ("5 " + "".join(islice(cycle(family), each)) for each in (size // FACTOR, size))
        # Again where it looks slow, because the processor is shared.
        for _ in range(3):
            took = measure(read, large)
            if took < QUICK_S or took < LIMIT * measure(read, small):
                break
        else:
            pytest.fail(f"{family!r}: {took:.3f} s for {size:,} signs, {measure(read, small):.3f} s for a quarter")
