"""Worker: how it resolves the config on this machine, and what it refuses."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.core.actor_messages import StepPlan
from engine.device.device_memory import open_device
from engine.device.kv_cache import compute_bytes_per_block
from engine.model import ModelConfig
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import ModelRunner
from engine.worker.worker import Worker
from tests.engine.model.drive import make_transformers_model, save
from tests.engine.worker.plans import make_new_row, make_plan

MakeWorker, SayMemory = Callable[..., Worker], Callable[[int, int], None]


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
        for user in ("worker", "cache_sizer"):
            monkeypatch.setattr(f"engine.worker.{user}.measure_host_memory", lambda: (total, free))

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


def test_the_fingerprint_is_that_of_model_and_layout(load_worker: MakeWorker) -> None:
    settings: list[dict[str, Any]] = [{}, {"num_blocks": 9}, {"block_size": 8}, {"load_format": "dummy"}]
    same, resized, *others = [load_worker(**each).resolved.fingerprint for each in settings]
    assert same == resized and len({same, *others}) == 3


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
    bytes_per_block = compute_bytes_per_block(worker.model.kv_specs(), 16, torch.float32)
    assert worker.resolved.cache.num_blocks == int(2**30 * 0.01) // bytes_per_block
    say_memory(2**30, 2**26)
    worker = load_worker(num_blocks=None, memory_share=1.0)
    assert worker.resolved.cache.num_blocks * bytes_per_block <= 0.8 * 2**26


def test_a_cache_without_room_is_refused_before_it_is_touched(
    load_worker: MakeWorker, say_memory: SayMemory, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """Allocating only reserves: the process would be killed later, when the blocks are written."""
    monkeypatch.setattr(Worker, "warm_up", Worker.reset)
    say_memory(2**30, 0)
    with pytest.raises(ConfigError, match="the KV cache gets 0 MiB, and one block takes"):
        load_worker(num_blocks=None)
    specs = [spec.kv_spec for spec in ModelConfig.from_pretrained(checkpoint).layer_specs]
    size = 3 * compute_bytes_per_block(specs, 16, torch.float32)
    say_memory(2**30, size)
    load_worker(num_blocks=3)
    say_memory(2**30, size - 1)
    message = rf"num_blocks=3: cpu cannot allocate .* \({size} bytes\).* 0.0 GiB are free"
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
    worker.close(frees_memory=False)
    assert all(each() is not None for each in held), "a step may still run"
    worker.close()
    gc.collect()
    assert not any(each() for each in held)
    assert worker.describe()["ops"] == "asleep"
    worker.close()


def test_on_a_device_that_counts_the_largest_steps_run_before_the_cache_is_there(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go over the null block, and nothing of them is left when the cache is allocated."""
    plans: list[StepPlan] = []
    open_host, execute = open_device, ModelRunner.execute

    def note(runner: ModelRunner, plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(runner, plan)

    class Memory:
        def empty_cache(self) -> None:
            """Nothing is kept."""

        def measure(self) -> tuple[int, int]:
            return 2**26, 2**26

        def measure_peak(self, run: Callable[[], None]) -> int:
            monkeypatch.setattr(ModelRunner, "execute", note)
            run()
            monkeypatch.setattr(ModelRunner, "execute", execute)
            assert (worker.kv_caches, worker._runner, worker._graphs) == ([], None, None)
            return 2**25

    monkeypatch.setattr("engine.worker.worker.open_device", lambda config: (*open_host(config)[:2], Memory()))
    worker = make_worker(device="cpu", num_blocks=None, max_num_batched_tokens=700, enable_native_ops=False)
    loaded = worker.load()
    room = len(worker.kv_caches[0][0]) * compute_bytes_per_block(worker.model.kv_specs(), 16, torch.float32)
    assert 2**24 < room < 2**25
    assert (plans[0].num_tokens, len(plans[0].rows)) == (700, 32)
    assert [len(plan.rows) for plan in plans[1:]] == [32, 1]
    ends = plans[0].starts + plans[0].num_scheduled_tokens
    assert ends.max() == loaded.resolved.max_model_len


def test_a_step_says_when_its_layers_start(make_worker: MakeWorker) -> None:
    """Meanwhile the loop works on the result of the step before; also after a reset."""
    worker, calls = make_worker(device="cpu"), []
    worker.before_layers = lambda: calls.append(len(calls))
    worker.load()
    for _ in range(2):
        calls.clear()
        worker.execute(make_plan([(0, 0, 2)], new=[make_new_row(0, [5, 6], [1])]))
        assert calls == [0]
        worker.reset()


def test_a_reset_forgets_rows_before_it_makes_new_ones_and_keeps_weights_and_memory(
    load_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one token pool on a GPU, not for two."""
    worker = load_worker()
    model, cache, old = worker.model, worker.kv_caches[0][0].data_ptr(), weakref.ref(worker.runner.batch)
    alive: list[bool] = []

    def make_batch(*args: Any, **more: Any) -> InputBatch:
        alive.append(old() is not None)
        return InputBatch(*args, **more)

    monkeypatch.setattr("engine.worker.worker.InputBatch", make_batch)
    worker.reset()
    assert alive == [False]
    assert worker.runner.model is model
    assert worker.kv_caches[0][0].data_ptr() == cache


def test_a_light_sleep_gives_the_rope_tables_back(load_worker: MakeWorker) -> None:
    worker = load_worker()
    (rope,) = worker.model.ropes
    rope.reserve(2048)
    before = rope._cos, rope._sin
    worker.sleep(1)
    assert rope._cos.numel() == rope._sin.numel() == 0
    worker.wake()
    rope.reserve(2048)
    for table, old in zip((rope._cos, rope._sin), before, strict=True):
        assert table.device == worker.device and torch.equal(table, old)
