"""device=mps, without a Mac: its choices and errors, and steps on the meta device, which has no values to read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine import ConfigError, EngineConfig
from engine.device.device_link import upload
from engine.device.device_memory import open_device
from engine.device.kv_cache import allocate_kv_cache
from engine.device.ops_choice import make_ops
from engine.host_memory import measure_host_memory
from engine.model import DecoderModel, ModelConfig, RopeConfig
from engine.model.weight_memory import measure_free_bytes
from engine.resolved_config import WorkerConfig
from engine.sampling_params import Pooling, SamplingParams
from engine.worker.cache_sizer import CacheSizer
from engine.worker.device_choice import DeviceFacts, choose_worker_config, probe_device
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.state import SamplingState
from tests.engine.model.drive import VOCAB_SIZE, make_transformers_model, save
from tests.engine.worker.plans import make_new_row, make_plan

META = torch.device("meta")
MPS = DeviceFacts("mps", triton_gap="triton is not installed")
MODEL = ModelConfig("Qwen3ForCausalLM", 100, 32, 64, 2, 4, 2, 8, 128, RopeConfig(), dtype="bfloat16")
GIB = 2**30


def choose(**settings: Any) -> WorkerConfig:
    return choose_worker_config(EngineConfig(device="mps", **settings), MODEL, MPS)[0]


def test_torch_ops_run_there_in_the_dtype_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = choose()
    assert (worker.device, worker.attention_backend, worker.dtype) == ("mps", "sdpa", "bfloat16")
    assert not worker.enable_native_ops and not worker.enable_cuda_graphs
    assert make_ops(worker, torch.bfloat16, None).name == "torch-sdpa"
    assert choose(dtype="float16").dtype == "float16"
    monkeypatch.setattr(torch.cuda, "Stream", None)
    assert open_device(worker) == (torch.device("mps"), None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "triton"}, "needs a CUDA device"),
        ({"attention_backend": "native"}, "runs on the CPU only"),
        ({"quantization": "int8"}, "quantization='int8' does not work with device='mps'; use 'none', or --device cpu"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' does not work with device='mps'; use 'auto'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not work with device='mps'; use 1"),
        ({"kv_offload_gb": 1.0}, "kv_offload_gb=1.0 does not work with device='mps'; use 0.0"),
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "method='eagle'.*ngram"),
    ],
)
def test_what_does_not_work_there_is_refused_with_a_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(**settings)


@pytest.mark.parametrize(("is_built", "why"), [(False, "no MPS in it"), (True, "no GPU that Metal can use")])
def test_a_torch_without_mps_is_named(is_built: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device='mps': torch .* has {why}.*use --device cpu"):
        probe_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert probe_device("mps").kind == "mps"


def test_memory_is_that_which_metal_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * GIB // 4)
    assert measure_free_bytes(torch.device("mps")) == min(GIB // 4, measure_host_memory()[1])
    specs = [spec.kv_spec for spec in MODEL.layer_specs]
    sizer = CacheSizer(EngineConfig(device="mps", memory_share=0.5), choose(), MODEL, specs)
    resolved = sizer.estimate(make_ops(choose(), torch.bfloat16, None), None)
    block_bytes = 2 * 2 * 16 * 2 * 8 * 2  # keys and values, layers, tokens, heads, numbers, bytes
    assert 0 < resolved.cache.num_blocks * block_bytes <= 0.8 * GIB / 4


class Strict(TorchDispatchMode):
    """Lets values leave the meta device as zeros, and refuses float64 on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__.startswith(("to.", "_to_copy")) and torch.device("cpu") in (*args[1:], *kwargs.values()):
            return torch.zeros(args[0].shape, dtype=args[0].dtype) if args[0].is_meta else args[0]
        found = func(*args, **kwargs)
        assert not (isinstance(found, Tensor) and found.is_meta and found.dtype == torch.float64), func
        return found


def test_a_step_computes_there_and_draws_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mix of both devices, a pinned upload, or float64 on the device would raise."""
    config = ModelConfig.from_pretrained(save(make_transformers_model("qwen3"), tmp_path))
    model = DecoderModel(config, torch.bfloat16, META, make_ops(choose(), torch.bfloat16, None))
    model.pack()
    caches = allocate_kv_cache(model.kv_specs(), 9, 16, torch.bfloat16, META)
    runner = ModelRunner(
        model, caches, InputBatch(4, 64, 16, META), SamplingState(4, VOCAB_SIZE, torch.device("cpu")), (0,)
    )
    monkeypatch.setattr(Tensor, "pin_memory", None)
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(top_p=0.9, logprobs=2, prompt_logprobs=1, presence_penalty=0.5, bad_words=("x",), max_tokens=9),
        SamplingParams(max_tokens=1, pooling=Pooling("mean")),
    ]
    rows = [make_new_row(row, [1] * 20, [1 + 2 * row, 2 + 2 * row], each) for row, each in enumerate(params)]
    with Strict():
        done: Any = runner.execute(make_plan([(row, 0, 20) for row in range(3)], new=rows))
        assert done.token_ids.tolist()[:1] == [0] and len(done.token_ids) == 3
        assert len(done.logprobs[1]) == 1 and len(done.prompt_logprobs[1]) == 19
        assert done.pooled[2].tolist() == [0.0] * config.hidden_size
        drafts: Any = runner.execute(make_plan([(0, 20, 3), (1, 20, 1)], 1, drafts={0: [0, 5]}))
    assert drafts.counts.tolist() == [2, 1]
    assert upload(done.token_ids, META).device == META
