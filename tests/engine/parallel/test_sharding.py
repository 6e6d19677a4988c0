"""Ranks as threads of one process: every family's logits, against transformers and bit for bit against one rank."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.comm import RankLost
from engine.errors import ConfigError
from engine.model import DecoderModel, load_model, read_model_config
from engine.model.moe import Experts
from engine.model.sharding import Sharding, check_shardable
from engine.parallel.load import limit_ops
from engine.parallel.shared_memory import SharedMemoryComm, make_memory, make_pipes
from kernels.cpu import make_native_ops
from kernels.torch import experts
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.engine.model.formats.test_packed import CODES, FORMATS, write_checkpoint
from tests.engine.model.test_moe_families import save_mxfp4
from tests.kernels.cpu.conftest import require_library

EIGHTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
GEMMA = {"sliding_window": 20, "num_hidden_layers": 6, "query_pre_attn_scalar": 20}
LATENT = {"num_key_value_heads": 8, "head_dim": 12}
GPT_OSS = {"num_key_value_heads": 4, "sliding_window": 20}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head, odd vocabulary": ("llama", {"num_key_value_heads": 1, "vocab_size": 133}),
    "tied head": ("qwen3", {"tie_word_embeddings": True}), "biases": ("qwen2", {}),
    "window, norms of both sides": ("gemma3", GEMMA), "fused matrices": ("phi3", {}),
    "no gate, biases": ("starcoder2", {"sliding_window": 20}),
    "interleaved heads, parallel MLP": ("cohere2", {"sliding_window": 20, "num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {}), "experts with other names": ("mixtral", {}),
    "stacked and shared experts": ("granitemoe", {}), "sinks and expert biases": ("gpt_oss", GPT_OSS),
    "latents": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "latents and small queries, experts": ("deepseek_v3", LATENT),
}  # fmt: skip
# Some numbers of experts are not multiples of the number of ranks.
WHOLE_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6}, "qwen3_moe": {"num_experts": 7}, "granitemoe": {"num_local_experts": 5},
    "gpt_oss": GPT_OSS,
}


@contextmanager
def open_comms(size: int) -> Iterator[list[SharedMemoryComm]]:
    """The ranks' ends of one comm."""
    memory, (sending, receiving) = make_memory(size), make_pipes(size)
    comms = [SharedMemoryComm(r, size, os.dup(memory), sending[r], receiving[r]) for r in range(size)]
    os.close(memory)
    try:
        yield comms
    finally:
        for comm in comms:
            comm.close()


def run_ranks(size: int, run: Callable[[Sharding], Any], **changes: Any) -> list[Any]:
    """Return the result of each rank; the ranks are threads."""
    with open_comms(size) as comms, ThreadPoolExecutor(size) as threads:
        shardings = [Sharding(rank, size, comm, **changes) for rank, comm in enumerate(comms)]
        return list(threads.map(run, shardings))


def compute_logits(folder: Path, quantization: Any, sharding: Sharding, dtype: torch.dtype = torch.float32) -> Tensor:
    ops = limit_ops(make_native_ops(require_library(), 1))
    return drive(load_model(folder, dtype, quantization=quantization, ops=ops, sharding=sharding))


def drive(model: Any) -> Tensor:
    """The logits of a prompt in two chunks beside another request, then of a decode."""
    driver, prompt = Driver(model), make_prompt(40)
    first = driver.step({"a": prompt[:25], "b": make_prompt(7, 1)})["a"]
    rest = driver.step({"b": make_prompt(3, 2), "a": prompt[25:39]})["a"]
    return torch.cat([first, rest, driver.step({"a": prompt[39:]})["a"]])


