"""The whole engine: admission, close, crashes, and the ends of texts."""

import asyncio
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    LLM,
    ConfigError,
    Engine,
    EngineConfig,
    EngineDead,
    EngineOverloaded,
    RequestOutput,
    SamplingParams,
)
from engine.worker.model_runner import ModelRunner
from grammar import GrammarError, GrammarSpec
from tests.engine.failing_step import fail_next_step
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, output_kind="delta")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def _explode(*_: object) -> None:
    raise RuntimeError("the device is on fire")


async def complete(
    engine: Engine, prompt: str | list[int] = "hello", params: SamplingParams = GREEDY
) -> RequestOutput:
    return [output async for output in engine.generate(prompt, params)][-1]


async def test_a_loop_that_is_never_idle_does_not_stop_the_engine(make_config: MakeConfig) -> None:
    """With Python's own switch interval the executor got the interpreter once in seconds, or never."""
    sys.setswitchinterval(0.005)

    async def spin() -> None:
        while True:
            end = time.perf_counter() + 0.001
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)

    async with Engine(make_config()) as engine:
        assert sys.getswitchinterval() < 0.0001
        spinning = asyncio.ensure_future(spin())
        output = await asyncio.wait_for(complete(engine), 30)
        spinning.cancel()
    assert len(output.outputs[0].token_ids) == 8


async def test_deltas_add_up_to_the_whole_and_merge_for_a_slow_reader(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, output_kind="delta")
        whole = (await complete(engine, params=replace(params, output_kind="cumulative"))).outputs[0]
        deltas = [output.outputs[0] async for output in engine.generate("hello", params) if output.outputs]
        stream = engine.generate("hello", params)
        merged = [(await anext(stream)).outputs[0]]
        await wait_until(lambda: engine.stats().finished["length"] == 3)
        merged += [output.outputs[0] async for output in stream]
    assert len(merged) == 2
    for parts in (deltas, merged):
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


async def test_prompt_logprobs_cover_the_prompt_also_in_chunks(make_config: MakeConfig) -> None:
    prompt = [3 + number % 100 for number in range(75)]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    found = []
    for budget in (1024, 32):
        async with Engine(make_config(max_num_batched_tokens=budget)) as engine:
            found.append((await complete(engine, prompt, params)).prompt_logprobs or [])
    whole, chunked = found
    assert [None if entry is None else entry.token.token_id for entry in whole] == [None, *prompt[1:]]
    assert len(chunked) == len(whole)
    for one, other in zip(whole[1:], chunked[1:], strict=True):
        assert one is not None and other is not None
        assert one.token.logprob == pytest.approx(other.token.logprob, abs=1e-4)


async def test_n_completions_share_a_prompt_and_end_together(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        params = SamplingParams(n=4, seed=1, max_tokens=12, ignore_eos=True)
        output = await complete(engine, "a long one " * 20, params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert output.num_cached_tokens == 0, "a cold prompt, whatever its siblings find"
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert all(completion.finish_reason == "length" for completion in output.outputs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec.regex("(unclosed"), "unclosed"),
        (GrammarSpec.json_schema({"properties": {"a": {"$dynamicRef": "#x"}}}), "/properties/a"),
        (GrammarSpec.ebnf("root ::= missing"), "missing"),
    ],
    ids=["regex", "schema", "ebnf"],
)
async def test_a_bad_grammar_fails_only_its_own_request(
    spec: GrammarSpec, message: str, make_config: MakeConfig
) -> None:
    """Prompts in chunks go on, and so do good grammars beside them."""
    async with Engine(make_config(max_num_batched_tokens=32)) as engine:
        running = asyncio.create_task(complete(engine, [5] * 900))
        with pytest.raises(GrammarError, match=message):
            await complete(engine, params=SamplingParams(grammar=spec))
        assert (await running).finished
        good = SamplingParams(grammar=GrammarSpec.choice(["yes"]))
        for others in ([], [complete(engine, [6] * 900)]):
            answer, *_ = await asyncio.gather(complete(engine, params=good), *others)
            assert answer.outputs[0].text == "yes"


