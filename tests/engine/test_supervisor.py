"""What ends a text: an engine stops at the ids of its model, wherever its tokenizer comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, ConfigError, SamplingParams
from grammar import GrammarSpec
from tests.engine.tokenizer_folders import make_byte_level_folder

END = 37  # an ordinary token of the tokenizer


@pytest.fixture
def model_folder(checkpoint: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def name_ends(path: Path, ids: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | {"eos_token_id": ids}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("way", ["tokenizer of its own", "tokenizer elsewhere", "no tokenizer"])
def test_a_text_ends_at_what_the_models_folder_names(
    model_folder: Path, tmp_path: Path, way: str, name: str
) -> None:
    name_ends(model_folder / name, [0, END])
    settings: dict[str, Any] = {"skip_tokenizer_init": way == "no tokenizer"}
    if way == "tokenizer elsewhere":
        settings["tokenizer"] = str(make_byte_level_folder(tmp_path / "tokenizer"))
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={END: 100.0})
    with LLM(str(model_folder), num_blocks=20, num_threads=1, enable_native_ops=False, **settings) as llm:
        (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("stop", [END])


def test_ends_beyond_the_vocabulary_do_not_stop_grammars(model_folder: Path) -> None:
    name_ends(model_folder / "generation_config.json", [99999])
    params = SamplingParams(max_tokens=20, temperature=0, grammar=GrammarSpec.regex("[a-f]{6}"))
    with LLM(str(model_folder), num_blocks=20, num_threads=1, enable_native_ops=False) as llm:
        (output,) = llm.generate("hi", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"


def test_a_grammar_without_any_end_is_a_config_error(model_folder: Path) -> None:
    name_ends(model_folder / "generation_config.json", [99999])
    path = model_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    params = SamplingParams(max_tokens=20, grammar=GrammarSpec.regex("[a-f]{6}"))
    with (
        LLM(str(model_folder), num_blocks=20, num_threads=1, enable_native_ops=False) as llm,
        pytest.raises(ConfigError, match=r"needs an eos_token_id below vocab_size=\d+.*are \[99999\]"),
    ):
        llm.generate("hi", params, use_tqdm=False)
