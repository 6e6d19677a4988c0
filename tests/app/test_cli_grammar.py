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
