"""Ranks that divide the keys of each request: logits and tokens of one rank, and contexts that fit no single one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.device.kv_cache import allocate_kv_cache
from engine.errors import ConfigError, InvalidRequest
from engine.model import load_model, read_model_config
from engine.model.attn_metadata import AttnMetadata
from engine.model.context_parts import divide_context, merge_parts
from engine.model.sharding import Sharding, check_context
from engine.parallel.load import limit_ops
from engine.parallel.shared_memory import SharedMemoryComm
from engine.worker import cache_sizer
from kernels.cpu import make_native_ops
from kernels.cpu.pieces import turn_into_pieces
from kernels.ops import Ops
from kernels.torch import make_ops
from tests.engine.conftest import make_tiny_config
from tests.engine.lora.peft_adapters import PeftTwin
from tests.engine.mixed_requests import TIGHT, Completion, make_mixed_requests, run_mixed
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.engine.parallel.test_adapters import make_engine, run_requests
from tests.engine.parallel.test_adapters import twin as twin
from tests.engine.parallel.test_pipeline import kill_in
from tests.engine.parallel.test_ranks import generate
from tests.engine.parallel.test_sharding import EIGHTHS, run_ranks
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.kernels.cpu.conftest import require_library

MakeConfig = Callable[..., EngineConfig]
BOTH: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
LOCAL: dict[str, Any] = {"core": "local", "attention_backend": "native"}
NGRAM = {"method": "ngram", "adaptive": False}  # drafts whatever a step costs
# Query and context lengths: decodes of one and more tokens, a verification, prompts alone and behind a prefix.
LENGTHS = [(1, 1), (1, 90), (4, 67), (1, 3), (40, 40), (70, 200), (300, 300), (2, 2)]


def make_native() -> Ops:
    return limit_ops(make_native_ops(require_library(), 1))


@pytest.fixture(scope="session")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with eight heads that share one KV head."""
    folder = make_byte_level_folder(tmp_path_factory.mktemp("one_head"))
    tokenizer = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    shape = EIGHTHS | {"num_key_value_heads": 1, "vocab_size": tokenizer.get_vocab_size()}
    return save(make_transformers_model("qwen3", **shape, eos_token_id=tokenizer.token_to_id("</s>")), folder)


@pytest.fixture
def make_config(one_head: Path) -> MakeConfig:
    return partial(make_tiny_config, one_head)


