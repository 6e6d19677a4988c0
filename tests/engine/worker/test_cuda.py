"""The worker on a real GPU: no hidden waits, recorded steps, fewer bits, and every way to attend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import LLM, EngineConfig, SamplingParams
from engine.device.cuda_link import CudaLink, forbid_syncs
from engine.worker.worker import Worker
from kernels import torch as torch_ops
from tests.engine.model.drive import make_prompt, make_transformers_model, save
from tests.engine.worker.plans import GREEDY, make_new_row, make_plan

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(600),
]
LENGTHS = (1, 2, 16, 17, 100, 333)
# Every kernel takes them: int4 wants groups of 128, tensor cores want heads of 64.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_transformers_model("qwen3", **SIZES), tmp_path_factory.mktemp("model"))


def generate(folder: Path, params: SamplingParams = GREEDY, **settings: Any) -> list[list[int]]:
    prompts = [make_prompt(length, length) for length in LENGTHS]
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 400, "max_num_seqs": 16} | settings
    with LLM(str(folder), skip_tokenizer_init=True, device="cuda", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[list[int]]:
    return generate(folder, attention_backend="sdpa", enable_overlap=False)


def test_greedy_tokens_equal_those_of_transformers_on_the_cpu(folder: Path, reference: list[list[int]]) -> None:
    model = make_transformers_model("qwen3", **SIZES)
    options = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    for length, tokens in zip(LENGTHS, reference, strict=True):
        ids = torch.tensor([make_prompt(length, length)])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        assert tokens == expected[0, length:].tolist(), length


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "triton", "enable_cuda_graphs": False}, {"attention_backend": "triton"},
        {"attention_backend": "triton", "max_num_batched_tokens": 40}, {"attention_backend": "sdpa"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_every_way_gives_the_same_tokens(folder: Path, reference: list[list[int]], settings: dict[str, Any]) -> None:
    assert generate(folder, **settings) == reference


def test_launching_a_step_never_waits_for_the_device(
    folder: Path, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(
        seed=1, max_tokens=12, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=3,
        prompt_logprobs=2, ignore_eos=True,
    )  # fmt: skip
    expected = generate(folder, params)
    monkeypatch.setattr(CudaLink, "checks_syncs", True)
    assert generate(folder, core="local") == reference
    assert generate(folder, params, core="local") == expected


def test_the_sync_check_catches_a_wait() -> None:
    from_host = torch.ones(1, device="cuda")
    with forbid_syncs(), pytest.raises(RuntimeError, match="synchroniz"):
        from_host.item()


def skip_without_fp8(quantization: str | None) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")


@pytest.mark.parametrize(
    ("settings", "min_same"),
    [
        ({"quantization": "int8"}, 0.5), ({"quantization": "fp8"}, 0.4), ({"quantization": "int4"}, 0.1),
        ({"kv_cache_dtype": "fp8"}, 0.4), ({"kv_cache_dtype": "fp8", "attention_backend": "sdpa"}, 0.4),
    ],
    ids=str,
)
def test_fewer_bits_keep_the_first_tokens(folder: Path, settings: dict[str, Any], min_same: float) -> None:
    skip_without_fp8(settings.get("quantization"))
    plain = generate(folder, dtype="bfloat16")
    rounded = generate(folder, dtype="bfloat16", **settings)
    same = [one[0] == other[0] for one, other in zip(plain, rounded, strict=True)]
    assert sum(same) / len(same) >= min_same


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 100])
def test_quantized_products_are_near_plain_ones(quantization: Any, num_tokens: int) -> None:
    skip_without_fp8(quantization)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 256, generator=generator).to("cuda", torch.bfloat16) for n in (512, num_tokens))
    ops = torch_ops.make_ops()
    actual = ops.linear(x, ops.pack_linear(weight, None, quantization), None).float()
    expected = x.float() @ weight.float().t()
    least = {"int8": 0.9995, "fp8": 0.998, "int4": 0.985}[quantization]
    assert torch.cosine_similarity(actual, expected, dim=-1).min() > least


def make_worker(folder: Path) -> Worker:
    sizes = {"dtype": "float32", "num_blocks": 100, "max_num_seqs": 16}
    worker = Worker(EngineConfig(model=str(folder), device="cuda", **sizes), eos_token_ids=(1,))
    worker.load()
    return worker


def test_two_steps_are_launched_before_the_first_is_read(folder: Path) -> None:
    new = make_new_row(0, make_prompt(9), [1, 2])
    plans = make_plan([(0, 0, 9)], new=[new]), make_plan([(0, 9, 1)], 1)
    worker, alone = make_worker(folder), make_worker(folder)
    launched = [worker.execute(plan) for plan in plans]
    expected = [list(alone.execute(plan).wait().token_ids) for plan in plans]
    assert [list(step.wait().token_ids) for step in launched] == expected
    assert [len(tokens) for tokens in expected] == [1, 1]


def test_recording_goes_on_between_steps_and_ends(folder: Path) -> None:
    worker = make_worker(folder)
    before = worker.describe()
    assert before["num_recorded_graphs"] == 1
    while worker.do_chore():
        continue
    assert worker.describe()["num_recorded_graphs"] == 1 + int(before["num_graphs_left"])
    assert worker.describe()["ops"] == "triton"


def test_seeded_tokens_are_those_of_the_cpu(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    prompts = [make_prompt(length, length) for length in LENGTHS]
    with LLM(str(folder), skip_tokenizer_init=True, device="cpu", num_blocks=400) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert generate(folder, params) == [output.outputs[0].token_ids for output in outputs]
