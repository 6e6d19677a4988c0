"""Stages of a pipeline: the same texts as one rank, batches that run side by side, and a rank that ends."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError
from engine.model import DecoderModel, load_model, read_model_config
from engine.model.sharding import Sharding
from engine.parallel.leader import StagedHidden
from engine.parallel.load import limit_ops
from engine.parallel.ranks import Ranks
from engine.parallel.stages import split_layers
from kernels.cpu import make_native_ops
from tests.engine.mixed_requests import TIGHT, make_mixed_requests, run_mixed
from tests.engine.model.drive import make_transformers_model, save
from tests.engine.parallel.test_ranks import find_processes, generate
from tests.engine.parallel.test_sharding import EIGHTHS, MODELS, drive
from tests.kernels.cpu.conftest import require_library

MakeConfig = Callable[..., EngineConfig]


class StageChain:
    """The stages of a model, one after the other, in place of a whole model."""

    def __init__(self, folder: Path, num_stages: int, **options: Any) -> None:
        self.layers = split_layers(read_model_config(folder), num_stages)
        self.stages = [load_model(folder, sharding=Sharding(layers=each), **options) for each in self.layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stages[0], name)

    def __call__(self, *step: Any) -> Tensor:
        ids, positions, caches, *rest = step
        stream = None
        for stage, layers in zip(self.stages, self.layers, strict=True):
            assert isinstance(stage, DecoderModel)
            stream = stage(ids, positions, caches[slice(*layers)], *rest, received=stream)
        assert stream is not None
        return stream


@pytest.mark.parametrize(("name", "quantization"), [*((name, None) for name in MODELS), ("biases", "int8")])
def test_stages_compute_the_bits_of_one_rank(name: str, quantization: Any, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    folder = save(make_transformers_model(family, **EIGHTHS | overrides), tmp_path)
    ops = make_native_ops(require_library(), 1)
    expected = drive(load_model(folder, ops=ops, quantization=quantization))
    for num_stages in (2, 3) if name == "tied head" else (3,):
        chain = StageChain(folder, num_stages, ops=limit_ops(ops), quantization=quantization)
        found = drive(chain)
        assert torch.equal(found, expected), f"{num_stages}: {(found - expected).abs().max()}"


@pytest.mark.parametrize(
    ("changes", "of_one"),
    [
        pytest.param({"pipeline_parallel_size": 3}, {}, marks=pytest.mark.soak),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {"batch_invariant_tp": True}),
    ],
)
async def test_mixed_requests_have_the_tokens_and_logprobs_of_one_rank(
    changes: dict[str, Any], of_one: dict[str, Any], make_config: MakeConfig
) -> None:
    requests = make_mixed_requests(num_requests=26)
    settings = TIGHT | {"core": "local", "attention_backend": "native"}
    async with Engine(make_config(**settings, **of_one)) as engine:
        expected = await run_mixed(engine, requests)
    async with Engine(make_config(**settings, **changes)) as engine:
        assert await run_mixed(engine, requests) == expected
        stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0


def kill_in(owner: type, method: str, rank: int, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank be dead, and the others stopped, when rank 0 calls a method for the given time from now on."""
    original, calls = getattr(owner, method), count(1)

    def kill_first(*args: Any) -> Any:
        if next(calls) == call:
            processes = sorted(find_processes("engine.parallel.rank_process", os.getpid()))
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            os.kill(processes[rank - 1], signal.SIGKILL)
            with suppress(ChildProcessError):  # another thread has waited for it
                os.waitid(os.P_PID, processes[rank - 1], os.WEXITED | os.WNOWAIT)
        return original(*args)

    monkeypatch.setattr(owner, method, kill_first)


async def test_requests_go_on_whenever_a_rank_of_any_stage_is_killed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    config = make_config(core="local", pipeline_parallel_size=3, max_restarts=5)
    async with Engine(config) as engine:
        expected = await generate(engine, params)
        kill_in(Ranks, "pass_on", 1, 20, monkeypatch)  # and another one while the model is loaded again
        kill_in(Ranks, "wait_loaded", 2, 1, monkeypatch)
        assert await generate(engine, params) == expected
        assert engine.stats().num_restarts == 2
        kill_in(StagedHidden, "wait", 2, 20, monkeypatch)
        assert await generate(engine, params) == expected
        assert engine.stats().num_restarts == 3


@pytest.mark.parametrize(
    "changes",
    [{"kv_offload_gb": 1.0}, {"kv_transfer_config": '{"kv_role": "kv_both"}'}, {"enable_lora": True}],
)
def test_what_stages_do_not_support_is_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"^{name}=.* does not work with pipeline_parallel_size above 1"):
        EngineConfig(pipeline_parallel_size=2, **changes)


def test_more_stages_than_layers_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=9 exceeds the model's"):
        split_layers(read_model_config(checkpoint), 9)


def test_each_stage_holds_its_layers_alone_and_the_first_one_the_head(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 8, "vocab_size": 1000}
    folder = save(make_transformers_model("qwen3", **EIGHTHS | overrides), tmp_path)
    chain = StageChain(folder, 3)
    assert chain.layers[0][0] == 0 and chain.layers[-1][1] == 8
    assert all(end == first for (_, end), (first, _) in pairwise(chain.layers))
    sizes = [end - first for first, end in chain.layers]
    assert sizes[0] < min(sizes[1:]) and max(sizes[1:]) - min(sizes[1:]) <= 1
    assert [stage.embed_tokens.numel() > 0 for stage in chain.stages] == [True, False, False]
    assert [hasattr(stage, "lm_head") for stage in chain.stages] == [True, False, False]
