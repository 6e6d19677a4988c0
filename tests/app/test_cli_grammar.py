"""`grammar explain` and `grammar test`: what they print and how they end."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main

SCHEMA = {
    "title": "A pair", "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "uniqueItems": True}}, "required": ["name"],
}
TREE = {"name": "a", "children": [{"name": "b", "text": "integer", "min": 1, "max": None}]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<n>", "content": CONTENT, "end": "</n>"}
TAGS = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG]}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema").write_text(json.dumps(SCHEMA))
    Path("dynamic").write_text('{"$dynamicRef": "#a"}')


def grammar(*arguments: str) -> int:
    return main(["grammar", *arguments])


def test_explain_prints_one_keyword_a_line(capsys: Any) -> None:
    assert grammar("explain", "schema") == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["POINTER", "KEYWORD", "ENFORCED BY"]
    assert ["#", "title", "annotation"] in rows
    assert ["/properties/name", "type", "llguidance"] in rows
    assert ["/properties/tags", "uniqueItems", "residual"] in rows


def test_instances_that_are_all_accepted_end_in_0(capsys: Any) -> None:
    assert grammar("test", "schema", '{"name": "a"}', '{"name":"é","tags":[1,2]}') == 0
    assert [line.rsplit(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["accepted"] * 2


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        ('{"name": 1}', "refused at byte 9, '1' after '{\"name\": '"),
        ('{"name": "a", "tags": [1, 1]}', "refused at byte 27, ']'"),
        ('{"name": "a"', "refused at byte 12, the end"),
        ('{"name": "\udcff"}', "refused at byte 10,"),  # no UTF-8 on the command line
    ],
)
def test_a_refused_instance_is_told_with_its_byte(instance: str, words: str, capsys: Any) -> None:
    assert grammar("test", "schema", '{"name": "a"}', instance) == 1
    accepted, refused = capsys.readouterr().out.splitlines()
    assert accepted.endswith("accepted") and words in refused


def test_the_order_of_properties_and_the_whitespace_are_as_the_flags_say() -> None:
    Path("instance").write_text('{\n  "tags": [],\n  "name": "a"\n}\n')
    assert grammar("test", "schema", "@instance") == 1
    assert grammar("test", "schema", "@instance", "--property-order", "any") == 0
    assert grammar("test", "schema", "@instance", "--property-order", "any", "--whitespace", "compact") == 1


@pytest.mark.parametrize("name", ["schema", "-"])
def test_a_byte_order_mark_is_no_part_of_a_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in (("schema", json.dumps(SCHEMA)), ("instance", '{"name": "a"}')):
        Path(path).write_text(text, encoding="utf-8-sig")
    with Path("schema").open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert grammar("test", name, "@instance") == 0


@pytest.mark.parametrize(
    ("pattern", "text", "verdict"),
    [
        ("[ab\\n]+", "a\nb\n", "accepted"), ("a", "a\r\n", "accepted"), ("a\\r\\nb", "a\r\nb\n", "accepted"),
        (" a", " a", "accepted"), ("a", "a\n\n", "refused at byte 1,"), ("a", " a", "refused at byte 0,"),
        ("a\n?b", "ab\nc\n", "refused at byte 2,"),
    ],
)
def test_only_a_line_break_at_the_end_of_a_file_is_left_out(
    pattern: str, text: str, verdict: str, capsys: Any
) -> None:
    Path("pattern").write_text(pattern)
    Path("instance").write_bytes(text.encode())
    assert grammar("test", "pattern", "@instance", "--kind", "regex") == int(verdict != "accepted")
    assert verdict in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "no-such-file"], "cannot read no-such-file"),
        (["test", "schema"], "at least one instance"),
        (["explain", "schema", "1"], "a schema alone"),
        (["explain", "dynamic"], "'$dynamicRef' at # is not supported"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], words: str, capsys: Any) -> None:
    assert grammar(*arguments) == 2
    output = capsys.readouterr().err
    assert words in output and output.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "text", "row", "good", "bad", "byte"),
    [
        ("regex", "[0-9]+\n", "# regex llguidance", "12", "1a", 1),
        ("choice", '["yes", "no"]', "# choice outlines_core", "yes", "yex", 2),
        ("lark", 'start: "a"+', "# lark llguidance", "aa", "ab", 1),
        ("csv", '{"columns": {"n": "integer"}}', "# csv llguidance", "n\n1", "n\nx", 2),
        ("xml", json.dumps(TREE), "# xml llguidance", "<a>\n<b>1</b>\n</a>", "<a><b>x</b></a>", 6),
        ("structural_tag", json.dumps(TAGS), "/format/tags/0/content/json_schema/properties/tags uniqueItems residual",
         'so <n>{"name": "a"}</n>.', '<n>{"name": 1}</n>', 12),
    ],
)
def test_every_kind_is_explained_and_tried(
    kind: str, text: str, row: str, good: str, bad: str, byte: int, capsys: Any
) -> None:
    Path("other").write_text(text)
    assert grammar("explain", "other", "--kind", kind) == 0
    assert row.split() in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert grammar("test", "other", good, bad, "--kind", kind) == 1
    accepted, refused = capsys.readouterr().out.splitlines()
    assert accepted.endswith("accepted") and f"refused at byte {byte}," in refused
