"""Worker: what it makes of the config on this machine, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.config import WorkerConfig
from engine.model import DecoderModel, ModelConfig, RopeConfig
from engine.worker.input_batch import InputBatch
from engine.worker.kv_cache import compute_bytes_per_block
from engine.worker.native_swap import NativeSwap
from engine.worker.step_memory import StepMemory
from engine.worker.worker import Worker
from kernels import torch_ops
from tests.engine.model.drive import make_transformers_model, save

MakeConfig = Callable[..., EngineConfig]


def make_worker(config: EngineConfig) -> Worker:
    return Worker(config, eos_token_ids=(1,))


def load_worker(config: EngineConfig) -> Worker:
    worker = make_worker(config)
    worker.load()
    return worker


def test_a_device_that_is_not_there_is_refused_with_a_way_out(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="device='cuda': no CUDA device is visible to torch; use --device cpu"
    ):
        make_worker(make_config(device="cuda")).load()


def test_auto_falls_back_to_cpu_and_float32(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    worker = load_worker(make_config(num_threads=2))
    resolved = worker.resolved.worker
    assert (resolved.device, resolved.dtype, resolved.num_threads) == ("cpu", "float32", 2)
    assert torch.get_num_threads() == 2
    assert [phase for phase, _ in worker.timeline] == ["weights", "kv cache", "warm-up"]


def test_a_dtype_is_taken_at_its_word(make_config: MakeConfig) -> None:
    worker = load_worker(make_config(device="cpu", dtype="bfloat16"))
    assert {cache.dtype for pair in worker.kv_caches for cache in pair} == {torch.bfloat16}


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_shortest_length_that_is_allowed_has_room_for_the_warm_up(
    make_config: MakeConfig, block_size: int
) -> None:
    limits = {"max_model_len": 2, "max_num_seqs": 1, "block_size": block_size}
    worker = load_worker(make_config(device="cpu", **limits))
    assert worker.resolved.max_model_len == 2


def test_the_cache_has_the_blocks_that_were_asked_for(make_config: MakeConfig) -> None:
    worker = load_worker(make_config(device="cpu", num_blocks=9, block_size=8))
    config = worker.model_config
    assert len(worker.kv_caches) == config.num_hidden_layers
    assert worker.kv_caches[0][0].shape == (9, 8, config.num_key_value_heads, config.head_dim)
    assert worker.resolved.max_model_len == 64


def test_a_memory_share_becomes_blocks(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**30, 2**29))
    worker = load_worker(make_config(device="cpu", num_blocks=None, memory_share=0.01))
    bytes_per_block = compute_bytes_per_block(worker.model_config, 16, torch.float32)
    assert worker.resolved.cache.num_blocks == int(2**30 * 0.01) // bytes_per_block


def test_no_more_than_the_free_memory_is_taken(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**30, 2**26))
    worker = load_worker(make_config(device="cpu", num_blocks=None, memory_share=1.0))
    bytes_per_block = compute_bytes_per_block(worker.model_config, 16, torch.float32)
    assert worker.resolved.cache.num_blocks * bytes_per_block <= 0.8 * 2**26


def test_a_host_leaves_room_for_the_largest_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (1000, 500))
    worker = make_worker(make_config(memory_share=0.3))
    worker.device = torch.device("cpu")
    assert worker._measure_free_bytes(step_bytes=100) == 300, "the share"
    assert worker._measure_free_bytes(step_bytes=200) == 240, "0.8 of what a step leaves"
    assert worker._measure_free_bytes(step_bytes=900) == 0


def test_a_host_leaves_room_for_the_scratch_of_ops_and_for_those_that_come(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**40, 2**30))
    worker = make_worker(make_config(memory_share=1.0))
    worker.device = torch.device("cpu")
    config = ModelConfig("Qwen3ForCausalLM", 1000, 32, 64, 2, 4, 2, 8, 2**10, RopeConfig())

    def measure(scratch: int, awaited: int = 0, move: int = 0) -> int:
        ops = replace(torch_ops.make_ops(), estimate_scratch=lambda _: scratch)
        worker.model = cast(DecoderModel, SimpleNamespace(ops=ops))
        swap = SimpleNamespace(estimate_scratch=lambda _: awaited, estimate_move=lambda _: move)
        worker._native = cast(NativeSwap, swap)
        return worker._measure_cache_room(config, WorkerConfig("", "auto", "float32", "cpu", 1, 0), 2**12)

    whole = measure(0)
    assert 0 < whole < 0.8 * 2**30
    assert measure(10**6) == measure(0, 10**6) == measure(0, 0, 10**6) == measure(5, 10**6) == whole - 800_000


def test_no_memory_at_all_is_a_config_error(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**30, 0))
    with pytest.raises(ConfigError, match="the KV cache gets 0 MiB, and one block takes"):
        make_worker(make_config(device="cpu", num_blocks=None)).load()


def test_more_blocks_than_the_memory_holds_are_refused_before_they_are_touched(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocating only reserves: the process would be killed later, when the blocks are written."""
    monkeypatch.setattr(Worker, "warm_up", Worker.reset)
    worker = load_worker(make_config(device="cpu", num_blocks=3))
    size = 3 * compute_bytes_per_block(worker.model_config, 16, torch.float32)
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**30, size))
    make_worker(make_config(device="cpu", num_blocks=3)).load()
    monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**30, size - 1))
    with pytest.raises(
        ConfigError, match=rf"num_blocks=3: cpu has no room .* \({size} bytes\).* 0.0 GiB are free"
    ):
        make_worker(make_config(device="cpu", num_blocks=3)).load()