@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_the_logits_of_transformers_and_the_bits_of_one_rank(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    source = make_transformers_model(family, **EIGHTHS | overrides)
    folder = save(source, tmp_path)
    one = compute_logits(folder, None, Sharding(is_sliced=True))
    torch.testing.assert_close(one, compute_expected(source, make_prompt(40)), atol=5e-5, rtol=0)
    for size in (2, 4) if name == "tied head" else (4,):
        found = run_ranks(size, partial(compute_logits, folder, None))[0]
        assert torch.equal(found, one), f"{size} ranks differ by {(found - one).abs().max()}"


@pytest.mark.parametrize(
    ("family", "dtype"), [*((each, torch.float32) for each in WHOLE_EXPERTS), ("mixtral", torch.bfloat16)]
)
def test_ranks_with_whole_experts_have_the_bits_of_one_rank(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = make_transformers_model(family, **EIGHTHS | WHOLE_EXPERTS[family])
    folder = save(source, tmp_path)
    run = partial(compute_logits, folder, None, dtype=dtype)
    one = run(Sharding(is_sliced=True, has_whole_experts=True))
    if dtype == torch.float32:
        torch.testing.assert_close(one, compute_expected(source, make_prompt(40)), atol=5e-5, rtol=0)
    for size in (2, 4):
        found = run_ranks(size, run, has_whole_experts=True)[0]
        assert torch.equal(found, one), f"{size} ranks differ by {(found - one).abs().max()}"


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_ranks_read_their_part_of_4_bit_blocks(has_whole_experts: bool, tmp_path: Path) -> None:
    source = make_transformers_model("gpt_oss", **EIGHTHS | GPT_OSS)
    run = partial(compute_logits, save_mxfp4(source, tmp_path), None)
    one = run(Sharding(is_sliced=True, has_whole_experts=has_whole_experts))
    torch.testing.assert_close(one, compute_expected(source, make_prompt(40)), atol=5e-5, rtol=0)
    assert torch.equal(run_ranks(4, run, has_whole_experts=has_whole_experts)[0], one)


@pytest.mark.parametrize(("quantization", "family"), [("int8", "llama"), ("int4", "llama"), ("int8", "qwen3_moe")])
def test_quantized_ranks_have_the_bits_of_one_rank(quantization: str, family: str, tmp_path: Path) -> None:
    shape = EIGHTHS | {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 2}
    shape |= {"moe_intermediate_size": 1024, "num_experts": 4} if family == "qwen3_moe" else {}
    folder = save(make_transformers_model(family, **shape), tmp_path)
    one = compute_logits(folder, quantization, Sharding(is_sliced=True))
    for size in (2, 4):
        assert torch.equal(run_ranks(size, partial(compute_logits, folder, quantization))[0], one)


# A format of grouped codes, and one of bytes; `make soak` covers the others.
@pytest.mark.parametrize(
    "method", [each if each in ("gptq", "fp8") else pytest.param(each, marks=pytest.mark.soak) for each in FORMATS]
)
def test_ranks_keep_the_codes_of_their_parts(method: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"moe_intermediate_size": 256, "mlp_only_layers": [0], "head_dim": 64}
    _, decoded = write_checkpoint(tmp_path, method, "qwen3_moe", **sizes)

    def run(sharding: Sharding) -> tuple[Any, Tensor]:
        model = load_model(tmp_path, ops=limit_ops(make_native_ops(require_library(), 1)), sharding=sharding)
        return model.layers, drive(model)

    _, one = run(Sharding(is_sliced=True))
    (_, logits), (layers, _) = run_ranks(2, run)
    assert torch.equal(logits, one)
    tolerance: dict[str, Any] = {"atol": 0.02 if method == "fp8" else 1e-3, "rtol": 0}
    mlp = layers[0].mlp
    linears = (mlp.gate_up_proj, mlp.down_proj, layers[0].attention.o_proj)
    assert {each.kind for part in linears for each in part.list_packed()} <= CODES[method]
    gate, down = (decoded[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "down"))
    torch.testing.assert_close(mlp.gate_up_proj.unpack().chunk(2)[0], gate.chunk(2)[1], **tolerance)
    torch.testing.assert_close(mlp.down_proj.unpack(), down.chunk(2, dim=1)[1], **tolerance)
    packed = layers[1].mlp.experts.list_packed()
    assert {each.kind for part in packed for each in (*part.gate, *part.up, *part.down)} <= CODES[method]


def test_each_rank_holds_its_part_of_every_divided_matrix(tmp_path: Path) -> None:
    folder = save(make_transformers_model("qwen3_moe", **EIGHTHS), tmp_path)

    def count(sharding: Sharding) -> int:
        model = DecoderModel(read_model_config(folder), torch.float32, torch.device("meta"), None, sharding)
        copied = ("norm", "embed_tokens", "router")
        return sum(p.numel() for n, p in model.named_parameters() if not any(part in n for part in copied))

    whole = count(Sharding())
    for has_whole_experts in (False, True):
        counts = run_ranks(2, count, has_whole_experts=has_whole_experts)
        assert counts == [pytest.approx(whole / 2, rel=0.01)] * 2


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}, "6 attention heads"),
        ("llama", {"intermediate_size": 90}, "90 inner values"),
        ("qwen3_moe", {"moe_intermediate_size": 22}, "22 inner values of an expert"),
        ("llama", {"hidden_size": 96, "num_key_value_heads": 6, "num_attention_heads": 12}, "6 KV heads"),
        ("olmo2", {}, "norms span all heads"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(make_transformers_model(family, **EIGHTHS | overrides), tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_shardable(read_model_config(folder), 4)


@pytest.mark.parametrize(
    ("family", "message"), [("qwen3_moe", "more than the model's 2 experts"), ("llama", "has no experts")]
)
def test_ranks_without_a_whole_expert_are_refused(family: str, message: str, tmp_path: Path) -> None:
    overrides = EIGHTHS | ({} if family == "llama" else {"num_experts": 2, "num_experts_per_tok": 1})
    folder = save(make_transformers_model(family, **overrides), tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_shardable(read_model_config(folder), 4, has_whole_experts=True)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_fold_in_one_order_and_parts_are_gathered(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 70_000, generator=generator) for _ in range(size)]
    widths = [5, 3, 5, 1][:size]

    def run(sharding: Sharding) -> tuple[Tensor, Tensor | None, Tensor]:
        comm, rank = sharding.comm, sharding.rank
        assert comm is not None
        ids = torch.arange(9) if rank == 0 else torch.zeros(9, dtype=torch.int64)
        total, gathered = (comm.sum(parts[rank]), comm.gather(torch.full((2, widths[rank]), float(rank)), widths))
        comm.broadcast(ids)
        return total, gathered, ids

    results = run_ranks(size, run)
    pairs = [parts[index] + parts[index + 1] for index in range(0, size, 2)]
    expected = pairs[0] + pairs[1] if size == 4 else pairs[0]
    assert all(torch.equal(total, expected) for total, _, _ in results)
    row = torch.cat([torch.full((width,), float(rank)) for rank, width in enumerate(widths)])
    assert torch.equal(results[0][1], row.expand(2, -1)) and results[1][1] is None
    assert all(torch.equal(ids, torch.arange(9)) for _, _, ids in results)


def test_the_end_of_a_rank_ends_the_waiting_of_the_others() -> None:
    with open_comms(2) as (first, second):
        second.close()
        with pytest.raises(RankLost, match="ended"):
            first.sum(torch.ones(4))


def test_ranks_that_add_their_experts_results_give_the_logits_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPUs do so, because counting the pairs of each rank would wait. No rank computes pairs of others."""
    folder = save(make_transformers_model("qwen3_moe", **EIGHTHS, num_experts=7), tmp_path)
    num_rows = []

    def count(rows: Tensor, *rest: Any) -> Tensor:
        num_rows.append(len(rows))
        return run_expert(rows, *rest)

    def run(sharding: Sharding) -> Tensor:
        return drive(load_model(folder, sharding=sharding))

    run_expert = experts._run_expert
    monkeypatch.setattr(experts, "_run_expert", count)
    one, num_pairs = run(Sharding(has_whole_experts=True)), sum(num_rows)
    num_rows.clear()
    monkeypatch.setattr(Experts, "_run_whole", Experts._add_whole)
    torch.testing.assert_close(run_ranks(4, run, has_whole_experts=True)[0], one, atol=5e-5, rtol=0)
    assert sum(num_rows) == num_pairs
