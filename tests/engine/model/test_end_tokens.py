"""Ends of a text: which file names them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.model import read_eos_token_ids


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, []),
        ({"config": {"eos_token_id": [0, 2]}}, [0, 2]),
        ({"config": {"eos_token_id": 7}}, [7]),
        ({"config": {"eos_token_id": None}}, []),
        ({"generation_config": {"eos_token_id": [2, 7]}, "config": {"eos_token_id": 0}}, [2, 7]),
        ({"generation_config": {"do_sample": False}, "config": {"eos_token_id": 0}}, [0]),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 0}}, [0]),
    ],
)
def test_the_generation_config_counts_and_the_config_where_it_says_nothing(
    tmp_path: Path, files: dict[str, Any], ids: list[int]
) -> None:
    write(tmp_path, **files)
    assert read_eos_token_ids(tmp_path) == tuple(ids)
    assert read_eos_token_ids(tmp_path, own=7) == (7, *[each for each in ids if each != 7])


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("value", ["abc", 1.5, {"a": 1}, True, -1, [2, "x"], [[2]]])
def test_ids_that_are_none_are_refused_by_file_and_value(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path, **{name: {"eos_token_id": value}})
    with pytest.raises(ConfigError, match=rf"{name}\.json: eos_token_id=.* must be an integer of at least 0"):
        read_eos_token_ids(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "3", "{"])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json (must hold an object|is not valid JSON)"):
        read_eos_token_ids(tmp_path)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"generation_config\.json is nested deeper than 64 levels"):
        read_eos_token_ids(tmp_path)