@pytest.mark.parametrize(("max_model_len", "is_cached"), [(None, False), (256, False), (64, True)])
def test_dynamic_rope_beyond_its_original_length_goes_without_the_prefix_cache(
    tmp_path: Path, max_model_len: int | None, is_cached: bool
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}
    save(make_transformers_model("llama", max_position_embeddings=64, rope_parameters=rope), tmp_path)
    config = EngineConfig(
        model=str(tmp_path), max_model_len=max_model_len, num_blocks=50, num_threads=1, device="cpu"
    )
    worker = load_worker(config)
    assert worker.resolved.cache.enable_prefix_caching is is_cached
    notices = " ".join(worker.resolved.notices)
    assert ("beyond 64 tokens the same seed need not" in notices) is not is_cached
    worker.close()


def test_what_is_closed_holds_no_memory(make_config: MakeConfig) -> None:
    """The next engine of the process needs it."""
    worker = load_worker(make_config(device="cpu"))
    held = [weakref.ref(each) for each in (worker.model, worker.runner, worker.kv_caches[0][0])]
    worker.close(gives_back=False)
    assert all(each() is not None for each in held), "a step may still run"
    worker.close()
    gc.collect()
    assert not any(each() for each in held)
    assert worker.describe()["ops"] == "asleep"
    worker.close()


def test_the_largest_step_is_estimated_with_its_scratch_and_logprobs() -> None:
    config = ModelConfig("Qwen3ForCausalLM", 1000, 32, 64, 2, 4, 2, 8, 128, RopeConfig())
    # hidden states 4 * 32, MLP 3 * 64, attention 2 * (4 + 2) * 8 numbers of 2 bytes
    per_token = (128 + 192 + 96) * 2
    # logits of 2 bytes, and four times 4: a copy for logprobs, one for penalties, counts; then what orders logprobs
    per_row = 1000 * (2 + 16 + 20)
    memory = StepMemory(config, torch.bfloat16, num_tokens=100, num_rows=70)
    assert memory.estimate_step() == 100 * per_token + 70 * per_row
    few = replace(memory, num_rows=3)
    assert few.estimate_step() == 100 * per_token + 64 * per_row, "prompts are scored 64 tokens at a time"
    recorded = replace(memory, num_recorded_rows=72, estimate_scratch=lambda shape: sum(astuple(shape)))
    model = 4 + 2 + 8 + 32 + 64 + 2
    scratch = (70 + 100 + 5 + 9 + model) + (72 + 72 + 5 + 9 + model)
    assert recorded.estimate_step(5, 9) == 172 * per_token + 70 * per_row + scratch


