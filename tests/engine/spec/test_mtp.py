"""Layers of the checkpoint that predict the token after the next: predictions of a reference, the same texts."""

from copy import deepcopy
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
from tests.engine.mixed_requests import make_mixed_requests
from tests.engine.model.drive import make_prompt, make_transformers_model, save
from tests.engine.spec.compare_methods import count_differences, make_mtp_folder, run
from tests.engine.spec.mtp_folders import FAMILIES, NUMBERED, list_names, write_mtp_folder
from tests.kernels.cpu.conftest import require_library

CPU = torch.device("cpu")


def predict(model: Any, folder: Path, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Compute a separate layer of a Qwen model with transformers' own decoder layer and norm."""
    tensors = load_file(folder / "model.safetensors")
    layer, norm = deepcopy(model.model.layers[-1]), deepcopy(model.model.norm)
    own = {name.removeprefix("mtp.layers.0."): each for name, each in tensors.items() if "mtp.layers.0." in name}
    experts = [
        {name: own.pop(f"mlp.experts.{number}.{name}_proj.weight") for name in ("gate", "up", "down")}
        for number in range(getattr(model.config, "num_experts", 0))
    ]
    if experts:
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in experts])
        own["mlp.experts.down_proj"] = torch.stack([each["down"] for each in experts])
    layer.load_state_dict(own)

    def scale(name: str, x: Tensor) -> Tensor:
        norm.weight.data = tensors[f"mtp.{name}.weight"]
        return norm(x)

    pair = scale("pre_fc_norm_embedding", model.model.embed_tokens(token_ids)), scale("pre_fc_norm_hidden", hidden)
    x = torch.cat(pair, dim=-1) @ tensors["mtp.fc.weight"].t()
    mask = torch.full((len(positions),) * 2, -torch.inf).triu(1)[None, None]
    x = layer(x, position_embeddings=model.model.rotary_emb(x, positions[None]), attention_mask=mask)
    return scale("norm", x[0] if isinstance(x, tuple) else x)


def load(folder: Path) -> Any:
    target = load_model(folder)
    ops = make_native_ops(require_library(), 2)
    return load_drafter(SpeculativeConfig(method=("mtp",), model=str(folder)), target, ops, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_predicts_what_that_of_the_reference_predicts(family: str, tmp_path: Path) -> None:
    model, ids = write_mtp_folder(family, tmp_path), torch.tensor([make_prompt(40)])
    net = load(tmp_path).net
    (cache,) = allocate_kv_cache([net.shape.layer.kv_spec], 4, 16, torch.float32, CPU)
    positions = torch.arange(39)
    metadata = AttnMetadata(
        16 + positions[None], torch.tensor([[[1, 2, 3]]], dtype=torch.int32), torch.tensor([0, 39], dtype=torch.int32),
        torch.tensor([39], dtype=torch.int32), [39], [39],
    )  # fmt: skip
    with torch.inference_mode():
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        if family in NUMBERED:
            model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
            model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
            reference = MtpModel.from_pretrained(model).eval()
            expected = reference.forward_layer(0, hidden, positions[None], None, input_ids=ids[:, 1:])[0]
        else:
            expected = predict(model, tmp_path, hidden, ids[:, 1:], positions)[0]
        step = net.prepare(net.rotate(positions, metadata), cache, metadata)
        output, predicted = net(ids[0, 1:], hidden[0], cache, step)
    torch.testing.assert_close(output, expected, atol=4e-5, rtol=0)
    assert torch.equal(output, predicted)


# One whose layers are numbered, and one whose layers are apart; `make soak` covers the others.
TWO = ["deepseek_v3", "qwen3_5_moe"]
TWO += [pytest.param(each, marks=pytest.mark.soak) for each in FAMILIES if each not in TWO]


@pytest.mark.soak  # the mixed requests below do the same with one family
@pytest.mark.parametrize("family", TWO[:1])
def test_drafts_of_the_layer_change_no_text(family: str, tmp_path: Path) -> None:
    write_mtp_folder(family, tmp_path)
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


async def test_mixed_requests_do_not_depend_on_drafts_of_the_layer(tmp_path: Path) -> None:
    """One request of every kind, with preemptions and aborts; a hybrid also takes back states."""
    folder = make_mtp_folder("qwen3_next", tmp_path)
    requests = make_mixed_requests(num_requests=26)
    expected, _ = await run("off", requests, model=folder)
    found, stats = await run({"method": "mtp", "num_speculative_tokens": 3}, requests, model=folder)
    assert count_differences(expected, found) == 0
    assert stats.num_preemptions and stats.drafts["mtp"].num_draft_tokens > 200


@pytest.mark.parametrize("family", TWO)
def test_a_layer_that_knows_the_answer_is_accepted_whole(family: str, tmp_path: Path) -> None:
    """Layers add nothing here, so the next token follows from the last one alone."""
    number = write_mtp_folder(family, tmp_path).config.num_hidden_layers
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))]:
        tensors[name].zero_()
    (fc, embedding_norm, _, norm), _, outer = list_names(family, number)
    size = len(tensors["model.norm.weight"])
    tensors[outer + fc] = torch.eye(size, 2 * size)
    tensors[outer + embedding_norm].fill_(float(family in NUMBERED))  # 1, or an offset of 1
    tensors[outer + norm] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    method = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3}
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 128, "num_blocks": 40}
    with LLM(str(tmp_path), speculative_config=method, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate([make_prompt(20), make_prompt(3)], params, use_tqdm=False)
        counts = llm.stats().drafts["mtp"]
    assert sum(counts.accepted_per_position) >= 0.9 * counts.num_draft_tokens >= 50


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_next", marks=pytest.mark.soak)])
def test_layers_draft_by_default_if_the_checkpoint_has_them_and_it_is_not_off(family: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 128, "num_blocks": 40}

    def find(**more: Any) -> dict[str, Any]:
        with LLM(str(tmp_path), **settings, **more) as llm:
            # Long enough that a layer which seems too dear on a busy machine is asked again.
            llm.generate([make_prompt(9)], SamplingParams(max_tokens=110, ignore_eos=True), use_tqdm=False)
            return dict(llm.stats().drafts)

    model = write_mtp_folder(family, tmp_path)
    assert find(device="cpu").keys() == {"mtp"}
    assert not find(speculative_config="off")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    first = "model.layers.3.mlp." if family in NUMBERED else "mtp.layers.0."
    del tensors[next(name for name in tensors if name.startswith(first))]
    save_file(tensors, file, {"format": "pt"})
    assert not find()
    save(model, tmp_path)  # without the layer, which the config still names
    assert not find()


def test_a_checkpoint_without_such_layers_is_refused(tmp_path: Path) -> None:
    save(make_transformers_model("glm4_moe", num_nextn_predict_layers=0), tmp_path)
    with pytest.raises(ConfigError, match="method='mtp': Glm4MoeForCausalLM has no multi-token-prediction layers"):
        load(tmp_path)
