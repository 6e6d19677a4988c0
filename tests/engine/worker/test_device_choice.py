"""Choices for a device: dtype, attention, quantization; refusals name an alternative."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.model import ModelConfig, RopeConfig
from engine.model.formats.quant_config import WeightFormat
from engine.worker import device_choice
from engine.worker.device_choice import DeviceFacts, choose_worker_config, probe_device
from kernels.cpu import NativeBuild

CPU = DeviceFacts("cpu", num_cores=2)
T4 = DeviceFacts("cuda", (7, 5))
A100 = DeviceFacts("cuda", (8, 0))
H200 = DeviceFacts("cuda", (9, 0))
H200_WITHOUT_TRITON = DeviceFacts("cuda", (9, 0), triton_gap="triton is not installed")
MODEL = ModelConfig("Qwen3ForCausalLM", 100, 32, 64, 2, 4, 2, 8, 128, RopeConfig(), dtype="bfloat16")


def choose(facts: DeviceFacts, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    worker, notices = choose_worker_config(EngineConfig(**settings), MODEL, facts)
    return {name: getattr(worker, name) for name in worker.__slots__}, notices


@pytest.mark.parametrize(
    ("facts", "backend", "dtype", "has_native", "has_graphs"),
    [
        (CPU, "sdpa", "float32", True, False), (T4, "sdpa", "float16", False, False),
        (A100, "triton", "bfloat16", False, True), (H200, "triton", "bfloat16", False, True),
        (H200_WITHOUT_TRITON, "sdpa", "bfloat16", False, False),
    ],
)
def test_auto_takes_the_best_that_is_there(
    facts: DeviceFacts, backend: str, dtype: str, has_native: bool, has_graphs: bool
) -> None:
    chosen, _ = choose(facts)
    assert (chosen["attention_backend"], chosen["dtype"]) == (backend, dtype)
    assert (chosen["enable_native_ops"], chosen["enable_cuda_graphs"]) == (has_native, has_graphs)


def test_what_is_chosen_against_expectation_is_said() -> None:
    assert choose(H200)[1] == []
    notices = " / ".join(choose(T4)[1])
    assert "float16 instead of the checkpoint's bfloat16" in notices
    assert "sdpa, because this GPU is older than compute capability 8.0" in notices
    assert "triton is not installed" in " / ".join(choose(H200_WITHOUT_TRITON)[1])


@pytest.mark.parametrize(
    ("facts", "settings", "message"),
    [
        (CPU, {"attention_backend": "triton"}, "needs a CUDA device; use auto, native or sdpa"),
        (H200_WITHOUT_TRITON, {"attention_backend": "triton"}, "triton is not installed"),
        (T4, {"attention_backend": "triton"}, r"compute capability 7.5\) is older than 8.0; use sdpa"),
        (H200, {"attention_backend": "native"}, "runs on the CPU only; use auto, triton or sdpa"),
        (CPU, {"attention_backend": "native", "enable_native_ops": False}, "contradicts enable_native_ops"),
        (T4, {"dtype": "bfloat16"}, r"dtype='bfloat16': this GPU \(compute capability 7.5\) has none"),
        (CPU, {"quantization": "fp8"}, "quantization='fp8' needs a CUDA device.*use int8 or int4"),
        (A100, {"quantization": "fp8"}, "needs compute capability 8.9, this GPU has 8.0; use int8"),
        (H200, {"quantization": "fp8", "dtype": "float16"}, "needs dtype bfloat16, not float16"),
        (T4, {"quantization": "int4"}, "quantization='int4' needs Triton's kernels on a GPU, not sdpa; use int8"),
        (CPU, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' needs a CUDA device.*use int8"),
        (H200, {"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is for the CPU.*use fp8"),
        (CPU, {"kv_cache_dtype": "int8", "block_size": 24}, "block_size=24 must be a multiple of 16"),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_a_way_out(
    facts: DeviceFacts, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(facts, **settings)


def test_int8_runs_everywhere_and_int4_with_native_and_triton_kernels() -> None:
    assert all(choose(facts, quantization="int8")[0]["quantization"] == "int8" for facts in (CPU, T4, H200))
    for facts, dtype in ((CPU, "auto"), (A100, "float16")):
        assert choose(facts, quantization="int4", dtype=dtype)[0]["quantization"] == "int4"


def test_native_ops_can_be_disabled() -> None:
    for off in ({"enable_native_ops": False}, {"attention_backend": "sdpa"}):
        assert not choose(CPU, **off)[0]["enable_native_ops"]




def test_the_cpu_is_probed_as_it_is() -> None:
    facts = probe_device("cpu")
    assert (facts.kind, facts.capability) == ("cpu", (0, 0))
    assert facts.num_cores >= 1


def test_a_gpu_that_torch_cannot_use_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.80.02  Wed Sep 23\nGCC version:\n")
    monkeypatch.setattr(device_choice, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = probe_device("auto")
    assert facts.kind == "cpu"
    assert "driver 450.80.02" in facts.idle_gpu and torch.__version__ in facts.idle_gpu
    assert probe_device("cpu").idle_gpu == ""
    monkeypatch.setattr(device_choice, "NVIDIA_DRIVER", tmp_path / "none")
    assert probe_device("auto").idle_gpu == ""


WIDE = replace(MODEL, vocab_size=2_000_000, hidden_size=64)  # 130 million parameters


@pytest.mark.parametrize(
    ("model", "changes", "settings", "expected", "why"),
    [
        (WIDE, {}, {}, "bfloat16", "that of the checkpoint"),
        (MODEL, {}, {}, "float32", "fewer than 100,000,000 parameters"),
        (WIDE, {"bfloat16_gap": "no products"}, {}, "float32", "no products"),
        (WIDE, {}, {"enable_native_ops": False}, "float32", "native ops are off"),
        (WIDE, {}, {"attention_backend": "sdpa"}, "float32", "native ops are off"),
        (replace(WIDE, dtype="float16"), {}, {}, "float32", "the checkpoint is in float16"),
        (replace(WIDE, weight_format=WeightFormat("gguf")), {}, {}, "float32", "weights are quantized"),
    ],
)
def test_a_cpu_takes_bfloat16_where_native_ops_compute_in_it(
    model: ModelConfig,
    changes: dict[str, Any],
    settings: dict[str, Any],
    expected: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="troupe.worker")
    worker, notices = choose_worker_config(EngineConfig(**settings), model, replace(CPU, **changes))
    assert (worker.dtype, notices) == (expected, [])
    assert f"dtype {expected}: " in caplog.text
    assert why in caplog.text


def test_a_processor_without_products_of_bfloat16_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "read_cpu_flags", lambda: frozenset({"avx2"}))
    assert probe_device("cpu").bfloat16_gap == "this processor has no bfloat16 products (avx512_bf16)"
    monkeypatch.setattr(device_choice, "read_cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(NativeBuild, "find_gap", lambda build: "no C++ compiler found")
    assert probe_device("cpu").bfloat16_gap == "no native ops: no C++ compiler found"
