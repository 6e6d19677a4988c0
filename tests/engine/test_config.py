"""EngineConfig: ranges of its fields; resolve_config: what becomes of them on a given model and memory."""

import math
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import pytest

from engine import ConfigError, EngineConfig, ResolvedConfig
from engine.config_fields import EngineFields
from engine.kv_cache_spec import KVCacheGroup, KVCacheSpec, find_groups, group_layers
from engine.resolved_config import WorkerConfig, resolve_config

MIB = 2**20

WRONG: dict[str, dict[str, list[Any]]] = {
    "load_format": {"='npz' must be one of auto, dummy": ["npz"]},
    "dtype": {"must be one of auto, float32, bfloat16, float16": ["int8"]},
    "device": {"must be one of auto, cpu, cuda": ["tpu"]},
    "attention_backend": {"must be one of auto, triton, sdpa, native": ["flash"]},
    "quantization": {"must be one of none, int8, int4, fp8": ["int3"]},
    "kv_cache_dtype": {"must be one of auto, int8, fp8": ["int4"]},
    "scheduling_policy": {"must be one of fcfs, priority": ["lifo"]},
    "num_threads": {"must be a number from 1 to 1024": [0, True]},
    "max_model_len": {"must be a number from 2": [1, "8k"]},
    "block_size": {"must be a number from 1 to 1024": [0, 2048], "must be an integer": [16.0]},
    "memory_share": {"must be a number from 0.001 to 1.0": [0, 1.1, math.nan]},
    "num_blocks": {"must be a number from 2": [1]},
    "max_num_seqs": {"must be a number from 1 to 4096": [0]},
    "max_num_batched_tokens": {"must be a number from 1": [0], "=63 must be at least max_num_seqs=64": [63]},
    "max_num_waiting": {"must be a number from 1": [0]},
    "grammar_timeout_s": {"must be a number from 0.01": [0]},
    "max_restarts": {"must be a number from 0 to 1000": [-1]},
    "seed": {"must be a number from 0": [-1, 2**63, True], "must be an integer": [1.5]},
}
SWITCHES = ("enable_native_ops", "enable_cuda_graphs", "enable_cuda_graphs", "skip_tokenizer_init")
SWITCHES += ("enable_prefix_caching", "enable_chunked_prefill", "enable_overlap")
WRONG |= {name: {"must be true or false": ["no", 1]} for name in SWITCHES}
BAD = [(name, text, value) for name, told in WRONG.items() for text, values in told.items() for value in values]


def resolve(
    config: EngineConfig,
    *,
    model_max_len: int = 2048,
    free_bytes: int = 1000 * MIB,
    bytes_per_block: int = MIB,
    kv_specs: Sequence[KVCacheSpec] = (KVCacheSpec(2, 16, None),),
) -> ResolvedConfig:
    worker = WorkerConfig("m", "auto", "float32", "cpu", num_threads=1, seed=0)
    sizes = {"model_max_len": model_max_len, "free_bytes": free_bytes, "bytes_per_block": bytes_per_block}
    return resolve_config(config, worker, **sizes, kv_specs=kv_specs)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None, None], [(None, (0, 1))]),
        ([64, 64], [(64, (0, 1))]),
        ([None, 64, None, 64], [(None, (0, 2)), (64, (1, 3))]),
        ([64, 64, None, 64, 64, None], [(None, (2, 5)), (64, (0, 1)), (64, (3, 4))]),
        ([64, 32, 64], [(32, (1,)), (64, (0,)), (64, (2,))]),
        ([None, *[8] * 30], [(None, (0,)), *((8, tuple(range(at, min(at + 4, 31)))) for at in range(1, 31, 4))]),
    ],
)
def test_each_window_has_groups_of_equally_many_layers(
    windows: list[int | None], groups: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    specs = [KVCacheSpec(2, 16, each) for each in windows]
    expected = tuple(KVCacheGroup(*each) for each in groups)
    assert resolve(EngineConfig(), kv_specs=specs).cache.groups == expected
    assert [expected[group].layers.count(layer) for layer, group in enumerate(find_groups(specs))] == [
        1
    ] * len(windows)


def test_layers_with_several_sizes_of_keys_are_one_group_with_the_widest_window() -> None:
    specs = [KVCacheSpec(2, 16, 64), KVCacheSpec(1, 16, 32), KVCacheSpec(2, 16, 8)]
    assert group_layers(specs) == (KVCacheGroup(64, (0, 1, 2)),)
    assert group_layers([*specs, KVCacheSpec(2, 16, None)]) == (KVCacheGroup(None, (0, 1, 2, 3)),)


@pytest.mark.parametrize(("num_blocks", "longest"), [(21, 96), (25, 128), (101, 1344), (401, 2048)])
def test_windows_make_longer_contexts_fit(num_blocks: int, longest: int) -> None:
    """A window of 64 with chunks of 48 tokens takes at most 8 blocks of 16, in each of its 2 groups."""
    specs = [KVCacheSpec(2, 16, window) for window in (None, 64, 64)]
    config = EngineConfig(num_blocks=num_blocks, max_num_batched_tokens=48, max_num_seqs=8)
    assert resolve(config, kv_specs=specs).max_model_len == longest


@pytest.mark.parametrize(("field", "message", "value"), BAD)
def test_a_value_outside_its_range_is_refused_by_name(field: str, message: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**{field: value})
    assert str(caught.value).startswith(f"{field}=")


GOOD = [
    ("num_threads", 1), ("max_model_len", 2), ("block_size", 1), ("memory_share", 1), ("num_blocks", 2),
    ("max_num_seqs", 1), ("max_num_batched_tokens", 64), ("max_num_waiting", 1),
    ("grammar_timeout_s", 3600), ("max_restarts", 0), ("num_threads", None), ("memory_share", None),
    ("pipeline_parallel_size", 64),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(EngineConfig(**{field: value}), field) == value


def test_every_setting_explains_itself() -> None:
    """The help of the flags is made of it."""
    hints = get_type_hints(EngineFields, include_extras=True)
    assert [name for name, hint in hints.items() if len(get_args(hint)[-1]) < 9] == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "Qwen3-0.6B"), ({"model": "models/mine/"}, "mine"),
        ({"model": "models/mine", "served_model_name": "demo"}, "demo"),
    ],
)
def test_the_name_in_the_api_is_the_last_part_of_the_model(settings: dict[str, str], name: str) -> None:
    assert EngineConfig(**settings).model_name == name  # type: ignore[arg-type]