def lay_out(ops: Ops, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as the ops have them."""
    keys, values = cache.clone()
    if ops.has_pieces:
        turn_into_pieces(keys, values)
    return keys, values


@pytest.mark.parametrize("make", [make_ops, make_native])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_merged_parts_are_the_attention_over_all_keys(
    make: Callable[[], Ops], size: int, soft_cap: float | None
) -> None:
    ops, block_size, generator = make(), 16, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query_lens, seq_lens = map(list, zip(*LENGTHS, strict=True))
    num_blocks = 20 * len(LENGTHS) + 1
    tables = (1 + torch.randperm(num_blocks - 1, generator=generator)).view(len(LENGTHS), -1).int()
    bounds = torch.tensor([0, *query_lens]).cumsum(0).int()
    cache = draw(2, num_blocks, block_size, 1, 24)
    step = (tables, bounds, torch.tensor(seq_lens, dtype=torch.int32))
    metadata = AttnMetadata(torch.zeros(1, 1).long(), tables[None], *step[1:], query_lens, seq_lens)
    q, options = draw(int(bounds[-1]), 6, 24), {"scale": 0.4, "soft_cap": soft_cap}
    expected = ops.paged_attention(q, *lay_out(ops, cache), *step, **options)
    parts = torch.zeros(size, len(q), 6, 25)
    parts[..., 24] = -torch.inf
    for rank in range(size):
        # The rank's slots of each block, and nothing of the others.
        own = cache[:, :, rank::size].contiguous()
        part = divide_context(ops, metadata, block_size // size, Sharding(rank, size, context_size=size))
        assert ops.partial_attention is not None
        results, log_sums = ops.partial_attention(q[part.places], *lay_out(ops, own), **options, plan=part.plan)
        parts[rank, part.places] = torch.cat((results, log_sums[..., None]), dim=-1)
    torch.testing.assert_close(merge_parts(parts), expected, atol=1e-5, rtol=0)


def compute_logits(folder: Path, ops: Callable[[], Ops], sharding: Sharding) -> Tensor:
    model = load_model(folder, ops=limit_ops(ops()), sharding=sharding)
    driver, prompt = Driver(model), make_prompt(40)
    block_size = driver.block_size // sharding.context_size
    driver.kv_caches = allocate_kv_cache(model.kv_specs(), 160, block_size, torch.float32, torch.device("cpu"))
    for cache in (each for pair in driver.kv_caches for each in pair):
        cache.fill_(torch.nan)
    first = driver.step({"a": prompt[:25], "b": make_prompt(1, 1)})["a"]
    rest = driver.step({"b": make_prompt(3, 2), "a": prompt[25:39]})["a"]
    return torch.cat([first, rest, driver.step({"a": prompt[39:]})["a"]])


@pytest.mark.parametrize(
    ("family", "size", "kv_heads", "context_size", "ops"),
    [
        *(("llama", *shape, make_native) for shape in [(2, 1, 2), (4, 1, 2), (4, 1, 4)]),
        ("llama", 4, 2, 2, make_ops), ("qwen3_moe", 4, 2, 2, make_native), ("gemma2", 2, 1, 2, make_native),
        ("deepseek_v3", 2, 8, 2, make_native),
    ],
)  # fmt: skip
def test_ranks_compute_the_logits_of_transformers(
    family: str, size: int, kv_heads: int, context_size: int, ops: Callable[[], Ops], tmp_path: Path
) -> None:
    """Gemma 2 with all layers of full attention bounds its scores."""
    more: dict[str, Any] = {"head_dim": 12} if family == "deepseek_v3" else {}
    more |= {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 20} if family == "gemma2" else {}
    source = make_transformers_model(family, **EIGHTHS | {"num_key_value_heads": kv_heads} | more)
    folder = save(source, tmp_path)
    found = run_ranks(size, partial(compute_logits, folder, ops), context_size=context_size)[0]
    torch.testing.assert_close(found, compute_expected(source, make_prompt(40)), atol=5e-5, rtol=0)


def assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    """The tokens and texts are equal, and the logprobs nearly so: sums have another order."""
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine._replace(logprobs=None) == other._replace(logprobs=None)
            pairs = zip(mine.logprobs or [], other.logprobs or [], strict=True)
            assert all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-3 for a, b in pairs)


async def test_mixed_requests_have_the_tokens_of_one_rank(make_config: MakeConfig) -> None:
    requests, settings = make_mixed_requests(num_requests=52), TIGHT | LOCAL
    async with Engine(make_config(**settings)) as engine:
        expected = await run_mixed(engine, requests)
    async with Engine(make_config(**settings, **BOTH, speculative_config=NGRAM)) as engine:
        assert_same(await run_mixed(engine, requests), expected)
        stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    assert sum(stats.drafts["ngram"].accepted_per_position) > 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")  # of PEFT
async def test_requests_with_adapters_have_the_tokens_of_one_rank(twin: PeftTwin) -> None:
    async with make_engine(twin) as engine:
        expected = await run_requests(engine, twin)
    async with make_engine(twin, **BOTH, enable_expert_parallel=True) as engine:
        assert_same(await run_requests(engine, twin), expected)


async def test_a_context_that_one_rank_cannot_hold_runs_on_two(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensor parallelism alone, both ranks have all keys of the one KV head."""
    block_bytes = 2 * 2 * 3 * 16 * 16 * 4  # on two ranks; keys and values of three layers in float32
    monkeypatch.setattr(cache_sizer, "measure_host_memory", lambda: (20 * block_bytes * 10, 2**40))
    settings = LOCAL | {"num_blocks": None, "memory_share": 0.1}
    prompt, params = make_prompt(400), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for changes in ({"tensor_parallel_size": 2}, BOTH):
        async with Engine(make_config(**settings, **changes)) as engine:
            found.append(engine.resolved.cache.num_blocks)
            if changes is not BOTH:
                with pytest.raises(InvalidRequest, match="400"):
                    await anext(aiter(engine.generate(prompt, params)))
                continue
            tokens = [output async for output in engine.generate(prompt, params)][-1].outputs[0].token_ids
    async with Engine(make_config(core="local")) as engine:
        expected = [output async for output in engine.generate(prompt, params)][-1].outputs[0].token_ids
    assert found == [20, 40] and tokens == expected


async def test_requests_go_on_when_a_rank_is_killed(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    async with Engine(make_config(**LOCAL, **BOTH)) as engine:
        expected = await generate(engine, params)
        kill_in(SharedMemoryComm, "collect", 1, 100, monkeypatch)
        assert await generate(engine, params) == expected
        assert engine.stats().num_restarts == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_context_parallel_size": 3}, "^decode_context_parallel_size=3 must be one of 1, 2, 4, 8"),
        ({"tensor_parallel_size": 1}, "^tensor_parallel_size=1 must be a multiple"),
        ({"block_size": 7}, "^block_size=7 must be a multiple"),
        ({"pipeline_parallel_size": 2}, "^pipeline_parallel_size=2 does not work with decode_context"),
        ({"nnodes": 2, "data_parallel_key": "k" * 16}, "^nnodes=2 does not work with decode_context"),
        ({"kv_cache_dtype": "int8"}, "^kv_cache_dtype='int8' does not work with decode_context"),
        ({"kv_offload_gb": 1.0}, "^kv_offload_gb=1.0 does not work with decode_context"),
        ({"kv_transfer_config": '{"kv_role": "kv_both"}'}, "^kv_transfer_config=.* with decode_context"),
        (
            {"speculative_config": {"method": "eagle", "model": "folder"}},
            "^speculative_config: method='eagle' does not work with decode_context",
        ),
    ],
)
def test_settings_that_ranks_of_a_context_do_not_support_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**BOTH | changes)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gemma3", {"sliding_window": 20, "num_key_value_heads": 1}, "has layers with a window"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 1}, "has attention sinks"),
        ("llama", {"num_key_value_heads": 2}, "tensor_parallel_size=2 must be a multiple of 4"),
    ],
)
def test_models_whose_contexts_cannot_be_divided_are_refused(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(make_transformers_model(family, **EIGHTHS | overrides), tmp_path)
    with pytest.raises(ConfigError, match=f"^decode_context_parallel_size=2: .*{message}"):
        check_context(read_model_config(folder), 2, 2)
