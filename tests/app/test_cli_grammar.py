"""`grammar explain` and `grammar test`: what they print and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main

SCHEMA = {
    "title": "A pair",
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "uniqueItems": True}},
    "required": ["name"],
}


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


def test_explain_prints_one_keyword_a_line(schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "explain", schema]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["POINTER", "KEYWORD", "ENFORCED BY"]
    assert ["#", "title", "annotation"] in rows
    assert ["/properties/name", "type", "llguidance"] in rows
    assert ["/properties/tags", "uniqueItems", "residual"] in rows


def test_instances_that_are_all_accepted_end_in_0(schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "test", schema, '{"name": "a"}', '{"name":"é","tags":[1,2]}']) == 0
    assert [line.rsplit(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["accepted"] * 2


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        ('{"name": 1}', "refused at byte 9, '1' after '{\"name\": '"),
        ('{"name": "a", "tags": [1, 1]}', "refused at byte 27, ']'"),
        ('{"name": "a"', "refused at byte 12, the end"),
    ],
)
def test_a_refused_instance_is_told_with_its_byte(
    schema: str, instance: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grammar", "test", schema, '{"name": "a"}', instance]) == 1
    accepted, refused = capsys.readouterr().out.splitlines()
    assert accepted.endswith("accepted") and words in refused


def test_an_instance_may_be_a_file(schema: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "instance.json"
    path.write_text('{\n  "name": "a"\n}\n')
    assert main(["grammar", "test", schema, f"@{path}"]) == 0
    assert main(["grammar", "test", schema, f"@{path}", "--whitespace", "compact"]) == 1


def test_a_byte_of_the_command_line_that_is_no_utf8_is_refused_at_its_place(
    schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grammar", "test", schema, '{"name": "\udcff"}']) == 1
    assert "refused at byte 10," in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SCHEMA", "-"])
def test_a_byte_order_mark_is_no_part_of_a_file(
    name: str, schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = tmp_path / "instance.json"
    for path, text in ((Path(schema), json.dumps(SCHEMA)), (instance, '{"name": "a"}')):
        path.write_text(text, encoding="utf-8-sig")
    with Path(schema).open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        names = [name.replace("SCHEMA", schema), f"@{instance}"]
        assert main(["grammar", "test", *names]) == 0


@pytest.mark.parametrize(
    ("pattern", "text", "verdict"),
    [
        ("[ab\\n]+", "a\nb\n", "accepted"),
        ("a", "a\n", "accepted"),
        ("a", "a\r\n", "accepted"),
        ("a\\r\\nb", "a\r\nb\n", "accepted"),
        (" a", " a", "accepted"),
        ("a", "a\n\n", "refused at byte 1,"),
        ("a", " a", "refused at byte 0,"),
        ("a\n?b", "ab\nc\n", "refused at byte 2,"),
    ],
)
def test_only_a_line_break_at_the_end_of_a_file_is_left_out(
    pattern: str, text: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grammar, instance = tmp_path / "grammar", tmp_path / "instance"
    grammar.write_text(pattern)
    instance.write_bytes(text.encode())
    status = main(["grammar", "test", str(grammar), f"@{instance}", "--kind", "regex"])
    assert status == int(verdict != "accepted")
    assert verdict in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "no-such-file"], "cannot read no-such-file"),
        (["test", "SCHEMA"], "at least one instance"),
        (["explain", "SCHEMA", "1"], "a schema alone"),
        (["explain", "DYNAMIC"], "'$dynamicRef' at # is not supported"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    schema: str, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dynamic = tmp_path / "dynamic.json"
    dynamic.write_text('{"$dynamicRef": "#a"}')
    names = {"SCHEMA": schema, "DYNAMIC": str(dynamic)}
    assert main(["grammar", *(names.get(argument, argument) for argument in arguments)]) == 2
    output = capsys.readouterr().err
    assert words in output and output.count("\n") == 1


TREE = {"name": "a", "children": [{"name": "b", "text": "integer", "min": 1, "max": None}]}
TAG = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</n>",
}
TAGS = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG]}}


@pytest.mark.parametrize(
    ("kind", "text", "row", "good", "bad", "byte"),
    [
        ("regex", "[0-9]+\n", "# regex outlines_core", "12", "1a", 1),
        ("choice", '["yes", "no"]', "# choice outlines_core", "yes", "yex", 2),
        ("lark", 'start: "a"+', "# lark llguidance", "aa", "ab", 1),
        ("csv", '{"columns": {"n": "integer"}}', "# csv llguidance", "n\n1", "n\nx", 2),
        ("xml", json.dumps(TREE), "# xml llguidance", "<a>\n<b>1</b>\n</a>", "<a><b>x</b></a>", 6),
        ("structural_tag", json.dumps(TAGS), "/format/tags/0/content/json_schema/properties/tags uniqueItems residual",
         'so <n>{"name": "a"}</n>.', '<n>{"name": 1}</n>', 12),
    ],
)  # fmt: skip
def test_every_kind_is_explained_and_tried(
    kind: str,
    text: str,
    row: str,
    good: str,
    bad: str,
    byte: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "grammar"
    path.write_text(text)
    assert main(["grammar", "explain", str(path), "--kind", kind]) == 0
    assert row.split() in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["grammar", "test", str(path), good, bad, "--kind", kind]) == 1
    accepted, refused = capsys.readouterr().out.splitlines()
    assert accepted.endswith("accepted") and f"refused at byte {byte}," in refused


def test_properties_may_come_in_any_order(schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    instance = '{"tags": [], "name": "a"}'
    assert main(["grammar", "test", schema, instance]) == 1
    assert main(["grammar", "test", schema, instance, "--property-order", "any"]) == 0
