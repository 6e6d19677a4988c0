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

MakeWorker, SayMemory = Callable[..., Worker], Callable[[int, int], None]
CONFIG = ModelConfig("Qwen3ForCausalLM", 1000, 32, 64, 2, 4, 2, 8, 128, RopeConfig())


@pytest.fixture
def make_worker(checkpoint: Path) -> MakeWorker:
    def make(**changes: Any) -> Worker:
        settings = {"model": str(checkpoint), "num_blocks": 400, "max_num_seqs": 32, "num_threads": 1}
        return Worker(EngineConfig(**(settings | changes)), eos_token_ids=(1,))

    return make


@pytest.fixture
def load_worker(make_worker: MakeWorker) -> MakeWorker:
    def load(**settings: Any) -> Worker:
        worker = make_worker(**({"device": "cpu"} | settings))
        worker.load()
        return worker

    return load


@pytest.fixture
def say_memory(monkeypatch: pytest.MonkeyPatch) -> SayMemory:
    """Makes the host say how much memory it has, and how much of it is free."""

    def say(total: int, free: int) -> None:
        monkeypatch.setattr("engine.worker.worker.measure_host_memory", lambda: (total, free))

    return say


def test_without_a_gpu_cuda_is_refused_with_a_way_out_and_auto_takes_the_cpu_and_float32(
    load_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "device='cuda': no CUDA device is visible to torch; use --device cpu"
    with pytest.raises(ConfigError, match=message):
        load_worker(device="cuda")
    worker = load_worker(device="auto", num_threads=2)
    resolved = worker.resolved.worker
    assert (resolved.device, resolved.dtype, resolved.num_threads) == ("cpu", "float32", 2)
    assert torch.get_num_threads() == 2
    assert [phase for phase, _ in worker._timeline] == ["weights", "kv cache", "warm-up"]


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_shortest_length_that_is_allowed_has_room_for_the_warm_up(
    load_worker: MakeWorker, block_size: int
) -> None:
    worker = load_worker(max_model_len=2, max_num_seqs=1, block_size=block_size)
    assert worker.resolved.max_model_len == 2


def test_the_cache_has_the_blocks_and_the_dtype_that_were_asked_for(load_worker: MakeWorker) -> None:
    worker = load_worker(num_blocks=9, block_size=8, dtype="bfloat16")
    config = worker.model_config
    assert len(worker.kv_caches) == config.num_hidden_layers
    shapes = {(cache.dtype, cache.shape) for pair in worker.kv_caches for cache in pair}
    assert shapes == {(torch.bfloat16, (9, 8, config.num_key_value_heads, config.head_dim))}
    assert worker.resolved.max_model_len == 64


def test_a_memory_share_becomes_blocks_of_no_more_than_the_free_memory(
    load_worker: MakeWorker, say_memory: SayMemory
) -> None:
    say_memory(2**30, 2**29)
    worker = load_worker(num_blocks=None, memory_share=0.01)
    bytes_per_block = compute_bytes_per_block(worker.model_config, 16, torch.float32)
    assert worker.resolved.cache.num_blocks == int(2**30 * 0.01) // bytes_per_block
    say_memory(2**30, 2**26)
    worker = load_worker(num_blocks=None, memory_share=1.0)
    assert worker.resolved.cache.num_blocks * bytes_per_block <= 0.8 * 2**26


def test_a_host_leaves_room_for_the_largest_step(make_worker: MakeWorker, say_memory: SayMemory) -> None:
    say_memory(1000, 500)
    worker = make_worker(memory_share=0.3)
    worker.device = torch.device("cpu")
    assert worker._measure_free_bytes(step_bytes=100) == 300, "the share"
    assert worker._measure_free_bytes(step_bytes=200) == 240, "0.8 of what a step leaves"
    assert worker._measure_free_bytes(step_bytes=900) == 0


def test_a_host_leaves_room_for_the_scratch_of_ops_and_for_those_that_come(
    make_worker: MakeWorker, say_memory: SayMemory
) -> None:
    say_memory(2**40, 2**30)
    worker = make_worker(memory_share=1.0)
    worker.device = torch.device("cpu")

    def measure(scratch: int, awaited: int = 0, move: int = 0) -> int:
        ops = replace(torch_ops.make_ops(), estimate_scratch=lambda _: scratch)
        worker._model = cast(DecoderModel, SimpleNamespace(ops=ops))
        swap = SimpleNamespace(estimate_scratch=lambda _: awaited, estimate_move=lambda _: move)
        worker._native = cast(NativeSwap, swap)
        config = replace(CONFIG, max_position_embeddings=2**10)
        return worker._measure_cache_room(config, WorkerConfig("", "auto", "float32", "cpu", 1, 0), 2**12)

    whole = measure(0)
    assert 0 < whole < 0.8 * 2**30
    assert measure(10**6) == measure(0, 10**6) == measure(0, 0, 10**6) == measure(5, 10**6) == whole - 800_000


def test_a_cache_without_room_is_refused_before_it_is_touched(
    load_worker: MakeWorker, say_memory: SayMemory, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """Allocating only reserves: the process would be killed later, when the blocks are written."""
    monkeypatch.setattr(Worker, "warm_up", Worker.reset)
    say_memory(2**30, 0)
    with pytest.raises(ConfigError, match="the KV cache gets 0 MiB, and one block takes"):
        load_worker(num_blocks=None)
    size = 3 * compute_bytes_per_block(ModelConfig.from_pretrained(checkpoint), 16, torch.float32)
    say_memory(2**30, size)
    load_worker(num_blocks=3)
    say_memory(2**30, size - 1)
    message = rf"num_blocks=3: cpu has no room .* \({size} bytes\).* 0.0 GiB are free"
    with pytest.raises(ConfigError, match=message):
        load_worker(num_blocks=3)


@pytest.mark.parametrize(("max_model_len", "is_cached"), [(None, False), (256, False), (64, True)])
def test_dynamic_rope_beyond_its_original_length_goes_without_the_prefix_cache(
    load_worker: MakeWorker, tmp_path: Path, max_model_len: int | None, is_cached: bool
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}
    save(make_transformers_model("llama", max_position_embeddings=64, rope_parameters=rope), tmp_path)
    worker = load_worker(model=str(tmp_path), max_model_len=max_model_len, num_blocks=50)
    assert worker.resolved.cache.enable_prefix_caching is is_cached
    notices = " ".join(worker.resolved.notices)
    assert ("beyond 64 tokens the same seed need not" in notices) is not is_cached
    worker.close()


def test_what_is_closed_holds_no_memory(load_worker: MakeWorker) -> None:
    """The next engine of the process needs it."""
    worker = load_worker()
    held = [weakref.ref(each) for each in (worker.model, worker.runner, worker.kv_caches[0][0])]
    worker.close(gives_back=False)
    assert all(each() is not None for each in held), "a step may still run"
    worker.close()
    gc.collect()
    assert not any(each() for each in held)
    assert worker.describe()["ops"] == "asleep"
    worker.close()


def test_the_largest_step_is_estimated_with_its_scratch_and_logprobs() -> None:
    # hidden states 4 * 32, MLP 3 * 64, attention 2 * (4 + 2) * 8 numbers of 2 bytes
    per_token = (128 + 192 + 96) * 2
    # logits of 2 bytes, and four times 4: a copy for logprobs, one for penalties, counts; then what orders logprobs
    per_row = 1000 * (2 + 16 + 20)
    memory = StepMemory(CONFIG, torch.bfloat16, num_tokens=100, num_rows=70)
    assert memory.estimate_step() == 100 * per_token + 70 * per_row
    few = replace(memory, num_rows=3)
    assert few.estimate_step() == 100 * per_token + 64 * per_row, "prompts are scored 64 tokens at a time"
    small, large = (
        StepMemory(replace(CONFIG, vocab_size=2**20), torch.float32, 0, n).estimate_step() for n in (64, 128)
    )
    assert large - small == 64 * 2**20 * 20, "what orders logprobs comes in chunks"
    recorded = replace(memory, num_recorded_rows=72, estimate_scratch=lambda shape: sum(astuple(shape)))
    model = 4 + 2 + 8 + 32 + 64 + 2
    scratch = (70 + 100 + 5 + 9 + model) + (72 + 72 + 5 + 9 + model)
    assert recorded.estimate_step(5, 9) == 172 * per_token + 70 * per_row + scratch


def test_rows_are_estimated_no_smaller_than_they_are(load_worker: MakeWorker) -> None:
    worker = load_worker(max_num_seqs=7)
    max_len = worker.resolved.max_model_len
    batch = InputBatch(7, max_len, 16, torch.device("cpu"), is_gathered=True)
    rope = worker.model.rope
    rope.reserve(max_len)
    tensors = (batch._token_pool, batch._device_tables, rope._cos, rope._sin)
    estimate = StepMemory(worker.model_config, torch.float32, 9, 7).estimate_rows(max_len, 16)
    assert sum(each.nbytes for each in tensors if each is not None) <= estimate


def test_a_gpu_leaves_room_for_the_largest_step(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 1000))
    worker = make_worker(memory_share=0.9)
    worker.device = torch.device("cuda")
    assert worker._measure_free_bytes(step_bytes=10) == 700, "the share, less what others use"
    assert worker._measure_free_bytes(step_bytes=300) == 500, "what a step leaves"
    assert worker._measure_free_bytes(step_bytes=900) == 0
    assert len(emptied) == 3


@pytest.mark.parametrize("scratch", [0, 2**26])
def test_the_cache_leaves_room_for_the_rows_and_the_scratch_of_attention(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, scratch: int
) -> None:
    free = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(Worker, "_empty_cache", lambda _: None)
    worker = make_worker(memory_share=1.0, max_num_seqs=50)
    worker.device = torch.device("cuda")
    ops = replace(torch_ops.make_ops(), estimate_scratch=lambda _: scratch)
    worker._model = cast(DecoderModel, SimpleNamespace(ops=ops))
    config = replace(CONFIG, max_position_embeddings=2**20)
    resolved = WorkerConfig("", "auto", "bfloat16", "cuda", 1, 0)
    num_tokens = worker.config.max_num_batched_tokens
    memory = StepMemory(config, torch.bfloat16, num_tokens, 50, 0, ops.estimate_scratch)
    for block_bytes, max_len in ((16, 2**20), (2**24, 2**9)):
        room = worker._measure_cache_room(config, resolved, block_bytes)
        assert room <= free - memory.estimate_step() - memory.estimate_rows(max_len, 16)
        assert room + memory.estimate_step() >= free // 4, "a row is no longer than the cache"


def test_a_reset_forgets_rows_before_it_makes_new_ones_and_keeps_weights_and_memory(
    load_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one token pool on a GPU, not for two."""
    worker = load_worker()
    model, cache, old = worker.model, worker.kv_caches[0][0].data_ptr(), weakref.ref(worker.runner.batch)
    alive: list[bool] = []

    def make_batch(*args: Any) -> InputBatch:
        alive.append(old() is not None)
        return InputBatch(*args)

    monkeypatch.setattr("engine.worker.worker.InputBatch", make_batch)
    worker.reset()
    assert alive == [False]
    assert worker.runner.model is model
    assert worker.kv_caches[0][0].data_ptr() == cache


def test_a_light_sleep_gives_the_rope_tables_back(load_worker: MakeWorker) -> None:
    worker = load_worker()
    rope = worker.model.rope
    rope.reserve(2048)
    before = rope._cos, rope._sin
    worker.sleep(1)
    assert rope._cos.numel() == rope._sin.numel() == 0
    worker.wake()
    rope.reserve(2048)
    for table, old in zip((rope._cos, rope._sin), before, strict=True):
        assert table.device == worker.device and torch.equal(table, old)
