"""What ends a text: an engine stops at the ids of its model, wherever its tokenizer comes from."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, ConfigError, Engine, EngineConfig, EngineDead, SamplingParams
from engine.messages import AbortRequest
from grammar import GrammarSpec
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.waiting import wait_until

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


async def test_a_start_that_a_close_overtakes_is_not_a_cancellation() -> None:
    """Whoever waits for it was not cancelled, and a TaskGroup would not even notice."""
    engine = Engine(EngineConfig(mock_step_ms=1.0))
    start = asyncio.ensure_future(engine.start())
    await wait_until(lambda: engine.state == "starting")
    await engine.close()
    with pytest.raises(EngineDead, match="the engine was closed while it started"):
        await start
    assert engine.state == "closed"


async def test_nobody_waits_less_than_not_at_all() -> None:
    """A stop string ends a text before the scheduler knows, which has the request among those that run."""
    async with Engine(EngineConfig(mock_step_ms=1.0)) as engine:
        async for output in engine.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True)):
            text = output.outputs[0].text
        company = engine._supervisor.company
        assert company is not None
        seen: list[tuple[int, int]] = []

        def look() -> None:
            assert company is not None
            seen.append((company.stats().num_waiting, company.num_queued))

        def tell(abort: AbortRequest) -> None:
            asyncio.get_running_loop().call_soon(look)
            company.scheduler.tell(abort)

        company.detokenizer._tell_scheduler = tell
        params = SamplingParams(max_tokens=50, ignore_eos=True, stop=[text[-3:]])
        outputs = [output async for output in engine.generate("Hello", params)]
        assert outputs[-1].outputs[0].finish_reason == "stop"
    assert seen == [(0, 0)]
