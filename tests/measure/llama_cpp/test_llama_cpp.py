"""The peer that needs a file of its own: what is written into it, and that it computes the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.config import UsageError
from engine import EngineConfig
from tests.measure.llama_cpp.library import INSTALL, LIBRARY

gguf = pytest.importorskip("gguf", reason="the optional package gguf is not installed")
from tests.measure.llama_cpp.gguf_file import write_gguf  # noqa: E402  needs gguf

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 160, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS = gguf.GGMLQuantizationType
QUANTIZED = {"int8": KINDS.Q8_0, "int4": KINDS.Q4_0}


@pytest.fixture(params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model; Llama with a tied head, Qwen3 with one of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = AutoConfig.for_model(request.param, **SIZES, tie_word_embeddings=request.param == "llama")
        model = AutoModelForCausalLM.from_config(shape)
    model.to(torch.bfloat16).save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def load_reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def write_and_read(checkpoint: Path, kind: Any) -> dict[str, np.ndarray]:
    target = checkpoint / "model.gguf"
    write_gguf(checkpoint, target, kind)
    tensors = gguf.GGUFReader(target).tensors
    return {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in tensors}


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(KINDS.BF16, 0.0), (KINDS.F32, 0.0), (KINDS.Q8_0, 0.5 / 127 + 2**-11)]
)
def test_the_file_holds_the_weights_of_the_checkpoint(checkpoint: Path, kind: Any, tolerance: float) -> None:
    found = write_and_read(checkpoint, kind)
    weights = load_reference(checkpoint).state_dict()
    for name, there in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        expected = weights[f"model.layers.1.{name}.weight"].numpy()
        difference = np.abs(found[f"blk.1.{there}.weight"] - expected).max()
        assert difference <= tolerance * np.abs(expected).max()
    assert ("output.weight" in found) == (checkpoint.name == "qwen3")


def test_queries_of_llama_have_the_values_that_rotate_together_side_by_side(checkpoint: Path) -> None:
    found = write_and_read(checkpoint, KINDS.BF16)["blk.0.attn_q.weight"]
    rows = load_reference(checkpoint).state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    if checkpoint.name == "llama":
        rows = rows.reshape(4, 2, 16, 64).swapaxes(1, 2).reshape(128, 64)  # [heads, halves, 16, hidden]
    assert np.array_equal(found, rows)


def test_a_model_it_cannot_have_is_refused(checkpoint: Path) -> None:
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(config.replace(f'"{checkpoint.name}"', '"olmo"'))
    with pytest.raises(UsageError, match="model_type 'olmo' is not one of llama, qwen3"):
        write_gguf(checkpoint, checkpoint.parent / "model.gguf", KINDS.BF16)


@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [("float32", "none", 0.01), ("bfloat16", "none", 0.1), ("bfloat16", "int8", 0.3), ("bfloat16", "int4", 0.3)],
)
def test_its_tokens_are_the_best_of_transformers(
    checkpoint: Path, dtype: Any, quantization: Any, tolerance: float
) -> None:
    """Each is, by the logits of the same rounded weights, the best one or within a tolerance (in deviations)."""
    if not LIBRARY.exists():
        pytest.skip(f"llama.cpp's library is not installed: {INSTALL}")
    config = EngineConfig(model=str(checkpoint), dtype=dtype, quantization=quantization)
    from tests.measure.llama_cpp.runner import LlamaCppRunner  # needs the library

    runner: Any = LlamaCppRunner(config, 1)
    try:
        prompts = np.random.default_rng(0).integers(0, 160, (3, 11))
        answers = runner.generate(prompts, 10)
        assert np.array_equal(answers, runner.generate(prompts, 10)), "the cache was not cleared"
    finally:
        runner.close()
    everything = torch.from_numpy(np.concatenate((prompts, answers), axis=1))
    reference = load_reference(checkpoint)
    with torch.inference_mode():
        for weight in reference.parameters():
            if weight.dim() == 2 and quantization != "none":
                kind = QUANTIZED[quantization]
                rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
                weight.copy_(torch.from_numpy(rounded))
        logits = reference(everything).logits[:, 10:-1]
    chosen = logits.gather(2, torch.from_numpy(answers)[:, :, None])[:, :, 0]
    worst = ((logits.amax(2) - chosen) / logits.std(2)).max()
    assert worst <= tolerance
    assert len(set(answers.ravel().tolist())) > 5, "a model that repeats itself would hide a wrong position"
