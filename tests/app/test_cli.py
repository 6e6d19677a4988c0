"""Flags, variables, verbs, and what the user reads when something is wrong."""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.cli.failure import Failure
from app.cli.main import Parser, main
from app.cli.talk import open_talker
from app.config import AppConfig, UsageError, add_flags, make_config
from app.space import make_arguments
from engine import EngineConfig
from tests.fakes import FakeEngine


@dataclass(frozen=True)
class Sample:
    """One field of every kind."""

    name: str = "x"
    count: int = 1
    share: float | None = field(default=None, metadata={"help": "50 % of it"})
    is_on: bool = True
    mode: Literal["fast", "slow"] = "fast"
    keys: tuple[str, ...] = ()


def parse(*arguments: str, environ: dict[str, str] | None = None) -> Sample:
    parser = Parser(allow_abbrev=False)
    add_flags(parser, Sample)
    return make_config(Sample, vars(parser.parse_args(arguments)), environ or {})


def test_every_field_is_a_flag() -> None:
    sample = parse(
        "--name", "y", "--count", "2", "--share", "0.5", "--no-is-on", "--mode", "slow", "--keys", "a,b"
    )
    assert sample == Sample("y", 2, 0.5, False, "slow", ("a", "b"))


def test_a_list_flag_may_be_repeated() -> None:
    assert parse("--keys", "a", "--keys", "b, c").keys == ("a", "b", "c")


def test_a_variable_gives_a_default_that_a_flag_overrides() -> None:
    environ = {"TROUPE_COUNT": "5", "TROUPE_IS_ON": "off", "TROUPE_KEYS": "a,b", "TROUPE_NAME": ""}
    assert parse(environ=environ) == Sample(count=5, is_on=False, keys=("a", "b"))
    assert parse("--count", "6", environ=environ).count == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "two"], "'two' is not an integer"),
        (["--share", "much"], "'much' is not a number"),
        (["--mode", "medium"], "is not one of fast, slow"),
        (["--cuont", "2"], "did you mean --count?"),
        (["--coun", "2"], "unknown argument --coun"),
        (["stray"], "unknown argument stray"),
    ],
)
def test_a_wrong_flag_is_explained_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"), [("COUNT", "x"), ("IS_ON", "maybe"), ("MODE", "x"), ("SHARE", "http://x")]
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"TROUPE_{variable}='{value}'"):
        parse(environ={f"TROUPE_{variable}": value})


@pytest.mark.parametrize(
    "settings", [{"port": 65536}, {"port": -1}, {"api_key": ("a b",)}, {"admin_key": "é"}]
)
def test_app_settings_out_of_range_are_usage_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AppConfig(**settings)


