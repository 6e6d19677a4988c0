"""CacheSizer: the room it leaves for weights, rows and the largest step, estimated or counted."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.device.device_memory import DeviceMemory
from engine.device.native_swap import NativeSwap
from engine.model import ModelConfig, RopeConfig
from engine.resolved_config import ResolvedConfig, WorkerConfig
from engine.worker.cache_sizer import CacheSizer
from engine.worker.input_batch import InputBatch
from engine.worker.step_memory import StepMemory
from engine.worker.worker import Worker
from kernels import torch as torch_ops
from kernels.torch.sampling import THREAD_CHUNK_ELEMENTS

MakeConfig = Callable[..., EngineConfig]
MODEL = ModelConfig("Qwen3ForCausalLM", 1000, 32, 64, 2, 4, 2, 8, 128, RopeConfig())
# 2 layers of keys and values, 16 tokens, 2 heads of 8 numbers of 4 bytes
BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4
GIB = 2**30


def make_sizer(device: str = "cpu", model: ModelConfig = MODEL, **settings: Any) -> CacheSizer:
    """Float32; blocks of 16 tokens."""
    specs = [spec.kv_spec for spec in model.layer_specs]
    return CacheSizer(EngineConfig(**settings), WorkerConfig("", "auto", "float32", device, 1, 0), model, specs)


@dataclass
class FakeMemory:
    """A GPU that reports the memory of steps."""

    total: int = GIB
    used: int = 0
    peak: int = 0
    ran: list[Any] = field(default_factory=list)

    def empty_cache(self) -> None:
        """Nothing is kept."""

    def measure(self) -> tuple[int, int]:
        return self.total, self.total - self.used

    def measure_peak(self, run: Callable[[], None]) -> int:
        run()
        return self.peak


def measure(memory: FakeMemory, **settings: Any) -> ResolvedConfig:
    return make_sizer("cuda", **settings).measure(memory, memory.ran.append)


@pytest.mark.parametrize(
    ("used", "peak", "room"),
    [(2**20, 0, 0.9 * GIB - 2**20), (0, GIB / 2, 0.45 * GIB), (GIB / 2, GIB / 4, 0.225 * GIB)],
    ids=["the share, less what is used", "what a step leaves", "what both leave"],
)
def test_a_gpu_leaves_room_for_a_tenth_more_than_the_largest_steps_took(
    used: float, peak: float, room: float
) -> None:
    resolved = measure(FakeMemory(GIB, int(used), int(peak)), memory_share=0.9)
    assert resolved.cache.num_blocks == int(room) // BLOCK_BYTES


def test_the_largest_steps_run_with_rows_as_long_as_there_may_be() -> None:
    memory = FakeMemory(2**24, peak=2**23)
    resolved = measure(
        memory,
        model=replace(MODEL, max_position_embeddings=2**20),
        memory_share=1.0,
        enable_chunked_prefill=False,
    )
    (ran,) = memory.ran
    assert ran.max_model_len == ran.scheduler.max_num_batched_tokens > resolved.max_model_len
    assert ran.max_model_len == (2**24 // BLOCK_BYTES - 1) * 16


def test_a_number_of_blocks_spares_the_measurement() -> None:
    memory = FakeMemory(peak=GIB)
    assert measure(memory, num_blocks=40).cache.num_blocks == 40
    assert memory.ran == []


def test_largest_steps_that_do_not_fit_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="the KV cache gets 0 MiB, and one block takes"):
        measure(FakeMemory(peak=GIB))

    def run(resolved: ResolvedConfig) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    wanted = "max_num_batched_tokens=2048 tokens in max_num_seqs=70 rows does not fit beside the weights; lower one"
    with pytest.raises(ConfigError, match=wanted):
        make_sizer("cuda", max_num_batched_tokens=2048, max_num_seqs=70).measure(FakeMemory(), run)


def test_a_peak_is_what_torch_reserves_beyond_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    answers = {"memory_reserved": 100, "max_memory_reserved": 175, "mem_get_info": (800, 1000)}
    for name in (*answers, "empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name) or answers.get(name))
    memory = DeviceMemory(torch.device("cuda"))
    assert memory.measure_peak(lambda: calls.append("run")) == 75
    order = ["empty_cache", "reset_peak_memory_stats", "memory_reserved", "run", "synchronize"]
    assert calls == [*order, "max_memory_reserved"]
    assert memory.measure() == (1000, 800)
    assert calls[-2:] == ["empty_cache", "mem_get_info"]


@pytest.fixture
def say_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes the host say how much memory it has, and how much of it is free."""

    def say(total: int, free: int) -> None:
        monkeypatch.setattr("engine.worker.cache_sizer.measure_host_memory", lambda: (total, free))

    return say


