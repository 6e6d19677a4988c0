"""Logits of tiny checkpoints in float8 and in codes, from the file through the kernels, against torch's ops."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.device.weight_moves import list_tensors, move_tensors
from engine.model import DecoderModel, load_model
from kernels.ops import Ops
from kernels.scaled import ScaledTensor, round_float8
from kernels.torch import make_ops as make_torch_ops
from kernels.triton import make_ops
from kernels.triton.linear import pack_linear
from kernels.triton.products import CodedWeight
from tests.engine.model.drive import VOCAB_SIZE, Driver, make_prompt, make_transformers_model, save
from tests.engine.model.formats import test_packed as packed_formats
from tests.engine.model.formats.gguf_files import write_gguf
from tests.kernels.triton.conftest import IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_INTERPRETED, reason="the driver's caches are on the CPU; test_interpreter.py runs this"
    ),
]

CPU = torch.device("cpu")
FEW_LAYERS = {"num_hidden_layers": 1}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False,
        }},
    },
}  # fmt: skip


def encode_channels(shape: torch.Size) -> tuple[dict[str, Tensor], ScaledTensor]:
    values = packed_formats.draw(-100, 100, *shape).float().to(torch.float8_e4m3fn)
    scales = packed_formats.draw_scales(shape[0], 1, dtype=torch.float32) * 0.1
    return {"weight": values, "weight_scale": scales}, ScaledTensor(values, scales)


def make_rounding_ops() -> Ops:
    """Return torch's ops that round the inputs of every matrix but the head as products of float8 do."""
    ops = make_torch_ops(CPU)

    def round_inputs(x: Tensor, weight: Any) -> Tensor:
        return x if len(weight) == VOCAB_SIZE else round_float8(x).dequantize()

    return replace(
        ops,
        linear=lambda x, weight, *rest: ops.linear(round_inputs(x, weight), weight, *rest),
    )


def compute_logits(model: DecoderModel, num_tokens: int) -> Tensor:
    """Return the logits of a prompt, and of one token behind it."""
    driver, prompt = Driver(model, num_blocks=8), make_prompt(num_tokens)
    return torch.cat([driver.step({"a": part})["a"] for part in (prompt[:-1], prompt[-1:])])


@pytest.mark.parametrize("method", ["fp8", "channels"])
def test_a_checkpoint_of_float8_gives_the_logits_of_torch(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packed_formats.FORMATS, "channels", (CHANNELS, encode_channels))
    packed_formats.write_checkpoint(tmp_path, method, **FEW_LAYERS)
    ops = replace(make_ops(CPU, torch.float32), pack_linear=partial(pack_linear, device=CPU, has_fp8=True))
    model = load_model(tmp_path, ops=ops)
    for layer in model.layers:
        for linear in (
            layer.attention.qkv_proj,
            layer.attention.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        ):
            assert isinstance(linear.packed, CodedWeight) and linear.packed.is_float
    expected = compute_logits(load_model(tmp_path, ops=make_rounding_ops()), 4)
    torch.testing.assert_close(compute_logits(model, 4), expected, atol=1e-3, rtol=1e-3)


def test_a_gguf_file_gives_the_logits_of_torch_also_after_a_move(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save(make_transformers_model("llama", **SIZES, **FEW_LAYERS), tmp_path), path, {"": Type.Q4_1})
    model = load_model(path, ops=make_ops(CPU, torch.float32))
    packed = model.layers[0].mlp.gate_up_proj.packed
    assert isinstance(packed, CodedWeight) and packed.bits == 4
    found, expected = compute_logits(model, 3), compute_logits(load_model(path), 3)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    tensors = list_tensors(model)
    old = [each.data_ptr() for each in tensors]
    move_tensors(tensors, CPU)  # as a sleep and a wake do; a copy
    model.move(CPU)
    assert all(each.data_ptr() != place for each, place in zip(tensors, old, strict=True))
    assert torch.equal(compute_logits(model, 3), found)