async def test_a_full_queue_refuses_with_a_hint(make_config: MakeConfig) -> None:
    async with Engine(make_config(max_num_waiting=2, max_num_seqs=1)) as engine:
        running, *others = [engine.generate("hello", LONG) for _ in range(3)]
        await anext(running)
        waiting = [asyncio.create_task(anext(stream)) for stream in others]
        await wait_until(lambda: engine.stats().num_waiting == 2)
        with pytest.raises(EngineOverloaded, match="2 requests are waiting and at most 2 may"):
            await complete(engine)
        for task in waiting:
            task.cancel()


async def test_a_crash_is_a_pause_and_changes_no_text(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=60, seed=3, n=2, ignore_eos=True, repetition_penalty=1.2, logprobs=1)
    async with Engine(make_config()) as engine:
        before = (await complete(engine, params=params)).outputs
        queried = engine.stats().prefix_cache_queries
        streams = [engine.generate("hello", params) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        with caplog.at_level(logging.ERROR):
            fail_next_step(monkeypatch, "the device is on fire")
            for stream in streams:
                assert [output async for output in stream][-1].outputs == before
        assert engine.error == "RuntimeError: the device is on fire"
        assert len(caplog.records) == 1
        stats = engine.stats()
        assert (engine.state, stats.num_restarts, stats.num_resumed) == ("ready", 1, 3)
        assert stats.finished["length"] == 8
        assert stats.prefix_cache_queries >= 7 * queried  # three of them before the crash
        assert stats.num_free_blocks == stats.num_blocks


async def test_an_engine_that_keeps_crashing_stays_down(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config(max_restarts=1)) as engine:
        monkeypatch.setattr(ModelRunner, "execute", _explode)
        assert (await complete(engine)).outputs[0].finish_reason == "error"
        await wait_until(lambda: engine.state == "dead")
        with pytest.raises(EngineDead, match="the engine is dead"):
            await complete(engine)


async def test_a_start_that_cannot_work_raises_a_config_error(make_config: MakeConfig) -> None:
    engine = Engine(make_config(max_model_len=10**6))
    with pytest.raises(ConfigError, match="max_model_len=1000000 exceeds the checkpoint's 1024"):
        await engine.start()
    await engine.close()


async def test_a_closed_engine_says_so(make_config: MakeConfig) -> None:
    engine = Engine(make_config())
    with pytest.raises(EngineDead, match="the engine is new"):
        await complete(engine)
    async with engine:
        pass
    with pytest.raises(EngineDead, match="the engine is closed"):
        await complete(engine)


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
def test_a_text_ends_at_what_the_models_folder_names(model_folder: Path, tmp_path: Path, way: str, name: str) -> None:
    name_ends(model_folder / name, [0, END])
    settings: dict[str, Any] = {"skip_tokenizer_init": way == "no tokenizer"}
    if way == "tokenizer elsewhere":
        settings["tokenizer"] = str(make_byte_level_folder(tmp_path / "tokenizer"))
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={END: 100.0})
    with LLM(str(model_folder), num_blocks=20, num_threads=1, enable_native_ops=False, **settings) as llm:
        (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("stop", [END])


def test_a_grammar_needs_an_end_within_the_vocabulary(model_folder: Path) -> None:
    name_ends(model_folder / "generation_config.json", [99999])
    params = SamplingParams(max_tokens=20, temperature=0, grammar=GrammarSpec.regex("[a-f]{6}"))
    settings: dict[str, Any] = {"num_blocks": 20, "num_threads": 1, "enable_native_ops": False}
    with LLM(str(model_folder), **settings) as llm:
        (output,) = llm.generate("hi", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    path = model_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    with (
        LLM(str(model_folder), **settings) as llm,
        pytest.raises(ConfigError, match=r"needs an eos_token_id below vocab_size=\d+.*are \[99999\]"),
    ):
        llm.generate("hi", params, use_tqdm=False)


async def test_a_start_that_a_close_overtakes_is_not_a_cancellation() -> None:
    """The caller of `start` was not cancelled, and a TaskGroup would ignore a cancellation."""
    engine = Engine(EngineConfig(mock_step_ms=1.0))
    start = asyncio.ensure_future(engine.start())
    await wait_until(lambda: engine.state == "starting")
    await engine.close()
    with pytest.raises(EngineDead, match="the engine was closed while it started"):
        await start
    assert engine.state == "closed"
