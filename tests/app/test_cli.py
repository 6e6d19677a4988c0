"""Flags, variables, verbs, and what the user reads when something is wrong."""

import argparse
import gc
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest

import app
from app.cli.main import Parser, main
from app.cli.variables import CONFIGS, check_variables
from app.config import AppConfig, UsageError, add_flags, make_config
from app.space import make_arguments
from engine import EngineConfig
from tests.app.api.test_thinking import ThinkingTokenizer
from tests.fakes import FakeEngine


@dataclass(frozen=True)
class Sample:
    """One field of every kind."""

    name: Annotated[str, ""] = "x"
    count: Annotated[int, "-cn", ""] = 1
    share: Annotated[float | None, "50 % of it"] = None
    is_on: Annotated[bool, ""] = True
    mode: Annotated[Literal["fast", "slow"], ""] = "fast"
    keys: Annotated[tuple[str, ...], ""] = ()


def parse(*arguments: str, environ: dict[str, str] | None = None) -> Sample:
    parser = Parser(allow_abbrev=False)
    add_flags(parser, Sample)
    return make_config(Sample, vars(parser.parse_args(arguments)), environ or {})


def test_every_field_is_a_flag() -> None:
    flags = "--name y --count 2 --share 0.5 --no-is-on --mode slow --keys a --keys b,c"
    assert parse(*flags.split()) == Sample("y", 2, 0.5, False, "slow", ("a", "b", "c"))
    assert parse("-cn", "3") == Sample(count=3)


def test_a_variable_gives_a_default_that_a_flag_overrides() -> None:
    environ = {"TROUPE_COUNT": "5", "TROUPE_IS_ON": "off", "TROUPE_KEYS": "a,b", "TROUPE_NAME": ""}
    assert parse(environ=environ) == Sample(count=5, is_on=False, keys=("a", "b"))
    assert parse("--count", "6", environ=environ).count == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "two"], "'two' is not an integer"), (["--share", "much"], "'much' is not a number"),
        (["--mode", "medium"], "is not one of fast, slow"), (["--cuont", "2"], "did you mean --count?"),
        (["--coun", "2"], "unknown argument --coun"), (["stray"], "unknown argument stray"),
    ],
)
def test_a_wrong_flag_is_explained_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z"):
        parse(*arguments)


@pytest.mark.parametrize(
    ("variable", "value"), [("COUNT", "x"), ("IS_ON", "maybe"), ("MODE", "x"), ("SHARE", "http://x")]
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"TROUPE_{variable}='{value}'"):
        parse(environ={f"TROUPE_{variable}": value})


