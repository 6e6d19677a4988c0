"""A TROUPE_ variable that is none is refused, like a flag that is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import app
from app.cli.main import main
from app.cli.variables import CONFIGS, check_variables
from app.config import AppConfig, UsageError, make_config


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("TROUPE_MODLE", "unknown variable TROUPE_MODLE; did you mean TROUPE_MODEL? "),
        ("TROUPE_MAX_MODEL_LENGTH", "did you mean TROUPE_MAX_MODEL_LEN? "),
        ("TROUPE_model", "did you mean TROUPE_MODEL? "),
        ("TROUPE_ADMINKEY", "did you mean TROUPE_ADMIN_KEY? "),
        ("TROUPE_QQQ", "unknown variable TROUPE_QQQ (--help"),
    ],
)
def test_a_mistyped_variable_is_named_with_the_closest_one_and_without_its_value(
    variable: str, words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        check_variables({"TROUPE_PORT": "1", variable: "secret"})
    assert "secret" not in str(caught.value)


def test_variables_of_every_verb_and_of_others_and_empty_ones_pass() -> None:
    check_variables({"TROUPE_MAX_NUM_SEQS": "1", "TROUPE_UI": "0", "TROUPE_URL": "x", "TROUPE_SETS": "x"})
    check_variables({"TROUPE_MODLE": "", "TROUPER": "x", "PATH": "x"})
    check_variables({"TROUPE_SERVICE_HOST": "10.0.0.1", "TROUPE_PORT_7860_TCP_ADDR": "10.0.0.1"})


@pytest.mark.parametrize("scheme", ["tcp", "udp", "sctp"])
def test_the_variables_of_a_kubernetes_service_named_troupe_are_no_settings(scheme: str) -> None:
    environ = {"TROUPE_PORT": f"{scheme}://10.0.0.1:7860", "TROUPE_SERVICE_HOST": "10.0.0.1"}
    check_variables(environ)
    assert make_config(AppConfig, {}, environ) == AppConfig()
    assert make_config(AppConfig, {"port": 80}, environ).port == 80


@pytest.mark.parametrize("argv", [["serve", "--port", "99999"], ["complete", ""]])
def test_no_verb_runs_on_a_mistyped_variable(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROUPE_MAX_MODEL_LENGTH", "5")
    assert main(argv) == 2
    assert "did you mean TROUPE_MAX_MODEL_LEN?" in capsys.readouterr().err


def test_every_config_whose_fields_become_flags_is_known() -> None:
    texts = [path.read_text(encoding="utf-8") for path in Path(app.__file__).parent.rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"add_flags\(\w+, (\w+)\)", text)}
    found |= {name for text in texts for name in re.findall(r"make_config\((\w+), ", text)}
    assert found == {config.__name__ for config in CONFIGS}
