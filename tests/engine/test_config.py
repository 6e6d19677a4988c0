"""EngineConfig: ranges of its fields; resolve_config: what becomes of them on a given model and memory."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from engine import ConfigError, EngineConfig, ResolvedConfig
from engine.config import WorkerConfig, resolve_config

MIB = 2**20

BAD = [
    ("load_format", "gguf", "load_format='gguf' must be one of auto, dummy"),
    ("dtype", "int8", "dtype='int8' must be one of auto, float32, bfloat16, float16"),
    ("device", "tpu", "device='tpu' must be one of auto, cpu, cuda"),
    ("attention_backend", "flash", "must be one of auto, triton, sdpa, flex, native"),
    ("quantization", "int3", "must be one of none, int8, int4, fp8"),
    ("kv_cache_dtype", "int8", "kv_cache_dtype='int8' must be one of auto, fp8"),
    ("enable_native_ops", 1, "enable_native_ops=1 must be true or false"),
    ("enable_cuda_graphs", "no", "enable_cuda_graphs='no' must be true or false"),
    ("compile", None, "compile=None must be true or false"),
    ("check_syncs", "yes", "check_syncs='yes' must be true or false"),
    ("scheduling_policy", "lifo", "must be one of fcfs, priority"),
    ("num_threads", 0, "must be a number from 1 to 1024"),
    ("num_threads", True, "num_threads=True must be a number"),
    ("max_model_len", 1, "must be a number from 2"),
    ("max_model_len", "8k", "max_model_len='8k' must be a number"),
    ("block_size", 0, "must be a number from 1 to 1024"),
    ("block_size", 2048, "must be a number from 1 to 1024"),
    ("block_size", 16.0, "must be an integer"),
    ("memory_share", 0, "must be a number from 0.001 to 1.0"),
    ("memory_share", 1.1, "must be a number from 0.001 to 1.0"),
    ("memory_share", math.nan, "memory_share=nan must be a number"),
    ("num_blocks", 1, "must be a number from 2"),
    ("max_num_seqs", 0, "must be a number from 1 to 4096"),
    ("max_num_batched_tokens", 0, "must be a number from 1"),
    ("max_num_batched_tokens", 63, "max_num_batched_tokens=63 must be at least max_num_seqs=64"),
    ("priority_ageing_s", 0, "must be a number from 0.001"),
    ("priority_ageing_s", math.inf, "must be a number from 0.001"),
    ("max_num_waiting", 0, "must be a number from 1"),
    ("grammar_timeout_s", 0, "must be a number from 0.01"),
    ("max_restarts", -1, "must be a number from 0 to 1000"),
]


def make_worker_config() -> WorkerConfig:
    return WorkerConfig("m", "auto", "float32", "cpu", num_threads=1, seed=0)


def resolve(
    config: EngineConfig,
    *,
    model_max_len: int = 2048,
    free_bytes: int = 1000 * MIB,
    bytes_per_block: int = MIB,
) -> ResolvedConfig:
    return resolve_config(
        config,
        make_worker_config(),
        model_max_len=model_max_len,
        free_bytes=free_bytes,
        bytes_per_block=bytes_per_block,
    )


@pytest.mark.parametrize(("field", "value", "message"), BAD, ids=lambda each: str(each)[:24] or "empty")
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**{field: value})
    assert str(caught.value).startswith(field)


GOOD = [
    ("num_threads", 1), ("max_model_len", 2), ("block_size", 1), ("memory_share", 1), ("num_blocks", 2),
    ("max_num_seqs", 1), ("max_num_batched_tokens", 64), ("priority_ageing_s", 0.001), ("max_num_waiting", 1),
    ("grammar_timeout_s", 3600), ("max_restarts", 0), ("num_threads", None), ("memory_share", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(EngineConfig(**{field: value}), field) == value


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=0.9)  # type: ignore[call-arg]


def test_a_config_never_changes() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 32  # type: ignore[misc]


def test_every_setting_explains_itself() -> None:
    """The help of the flags is made of it."""
    assert [field.name for field in fields(EngineConfig) if not field.metadata.get("help")] == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "Qwen3-0.6B"),
        ({"model": "models/mine/"}, "mine"),
        ({"model": "models/mine", "served_model_name": "demo"}, "demo"),
    ],
)
def test_the_name_in_the_api_is_the_last_part_of_the_model(settings: dict[str, str], name: str) -> None:
    assert EngineConfig(**settings).model_name == name  # type: ignore[arg-type]


def test_the_cache_is_sized_by_the_memory() -> None:
    cache = resolve(EngineConfig(), free_bytes=100 * MIB, bytes_per_block=3 * MIB).cache
    assert (cache.num_blocks, cache.block_size, cache.enable_prefix_caching) == (33, 16, True)


def test_an_automatic_cache_has_a_quarter_of_a_million_blocks_at_most() -> None:
    """A GPU would hold millions of a tiny model, and each is a Python object; the largest batch fits all the same."""
    huge = 10**6 * MIB
    assert resolve(EngineConfig(), free_bytes=huge).cache.num_blocks == 2**18
    crowd = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    assert resolve(crowd, free_bytes=huge).cache.num_blocks == 4096 * 2048 // 16 + 1
    asked = EngineConfig(memory_share=0.9)
    assert resolve(asked, free_bytes=huge).cache.num_blocks == 10**6, "who names a share gets it"


def test_a_number_of_blocks_overrides_the_memory() -> None:
    assert resolve(EngineConfig(num_blocks=7, max_model_len=8), free_bytes=0).cache.num_blocks == 7


@pytest.mark.parametrize("free_bytes", [-MIB, 0, MIB, 2 * MIB - 1])
def test_too_little_memory_says_how_much_there_is_and_what_to_do(free_bytes: int) -> None:
    message = f"the KV cache gets {free_bytes / MIB:.0f} MiB, and one block takes 1.0 MiB; raise memory_share"
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(), free_bytes=free_bytes)


def test_the_model_length_is_the_checkpoints_by_default() -> None:
    resolved = resolve(EngineConfig(), model_max_len=777)
    assert (resolved.max_model_len, resolved.notices) == (777, ())


def test_a_model_length_beyond_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=4096 exceeds the checkpoint's 2048"):
        resolve(EngineConfig(max_model_len=4096))


@pytest.mark.parametrize("max_model_len", [None, 1000])
def test_a_model_length_beyond_the_cache_shrinks_with_a_notice(max_model_len: int | None) -> None:
    resolved = resolve(EngineConfig(max_model_len=max_model_len), free_bytes=11 * MIB)
    assert resolved.max_model_len == 160
    asked = max_model_len or 2048
    assert resolved.notices == (f"max_model_len shrunk from {asked} to 160: the KV cache holds no more",)


def test_a_request_of_the_shrunk_length_fits_the_cache() -> None:
    """Block 0 belongs to nobody."""
    resolved = resolve(EngineConfig(), free_bytes=11 * MIB)
    assert resolved.max_model_len <= (resolved.cache.num_blocks - 1) * resolved.cache.block_size


def test_blocks_that_hold_no_request_are_refused() -> None:
    """One token would be a prompt without an answer."""
    with pytest.raises(ConfigError, match=r"num_blocks=2 with block_size=1 hold 1 token.*memory_share"):
        resolve(EngineConfig(num_blocks=2, block_size=1))
    for num_blocks, block_size in ((3, 1), (2, 2)):
        assert resolve(EngineConfig(num_blocks=num_blocks, block_size=block_size)).max_model_len == 2


def test_without_chunks_the_budget_is_raised_to_the_model_length() -> None:
    resolved = resolve(EngineConfig(enable_chunked_prefill=False))
    assert resolved.scheduler.max_num_batched_tokens == 2048
    assert resolved.notices == ("max_num_batched_tokens raised to 2048: prompts are not chunked",)


def test_without_chunks_a_large_budget_stays() -> None:
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=4096)
    assert resolve(config).scheduler.max_num_batched_tokens == 4096


@pytest.mark.parametrize(("enable_overlap", "depth"), [(True, 2), (False, 1)])
def test_overlap_is_two_steps_in_flight(enable_overlap: bool, depth: int) -> None:
    assert resolve(EngineConfig(enable_overlap=enable_overlap)).scheduler.max_steps_in_flight == depth


def test_the_scheduler_receives_its_settings() -> None:
    config = EngineConfig(max_num_seqs=5, scheduling_policy="priority", priority_ageing_s=7.0)
    scheduler = resolve(config).scheduler
    got = (scheduler.max_num_seqs, scheduler.policy, scheduler.priority_ageing_s)
    assert got == (5, "priority", 7.0)


@pytest.mark.parametrize(
    "field", ["skip_tokenizer_init", "enable_prefix_caching", "enable_chunked_prefill", "enable_overlap"]
)
def test_a_switch_is_true_or_false(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='no' must be true or false"):
        EngineConfig(**{field: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, None])
def test_a_seed_is_an_integer_from_zero(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed="):
        EngineConfig(seed=seed)