def test_every_setting_of_the_engine_and_the_app_has_help_and_no_flag_twice() -> None:
    parser = Parser()
    add_flags(parser, EngineConfig)
    add_flags(parser, AppConfig)
    assert all(action.help and action.help is not argparse.SUPPRESS for action in parser._actions)
    parser.format_help()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "unknown verb 'frobnicate'"),
        (["--port", "abc"], "'abc' is not an integer"),
        (["--port", "99999"], "port=99999"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--dtype", "int3"], "is not one of auto, float32"),
        (["complete", "x", "--temperature", "9"], "temperature=9.0"),
        (["complete", ""], "the prompt is empty"),
        (["complete", "x", "--url", "http://[nonsense"], "troupe:"),
        (["complete", "x", "--url", "127.0.0.1:7872"], "--url '127.0.0.1:7872' needs http:// or https://"),
        (["complete", "x", "--url", "localhost:7872"], "--url 'localhost:7872' needs http:// or https://"),
        (["complete", "x", "--url", "http://127.0.0.1:1", "--api-key", "a\nb"], "api_key must be printable"),
        (["extract", "x"], "--schema"),
        (["extract", "--schema", "missing.json", "x"], "cannot read missing.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], message: str, capsys: Any) -> None:
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("troupe: ")
    assert not any("Traceback" in line for line in lines)


def test_an_unreachable_server_is_exit_code_1(capsys: Any) -> None:
    assert main(["complete", "x", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at" in capsys.readouterr().err


def test_flags_are_read_before_anything_large_is_imported() -> None:
    program = (
        "import sys; from app.cli.main import main; code = main(['--port', '99999']); "
        "sys.exit(code if {'torch', 'transformers', 'fastapi'}.isdisjoint(sys.modules) else 'imported')"
    )
    # which variables there are is known to the modules of all verbs
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TROUPE_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.startswith("troupe: port=99999")) == (2, True), done.stderr


def test_version_and_help_need_nothing_else(capsys: Any) -> None:
    assert main(["--version"]) == 0
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("troupe ")
    for word in ("chat", "extract", "--max-num-seqs", "--api-key", "--no-ui"):
        assert word in printed


@pytest.fixture
def schema_file(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    path.write_text(json.dumps({"type": "object", "properties": properties, "required": ["name", "age"]}))
    return path


def test_extract_prints_one_json_line_per_file(
    fake_local: FakeEngine, schema_file: Path, tmp_path: Path, capsys: Any
) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("Ada is 36")
    assert main(["extract", "--schema", str(schema_file), *map(str, files)]) == 0
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    assert [record["source"] for record in records] == [str(file) for file in files]
    assert set(records[0]) == {"source", "record", "valid", "finish_reason", "confidence", "evidence"}
    assert records[0]["record"] == {"name": "Ada", "age": 36}
    assert records[0]["valid"] is True
    assert "[2/2]" in printed.err


@pytest.mark.parametrize(("flags", "beside"), [([], {"id": "7", "note": "x"}), (["--column", "note"], None)])
def test_extract_prints_a_line_per_row_of_a_table(
    fake_local: FakeEngine, flags: list[str], beside: Any, schema_file: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "t.csv").write_text("id,text,note\n7,Ada is 36,x\n8,Bob is 7,y\n")
    assert main(["extract", "--schema", str(schema_file), *flags, str(tmp_path / "t.csv")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["source"] for line in lines] == [f"{tmp_path}/t.csv row 1", f"{tmp_path}/t.csv row 2"]
    assert lines[0]["row"] == (beside or {"id": "7", "text": "Ada is 36"})
    assert any("Ada is 36" in request.prompt for request in fake_local.requests) == (not flags)


def test_extract_names_the_columns_of_a_table(schema_file: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t.csv").write_text("id,body\n7,Ada\n")
    assert main(["extract", "--schema", str(schema_file), "--column", "x", str(tmp_path / "t.csv")]) == 2
    assert "--column x" in (said := capsys.readouterr().err) and "has the columns id, body" in said


@pytest.mark.parametrize(("flags", "pattern"), [([], "^(19|20)"), (["--no-limits"], None)])
def test_extract_names_the_limits_that_it_adds(
    fake_local: FakeEngine, tmp_path: Path, capsys: Any, flags: list[str], pattern: str | None
) -> None:
    schema, text = tmp_path / "s.json", tmp_path / "a.txt"
    schema.write_text('{"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}')
    text.write_text("2 January 2026")
    assert main(["extract", "--schema", str(schema), str(text), *flags]) == 0
    printed = capsys.readouterr().err
    assert ("added limits: YYYY-MM-DD from 1900 to 2099 at /properties/day" in printed) is (
        pattern is not None
    )
    grammar = fake_local.requests[0].params.grammar
    assert grammar is not None and ("^(19|20)" in grammar.text) is (pattern is not None)


@pytest.mark.parametrize("text", ["not json", "[1]", '{"type": "nonsense"}', "[" * 5000])
def test_extract_refuses_a_file_that_is_no_schema(tmp_path: Path, text: str, capsys: Any) -> None:
    (tmp_path / "s.json").write_text(text)
    assert main(["extract", "--schema", str(tmp_path / "s.json"), str(tmp_path / "s.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_extract_refuses_a_file_that_is_no_text(schema_file: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    assert main(["extract", "--schema", str(schema_file), str(tmp_path / "x.bin")]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_extract_reads_a_text_alike_whatever_its_line_ends(
    fake_local: FakeEngine, schema_file: Path, tmp_path: Path, end: str
) -> None:
    (tmp_path / "a.txt").write_bytes(f"Ada{end}is 36".encode())
    assert main(["extract", "--schema", str(schema_file), str(tmp_path / "a.txt")]) == 0
    assert "Ada\nis 36" in fake_local.requests[0].prompt


def test_extract_makes_up_no_record_of_an_empty_text(
    fake_local: FakeEngine, schema_file: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "good.txt").write_text("Ada is 36")
    files = [str(tmp_path / name) for name in ("empty.txt", "good.txt")]
    assert main(["extract", "--schema", str(schema_file), *files]) == 1
    empty, good = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (empty["record"], empty["error"]) == (None, "the text is empty: there is nothing to extract")
    assert good["valid"]


@pytest.mark.parametrize(
    "flag", [["--sets", "samples"], ["--surround", "9"], ["--wrong"], ["--calibration", "x"]]
)
def test_a_flag_of_the_evaluation_alone_is_refused(flag: list[str], schema_file: Path, capsys: Any) -> None:
    assert main(["extract", "--schema", str(schema_file), str(schema_file), *flag]) == 2
    assert f"{flag[0]} goes with --evaluate" in capsys.readouterr().err


def test_records_are_json_whatever_stdout_can_spell(
    fake_local: FakeEngine, monkeypatch: pytest.MonkeyPatch, schema_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("José")
    fake_local.record = '{"name": "José", "age": 1}'
    monkeypatch.setattr(sys, "stdout", written := io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["extract", "--schema", str(schema_file), str(tmp_path / "t.txt")]) == 0
    assert json.loads(written.buffer.getvalue())["record"]["name"] == "José"  # type: ignore[attr-defined]


def test_extract_reads_stdin_once(capsys: Any) -> None:
    assert main(["extract", "--schema", "-", "-"]) == 2
    assert "stdin (-) can be read once" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", ",", " , "])
def test_a_key_that_got_lost_does_not_open_the_server(key: str, capsys: Any) -> None:
    assert main(["serve", "--api-key", key]) == 2
    assert "api_key is given without a value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ('{"data": [{"id": "m"}]}', "the server hung up before the answer was complete"),
        ('{"data": []}', "the server names no model"),
        ("<html>", "the server names no model"),
    ],
)
async def test_complete_says_so_when_the_server_does_not_finish(models: str, message: str) -> None:
    async def tell_models(_: web.Request) -> web.Response:
        return web.Response(text=models)

    async def begin(_: web.Request) -> web.Response:
        return web.Response(
            text='data: {"choices": [{"text": "half"}]}\n\n', content_type="text/event-stream"
        )

    server = web.Application()
    server.add_routes([web.get("/v1/models", tell_models), web.post("/v1/completions", begin)])
    async with TestServer(server) as at:
        with pytest.raises(Failure, match=message):
            async with open_talker({"url": str(at.make_url("")).rstrip("/")}) as talker:
                assert [piece async for piece in talker.complete("x")]


def test_chat_answers_line_by_line(
    fake_local: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines = iter(["hello", "/new", "again", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("app.cli.chat.is_terminal", lambda: False)
    assert main(["chat", "--system-prompt", "be kind"]) == 0
    assert capsys.readouterr().out == "You said <user>hello\nYou said <user>again\n"
    assert fake_local.requests[-1].prompt == "<system>be kind\n<user>again\n<assistant>"


def test_a_space_serves_every_interface() -> None:
    assert make_arguments({}) == ["serve"]
    assert make_arguments({"SYSTEM": "spaces"}) == ["serve", "--host", "0.0.0.0", "--port", "7860"]
    on_zero = make_arguments({"SYSTEM": "spaces", "SPACES_ZERO_GPU": "true"})
    assert on_zero[-2:] == ["--device", "cpu"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_and_exit_code_1() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "app", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "troupe: the output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_log_that_cannot_be_written_is_no_failure() -> None:
    """Half a line waits in the buffer; Python would end with 120 when it finds no room for it."""
    program = (
        "import sys; from app.cli.main import main; sys.stderr.write('half'); sys.exit(main(['--version']))"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], env=buffered, stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert (done.returncode, done.stdout[:7]) == (0, b"troupe ")


def test_nothing_is_left_uncollected_at_the_exit_when_triton_would_complain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert main(["--version"]) == 0
    assert gc.get_freeze_count() == 0


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (0, 1)