@pytest.mark.parametrize(("name", "value"), [("port", 65536), ("port", -1), ("api_key", ("a b",)), ("admin_key", "é")])
def test_app_settings_out_of_range_are_usage_errors(name: str, value: Any) -> None:
    with pytest.raises(UsageError):
        AppConfig(**{name: value})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("TROUPE_MODLE", "unknown variable TROUPE_MODLE; did you mean TROUPE_MODEL? "),
        ("TROUPE_model", "did you mean TROUPE_MODEL? "),
        ("TROUPE_ADMINKEY", "did you mean TROUPE_ADMIN_KEY? "),
        ("TROUPE_QQQ", "unknown variable TROUPE_QQQ (--help"),
    ],
)
def test_a_mistyped_variable_is_named_with_the_closest_one_and_without_its_value(variable: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        check_variables({"TROUPE_PORT": "1", variable: "secret"})
    assert "secret" not in str(caught.value)


def test_variables_of_every_verb_and_of_others_and_empty_ones_pass() -> None:
    check_variables({"TROUPE_MAX_NUM_SEQS": "1", "TROUPE_UI": "0", "TROUPE_TOP_P": "x", "TROUPE_CALIBRATION": "x"})
    check_variables({"TROUPE_MODLE": "", "TROUPER": "x", "PATH": "x"})


@pytest.mark.parametrize("scheme", ["tcp", "udp", "sctp"])
def test_the_variables_of_a_kubernetes_service_named_troupe_are_no_settings(scheme: str) -> None:
    environ = {"TROUPE_PORT": f"{scheme}://10.0.0.1:7860", "TROUPE_SERVICE_HOST": "10.0.0.1"}
    check_variables(environ | {"TROUPE_PORT_7860_TCP_ADDR": "10.0.0.1"})
    assert make_config(AppConfig, {}, environ) == AppConfig()
    assert make_config(AppConfig, {"port": 80}, environ).port == 80


@pytest.mark.parametrize("argv", [["serve", "--port", "99999"], ["complete", ""]])
def test_no_verb_runs_on_a_mistyped_variable(argv: list[str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("TROUPE_MAX_MODEL_LENGTH", "5")
    assert main(argv) == 2
    assert "did you mean TROUPE_MAX_MODEL_LEN?" in capsys.readouterr().err


def test_every_config_whose_fields_become_flags_is_known() -> None:
    texts = [path.read_text(encoding="utf-8") for path in Path(app.__file__).parent.rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"add_flags\(\w+, (\w+)\)", text)}
    found |= {name for text in texts for name in re.findall(r"make_config\((\w+), ", text)}
    assert found == {config.__name__ for config in CONFIGS}


def test_every_setting_of_the_engine_and_the_app_has_help_and_no_flag_twice() -> None:
    parser = Parser()
    add_flags(parser, EngineConfig)
    add_flags(parser, AppConfig)
    shown = [action for action in parser._actions if action.dest not in EngineConfig.other_names]
    assert all(action.help and action.help is not argparse.SUPPRESS for action in shown)
    parser.format_help()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "unknown verb 'frobnicate'"), (["--port", "99999"], "port=99999"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"), (["serve", "--api-key", ""], "api_key is given without a value"),
        (["serve", "--api-key", " , "], "api_key is given without a value"),
        (["--dtype", "int3"], "is not one of auto, float32"),
        (["complete", "x", "--temperature=-9"], "temperature=-9.0"),
        (["serve", "some/model", "--swap-space", "4"], "kv_offload_gb"),
        (["--enforce-eager", "--enable-cuda-graphs"], "are the same setting"),
        (["complete", ""], "the prompt is empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], message: str, capsys: Any) -> None:
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("troupe: ")
    assert not any("Traceback" in line for line in lines)


def test_flags_are_read_before_anything_large_is_imported() -> None:
    program = (
        "import sys; from app.cli.main import main; code = main(['--port', '99999']); "
        "sys.exit(code if {'torch', 'transformers', 'fastapi'}.isdisjoint(sys.modules) else 'imported')"
    )
    # which variables there are is known to the modules of all verbs
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TROUPE_")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
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


def test_chat_answers_line_by_line_and_keeps_reasoning_apart(
    fake_local: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines = iter(["hello", "/new", "again", "/exit", "one and one?", "again", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("app.cli.chat.is_terminal", lambda: False)
    assert main(["chat", "--system-prompt", "be kind"]) == 0
    assert capsys.readouterr().out == "You said <user>hello\nYou said <user>again\n"
    assert fake_local.requests[-1].prompt == "<system>be kind\n<user>again\n<assistant>"
    fake_local.tokenizer = ThinkingTokenizer()
    fake_local.reply = lambda _: "So be it.\n</think>\n\nTwo."
    assert main(["chat"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Two.\nTwo.\n" and "So be it." in shown.err
    assert "<assistant>Two.\n" in fake_local.requests[-1].prompt and "So" not in fake_local.requests[-1].prompt


def test_a_space_serves_every_interface() -> None:
    assert make_arguments({}) == ["serve"]
    assert make_arguments({"SYSTEM": "spaces"}) == [
        "serve", "--host", "0.0.0.0", "--port", "7860",
        "--frame-ancestor", "https://huggingface.co", "--frame-ancestor", "https://*.hf.space", "--data-dir", "none",
    ]
    zero_gpu = {"SYSTEM": "spaces", "SPACES_ZERO_GPU": "true"}
    assert make_arguments(zero_gpu)[-2:] == ["--device", "cpu"]
    assert make_arguments(zero_gpu | {"TROUPE_MODEL": "Qwen/Qwen3-4B"})[-1] == "--zero-gpu"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_and_exit_code_1_for_the_output_and_no_failure_for_the_log() -> None:
    """Half a line waits in the buffer of stderr; Python would end with 120 when it finds no room for it."""
    begin = "import sys; from app.cli.main import main; "
    end = "sys.exit(main(['--version']))"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"env": environ, "text": True, "check": False}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", begin + end]
        output = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, **options)
        command[-1] = begin + "sys.stderr.write('half'); " + end
        log = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, **options)
    assert (output.returncode, output.stderr) == (1, "troupe: the output: No space left on device\n")
    assert (log.returncode, log.stdout[:7]) == (0, "troupe ")


def test_nothing_is_left_uncollected_at_the_exit_when_triton_would_complain(monkeypatch: Any) -> None:
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