def test_chunks_bound_what_logprobs_take() -> None:
    config = ModelConfig("Qwen3ForCausalLM", 2**20, 32, 64, 2, 4, 2, 8, 128, RopeConfig())
    small, large = (StepMemory(config, torch.float32, 0, rows).estimate_step() for rows in (64, 128))
    assert large - small == 64 * 2**20 * 20


def test_rows_are_estimated_no_smaller_than_they_are(make_config: MakeConfig) -> None:
    worker = load_worker(make_config(device="cpu", max_num_seqs=7))
    max_len = worker.resolved.max_model_len
    batch = InputBatch(7, max_len, 16, torch.device("cpu"), is_gathered=True)
    rope = worker.model.rope
    rope.reserve(max_len)
    tensors = (batch._token_pool, batch._device_tables, rope._cos, rope._sin)
    estimate = StepMemory(worker.model_config, torch.float32, 9, 7).estimate_rows(max_len, 16)
    assert sum(each.nbytes for each in tensors if each is not None) <= estimate


def test_a_gpu_leaves_room_for_the_largest_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 1000))
    worker = make_worker(make_config(memory_share=0.9))
    worker.device = torch.device("cuda")
    assert worker._measure_free_bytes(step_bytes=10) == 700, "the share, less what others use"
    assert worker._measure_free_bytes(step_bytes=300) == 500, "what a step leaves"
    assert worker._measure_free_bytes(step_bytes=900) == 0
    assert len(emptied) == 3


@pytest.mark.parametrize("scratch", [0, 2**26])
def test_the_cache_leaves_room_for_the_rows_and_the_scratch_of_attention(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, scratch: int
) -> None:
    free = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(Worker, "_empty_cache", lambda _: None)
    worker = make_worker(make_config(memory_share=1.0, max_num_seqs=50))
    worker.device = torch.device("cuda")
    ops = replace(torch_ops.make_ops(), estimate_scratch=lambda _: scratch)
    worker.model = cast(DecoderModel, SimpleNamespace(ops=ops))
    config = ModelConfig("Qwen3ForCausalLM", 1000, 32, 64, 2, 4, 2, 8, 2**20, RopeConfig())
    resolved = WorkerConfig("", "auto", "bfloat16", "cuda", 1, 0)
    memory = StepMemory(
        config, torch.bfloat16, worker.config.max_num_batched_tokens, 50, 0, ops.estimate_scratch
    )
    for block_bytes, max_len in ((16, 2**20), (2**24, 2**9)):
        room = worker._measure_cache_room(config, resolved, block_bytes)
        assert room <= free - memory.estimate_step() - memory.estimate_rows(max_len, 16)
        assert room + memory.estimate_step() >= free // 4, "a row is no longer than the cache"


def test_a_reset_forgets_rows_and_keeps_weights_and_memory(make_config: MakeConfig) -> None:
    worker = load_worker(make_config(device="cpu"))
    model, cache, runner = worker.model, worker.kv_caches[0][0].data_ptr(), worker.runner
    worker.reset()
    assert worker.runner is not runner
    assert worker.runner.model is model
    assert worker.kv_caches[0][0].data_ptr() == cache
    assert not worker.has_parked


def test_a_reset_lets_go_of_the_rows_before_it_makes_new_ones(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one token pool on a GPU, not for two."""
    worker = load_worker(make_config(device="cpu"))
    old = weakref.ref(worker.runner.batch)
    alive: list[bool] = []

    def make_batch(*args: Any) -> InputBatch:
        alive.append(old() is not None)
        return InputBatch(*args)

    monkeypatch.setattr("engine.worker.worker.InputBatch", make_batch)
    worker.reset()
    assert alive == [False]


def test_a_light_sleep_gives_the_rope_tables_back(make_config: MakeConfig) -> None:
    worker = load_worker(make_config(device="cpu"))
    rope = worker.model.rope
    rope.reserve(2048)
    before = rope._cos, rope._sin
    worker.sleep(1)
    assert rope._cos.numel() == rope._sin.numel() == 0
    worker.reset()
    rope.reserve(2048)
    for table, old in zip((rope._cos, rope._sin), before, strict=True):
        assert table.device == worker.device and torch.equal(table, old)
