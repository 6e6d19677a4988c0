"""Layers of the checkpoint that predict the token after the next: transformers' own predictions, the same texts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from engine import LLM, SamplingParams
from engine.device.kv_cache import allocate_kv_cache
from engine.errors import ConfigError
from engine.model import load_model
from engine.model.attn_metadata import AttnMetadata
from engine.spec.device.load import load_drafter
from engine.speculative_config import SpeculativeConfig
from kernels.cpu import make_native_ops
from tests.engine.model.drive import make_prompt, make_transformers_model, save
from tests.kernels.cpu.conftest import require_library

FAMILIES = ["deepseek_v3", "glm4_moe"]
CPU = torch.device("cpu")


def write(family: str, folder: Path, seed: int = 0) -> Any:
    """Save a tiny model of three layers, and a fourth one that predicts."""
    model = make_transformers_model(family, first_k_dense_replace=0, num_nextn_predict_layers=1)
    file = save(model, folder) / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    size = model.config.hidden_size

    def draw(name: str, *shape: int) -> Tensor:
        noise = torch.rand(shape, generator=generator)
        return noise + 0.5 if name.endswith("norm.weight") else (noise - 0.5) / 2

    shapes = {f"{name}.weight": (size,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {"eh_proj.weight": (size, 2 * size)}
    prefix = "model.layers.2."
    shapes |= {name.removeprefix(prefix): each.shape for name, each in tensors.items() if name.startswith(prefix)}
    added = {f"model.layers.3.{name}": draw(name, *shape) for name, shape in shapes.items()}
    added["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, file, {"format": "pt"})
    return model


def load(folder: Path) -> Any:
    target = load_model(folder)
    ops = make_native_ops(require_library(), 2)
    return load_drafter(SpeculativeConfig(method=("mtp",), model=str(folder)), target, ops, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_predicts_what_that_of_transformers_predicts(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), torch.tensor([make_prompt(40)])
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    reference = MtpModel.from_pretrained(model).eval()
    net = load(tmp_path).net
    (cache,) = allocate_kv_cache([net.shape.layer.kv_spec], 4, 16, torch.float32, CPU)
    positions = torch.arange(39)
    metadata = AttnMetadata(
        16 + positions[None], torch.tensor([[[1, 2, 3]]], dtype=torch.int32), torch.tensor([0, 39], dtype=torch.int32),
        torch.tensor([39], dtype=torch.int32), [39], [39],
    )  # fmt: skip
    with torch.inference_mode():
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        expected = reference.forward_layer(0, hidden, positions[None], None, input_ids=ids[:, 1:])[0]
        step = net.prepare(net.rotate(positions, metadata), cache, metadata)
        output, predicted = net(ids[0, 1:], hidden[0], cache, step)
    torch.testing.assert_close(output, expected, atol=4e-5, rtol=0)
    assert torch.equal(output, predicted)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_the_layer_change_no_text(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    prompts = [make_prompt(length, length) for length in (3, 40, 41, 90)]
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=24, ignore_eos=True) for n in range(4)]
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 128, "num_blocks": 40}
    found = []
    for method in (None, {"method": "deepseek_mtp", "adaptive": False, "num_speculative_tokens": 3}):
        with LLM(str(tmp_path), speculative_config=method, max_num_batched_tokens=64, **settings) as llm:
            runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            found.append([[output.outputs[0].token_ids for output in run] for run in runs])
            drafts = llm.stats().drafts
    assert found[0] == found[1]
    assert drafts["mtp"].num_draft_tokens > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_knows_the_answer_is_accepted_whole(family: str, tmp_path: Path) -> None:
    """Layers add nothing here, so the next token follows from the last one alone."""
    write(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
        tensors[name].zero_()
    size, prefix = len(tensors["model.norm.weight"]), "model.layers.3."
    tensors[f"{prefix}eh_proj.weight"] = torch.eye(size, 2 * size)
    tensors[f"{prefix}enorm.weight"].fill_(1.0)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    method = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3}
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 128, "num_blocks": 40}
    with LLM(str(tmp_path), speculative_config=method, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate([make_prompt(20), make_prompt(3)], params, use_tqdm=False)
        counts = llm.stats().drafts["mtp"]
    assert sum(counts.accepted_per_position) >= 0.9 * counts.num_draft_tokens >= 50


def test_a_checkpoint_without_such_layers_is_refused(tmp_path: Path) -> None:
    save(make_transformers_model("glm4_moe", num_nextn_predict_layers=0), tmp_path)
    with pytest.raises(ConfigError, match="method='mtp': Glm4MoeForCausalLM has no multi-token-prediction layers"):
        load(tmp_path)