def test_a_host_leaves_room_for_the_largest_step(say_memory: Callable[[int, int], None]) -> None:
    say_memory(1000, 500)
    sizer = make_sizer(memory_share=0.3)
    assert sizer._share_host(step_bytes=100) == 300, "the share"
    assert sizer._share_host(step_bytes=200) == 240, "0.8 of what a step leaves"
    assert sizer._share_host(step_bytes=900) == 0


def test_a_host_leaves_room_for_the_scratch_of_ops_and_for_those_that_come(
    say_memory: Callable[[int, int], None],
) -> None:
    say_memory(2**40, GIB)
    sizer = make_sizer(model=replace(MODEL, max_position_embeddings=2**10), memory_share=1.0)

    def count_blocks(scratch: int, awaited: int = 0, move: int = 0) -> int:
        ops = replace(torch_ops.make_ops(), estimate_scratch=lambda _: scratch)
        swap = SimpleNamespace(estimate_scratch=lambda _: awaited, estimate_move=lambda _: move)
        return sizer.estimate(ops, cast(NativeSwap, swap)).cache.num_blocks

    whole, part = count_blocks(0), BLOCK_BYTES * 1000
    assert 0 < whole * BLOCK_BYTES < 0.8 * GIB
    assert count_blocks(part) == count_blocks(0, part) == count_blocks(0, 0, part) == count_blocks(5, part)
    assert count_blocks(part) == whole - 800


@pytest.mark.parametrize("scratch", [0, 2**26])
def test_the_cache_leaves_room_for_the_rows_and_the_scratch_of_attention(
    say_memory: Callable[[int, int], None], scratch: int
) -> None:
    say_memory(GIB, GIB)
    sizer = make_sizer(model=replace(MODEL, max_position_embeddings=2**20), memory_share=1.0, max_num_seqs=50)
    ops = replace(torch_ops.make_ops(), estimate_scratch=lambda _: scratch)
    _, num_tokens = sizer.config.find_step_limits("cpu")
    memory = StepMemory(sizer.model, torch.float32, num_tokens, 50, lambda _: scratch)
    resolved = sizer.estimate(ops, None)
    room = resolved.cache.num_blocks * BLOCK_BYTES
    assert room <= GIB - memory.estimate_step() - memory.estimate_rows(resolved.max_model_len, 16)
    assert room + memory.estimate_step() >= GIB // 8, "a row is no longer than the cache"


def test_the_largest_step_is_estimated_with_its_scratch_and_logprobs() -> None:
    # hidden states 4 * 32, MLP 3 * 64, attention 2 * (4 + 2) * 8 numbers of 2 bytes
    per_token = (128 + 192 + 96) * 2
    # logits of 2 bytes, and four times 4: a copy for logprobs, one for penalties, counts
    per_row = 1000 * (2 + 16)
    # what orders logprobs, a chunk at a time
    chunk = THREAD_CHUNK_ELEMENTS * torch.get_num_threads() * 20
    memory = StepMemory(MODEL, torch.bfloat16, num_tokens=100, num_rows=70, estimate_scratch=lambda _: 0)
    assert memory.estimate_step() == 100 * per_token + 70 * per_row + chunk
    few = replace(memory, num_rows=3)
    assert few.estimate_step() == 100 * per_token + 64 * (per_row + 20000), ("prompts are scored 64 tokens at a time")
    scratch = replace(memory, estimate_scratch=lambda shape: sum(astuple(shape)))
    model = 4 + 2 + 8 + 32 + 64 + 2
    assert scratch.estimate_step(5, 9) == memory.estimate_step() + 70 + 100 + 5 + 9 + model


def test_rows_are_estimated_no_smaller_than_they_are(make_config: MakeConfig) -> None:
    worker = Worker(make_config(device="cpu", max_num_seqs=7), eos_token_ids=(1,))
    worker.load()
    max_len = worker.resolved.max_model_len
    batch = InputBatch(7, max_len, 16, torch.device("cpu"))
    (rope,) = worker.model.ropes
    rope.reserve(max_len)
    sizes = [each.nbytes for each in (batch._token_pool, batch.block_tables, rope._cos, rope._sin)]
    memory = StepMemory(worker.model_config, torch.float32, 9, 7, lambda _: 0)
    assert sum(sizes) <= memory.estimate_rows(max_len, 16)