def test_the_cache_is_sized_by_the_memory_unless_a_number_of_blocks_is_given() -> None:
    cache = resolve(EngineConfig(), free_bytes=100 * MIB, bytes_per_block=3 * MIB).cache
    assert cache.num_bytes == cache.num_blocks * 3 * MIB
    assert (cache.num_blocks, cache.block_size, cache.enable_prefix_caching) == (33, 16, True)
    assert resolve(EngineConfig(num_blocks=7, max_model_len=8), free_bytes=0).cache.num_blocks == 7


def test_an_automatic_cache_has_a_quarter_of_a_million_blocks_at_most() -> None:
    """A GPU would hold millions of a tiny model, and each is a Python object; the largest batch fits all the same."""
    huge = 10**6 * MIB
    assert resolve(EngineConfig(), free_bytes=huge).cache.num_blocks == 2**18
    crowd = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    assert resolve(crowd, free_bytes=huge).cache.num_blocks == 4096 * 2048 // 16 + 1
    asked = EngineConfig(memory_share=0.9)
    assert resolve(asked, free_bytes=huge).cache.num_blocks == 10**6, "who names a share gets it"


@pytest.mark.parametrize("free_bytes", [-MIB, 0, MIB, 2 * MIB - 1])
def test_too_little_memory_says_how_much_there_is_and_what_to_do(free_bytes: int) -> None:
    message = f"the KV cache gets {free_bytes / MIB:.0f} MiB, and one block takes 1.0 MiB; raise memory_share"
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(), free_bytes=free_bytes)


def test_the_model_length_is_the_checkpoints_and_never_more() -> None:
    resolved = resolve(EngineConfig(), model_max_len=777)
    assert (resolved.max_model_len, resolved.notices) == (777, ())
    with pytest.raises(ConfigError, match="max_model_len=4096 exceeds the checkpoint's 2048"):
        resolve(EngineConfig(max_model_len=4096))


@pytest.mark.parametrize("max_model_len", [None, 1000])
def test_a_model_length_beyond_the_cache_shrinks_with_a_notice(max_model_len: int | None) -> None:
    resolved = resolve(EngineConfig(max_model_len=max_model_len), free_bytes=11 * MIB)
    assert resolved.max_model_len == 160 == (resolved.cache.num_blocks - 1) * resolved.cache.block_size
    asked = max_model_len or 2048
    assert resolved.notices == (f"max_model_len lowered from {asked} to 160 to fit the KV cache",)


def test_blocks_that_hold_no_request_are_refused() -> None:
    """One token would be a prompt without an answer."""
    with pytest.raises(ConfigError, match=r"num_blocks=2 with block_size=1 hold 1 tokens of 1 groups.*memory_share"):
        resolve(EngineConfig(num_blocks=2, block_size=1))
    for num_blocks, block_size in ((3, 1), (2, 2)):
        assert resolve(EngineConfig(num_blocks=num_blocks, block_size=block_size)).max_model_len == 2


def test_without_chunks_the_budget_is_raised_to_the_model_length() -> None:
    resolved = resolve(EngineConfig(enable_chunked_prefill=False))
    assert resolved.scheduler.max_num_batched_tokens == 2048
    assert resolved.notices == ("max_num_batched_tokens raised to 2048, because chunked prefill is off",)
    large = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=4096)
    assert resolve(large).scheduler.max_num_batched_tokens == 4096


def test_the_scheduler_receives_its_settings() -> None:
    """Overlap is two steps in flight."""
    config = EngineConfig(max_num_seqs=5, scheduling_policy="priority")
    scheduler = resolve(config).scheduler
    assert (scheduler.max_num_seqs, scheduler.policy, scheduler.max_steps_in_flight) == (5, "priority", 2)
    assert resolve(EngineConfig(enable_overlap=False)).scheduler.max_steps_in_flight == 1


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_cuda"),
    [
        ({}, (64, 1024), (256, 8192)),
        ({"max_num_seqs": 2000}, (2000, 2000), (2000, 8192)),
        ({"max_num_batched_tokens": 100}, (64, 100), (100, 100)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 5}, (3, 5), (3, 5)),
    ],
)
def test_limits_of_a_step_that_are_not_set_depend_on_the_device(
    given: dict[str, int], on_cpu: tuple[int, int], on_cuda: tuple[int, int]
) -> None:
    config = EngineConfig("m", **given)
    assert (config.find_step_limits("cpu"), config.find_step_limits("cuda")) == (on_cpu, on_cuda)
    assert resolve(config).scheduler.max_num_seqs == on_cpu[0]
