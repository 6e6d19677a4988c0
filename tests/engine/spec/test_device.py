"""Draft model and EAGLE: their drafts are those of slow references, and texts stay the same."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assets.demo_model.recipe.companions.acceptance import count_accepted, load_drafters, read_prompts
from assets.demo_model.recipe.companions.frozen import FOLDER, load_decoder, open_encoder
from engine import LLM, ConfigError, SamplingParams
from engine.model import load_model, read_model_config
from engine.model.attn_metadata import AttnMetadata
from engine.spec.device.checkpoint import read_head_folder
from engine.spec.device.eagle import Eagle
from engine.spec.device.eagle_net import EagleNet
from engine.spec.device.hidden_store import HiddenStore
from engine.spec.device.load import load_drafter
from engine.speculative_config import SpeculativeConfig
from engine.worker import loaded_model
from kernels import Ops
from kernels.cpu import make_native_ops
from kernels.ops import KVCache
from kernels.torch import make_ops
from tests.engine.mixed_requests import Completion, make_mixed_requests
from tests.engine.model.drive import make_transformers_model, save
from tests.engine.spec.compare_methods import METHODS, VOCAB_SIZE, run
from tests.kernels.cpu.conftest import require_library

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
LONG_GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
REQUESTS = make_mixed_requests(3, VOCAB_SIZE, 26)


@pytest.fixture(scope="module")
def plain_answers() -> list[list[Completion]]:
    found, _ = asyncio.run(run("off", REQUESTS))
    return found


@pytest.mark.parametrize(
    "name", ["all", *(pytest.param(each, marks=pytest.mark.soak) for each in ("draft_model", "eagle"))]
)
def test_mixed_requests_get_the_same_texts_and_logprobs(name: str, plain_answers: list[list[Completion]]) -> None:
    found, stats = asyncio.run(run(METHODS[name], REQUESTS))
    assert found == plain_answers
    assert stats.num_free_blocks == stats.num_blocks
    # How many depends on measured times.
    assert sum(counts.num_draft_tokens for counts in stats.drafts.values()) > 0


@pytest.fixture(scope="module")
def answers() -> list[tuple[list[int], list[int]]]:
    """Prompts and their greedy answers."""
    prompts = read_prompts(open_encoder(FOLDER), 1, 1)
    ids = prompts["extraction"] + prompts["chat"]
    with LLM(num_threads=1, num_blocks=200, max_model_len=1024) as llm:
        outputs = llm.generate(ids, LONG_GREEDY, use_tqdm=False)
    return [(prompt, output.outputs[0].token_ids) for prompt, output in zip(ids, outputs, strict=True)]


@pytest.mark.parametrize(
    ("name", "slack"), [pytest.param("draft_model", 0.0, marks=pytest.mark.soak), ("eagle", 0.02)]
)
def test_as_many_tokens_are_accepted_as_by_a_slow_reference(
    name: str, slack: float, answers: list[tuple[list[int], list[int]]]
) -> None:
    """EAGLE differs by slot 0, whose keys are zero here and absent there."""
    base = load_decoder(FOLDER).float()
    propose = load_drafters(base, FOLDER)["draft" if name == "draft_model" else name]
    config = METHODS[name] | {"adaptive": False}
    num_steps = num_expected = 0
    with LLM(speculative_config=config, num_threads=1, num_blocks=200, max_model_len=1024) as llm:
        for ids, reference in answers:
            output = llm.generate(ids, LONG_GREEDY, use_tqdm=False)[0]
            accepted, _ = count_accepted(ids, reference, propose, 3)
            num_steps += len(output.outputs[0].token_ids) - output.metrics.drafts[name][1]
            num_expected += len(reference) - sum(accepted)
    assert num_steps <= num_expected * (1.05 + slack) + 3


def test_a_prefix_hit_keeps_the_drafters_keys() -> None:
    ids = read_prompts(open_encoder(FOLDER), 1, 1)["extraction"][0]
    config = METHODS["eagle"] | {"adaptive": False}
    with LLM(speculative_config=config, num_threads=1, num_blocks=200, max_model_len=1024) as llm:
        first, second = (llm.generate(ids, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens >= len(ids) - 16
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.metrics.drafts["eagle"][1] >= 0.9 * first.metrics.drafts["eagle"][1]


def load(method: str, folder: Path, ops: Ops | None = None) -> Any:
    config = SpeculativeConfig(method=(method,), model=str(folder))
    return load_drafter(config, load_model(FOLDER), ops or make_ops(), CPU)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read_eagle() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((FOLDER / "eagle" / "config.json").read_text())
    return config, load_file(FOLDER / "eagle" / "model.safetensors")


def test_eagle_without_input_norm_and_bias_in_a_pickle(tmp_path: Path) -> None:
    config, tensors = read_eagle()
    kept = {name: each for name, each in tensors.items() if "input_layernorm" not in name and name != "fc.bias"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "bias": False}))
    torch.save(kept, tmp_path / "pytorch_model.bin")
    eagle = load("eagle", tmp_path)
    assert isinstance(eagle, Eagle)
    assert eagle.net.layer.input_norm is None and eagle.net.fc.bias is None
    # The RoPE table grows beyond the layer's own maximum.
    eagle.net.rope.reserve(500)


def test_an_eagle_layer_in_one_call_predicts_what_its_parts_predict() -> None:
    """Keys of the first tokens are stored alone, as those of a prompt are."""
    ops = make_native_ops(require_library(), 2)
    whole, parts = load("eagle", FOLDER / "eagle", ops=ops).net, load("eagle", FOLDER / "eagle").net
    token_ids, hidden, positions = torch.arange(7, 27), torch.randn(20, 256), torch.arange(20)
    caches = [tuple(torch.zeros(2, 16, 2, 64) for _ in range(2)) for _ in range(2)]

    def run(net: EagleNet, cache: KVCache, start: int, stores_only: bool = False) -> Tensor:
        metadata = AttnMetadata(
            positions[None, start:], torch.tensor([[[0, 1]]], dtype=torch.int32),
            torch.tensor([0, 20 - start], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), [20 - start], [20],
        )  # fmt: skip
        step = net.prepare(net.rotate(positions[start:], metadata), cache, metadata)
        if stores_only:
            net.store_keys(token_ids[start:], hidden[start:], cache, step)
            return hidden
        return net(token_ids[start:], hidden[start:], cache, step)[1]

    with torch.inference_mode():
        expected = run(parts, caches[0], 0)
        run(whole, caches[1], 0, stores_only=True)
        found = run(whole, caches[1], 17)
    torch.testing.assert_close(found, expected[17:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_the_weights_of_a_drafter_move_with_those_of_its_target(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    monkeypatch.setattr(loaded_model, "move_tensors", lambda tensors, device: moved.extend(tensors))
    drafter = load("draft_model" if method == "draft" else method, FOLDER / method)
    loaded = object.__new__(loaded_model.LoadedModel)
    loaded.model, loaded.drafter, loaded._device = load_model(FOLDER), drafter, torch.device("meta")
    loaded.encoder = loaded.adapters = None
    loaded.move_weights(CPU)
    files = [folder / "model.safetensors" for folder in (FOLDER, FOLDER / method)]
    expected = sum(tensor.nbytes for file in files for tensor in load_file(file).values() if tensor.is_floating_point())
    assert sum({each.data_ptr(): each.nbytes for each in moved}.values()) >= expected


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_on_the_code_of_transformers_is_refused(method: str, tmp_path: Path) -> None:
    folder = save(make_transformers_model("qwen3"), tmp_path)
    target = load_model(folder, config=read_model_config(folder, "transformers"))
    config = SpeculativeConfig(method=(method,), model=str(FOLDER / "eagle"))
    with pytest.raises(ConfigError, match=f"method='{method}' needs a target of our decoder"):
        load_drafter(config, target, make_ops(), CPU)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="more than tensors: pathlib"):
        read_head_folder(str(tmp_path))


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    config, tensors = read_eagle()
    with pytest.raises(ConfigError, match=r"missing: fc.weight; unexpected: layers.1.x"):
        load(
            "eagle",
            write(
                tmp_path,
                config,
                {**{k: v for k, v in tensors.items() if k != "fc.weight"}, "layers.1.x": torch.ones(2)},
            ),
        )


def make_eagle3(num_aux: int = 3, draft_vocab: int = 100) -> dict[str, Tensor]:
    """Random tensors of an EAGLE-3 layer for the demo model."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    size, heads, kv, inner = 256, 4 * 64, 2 * 64, 768
    tensors = {
        "fc.weight": draw(size, num_aux * size), "midlayer.self_attn.q_proj.weight": draw(heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": draw(kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": draw(kv, 2 * size), "midlayer.self_attn.o_proj.weight": draw(size, heads),
        "midlayer.mlp.gate_proj.weight": draw(inner, size), "midlayer.mlp.up_proj.weight": draw(inner, size),
        "midlayer.mlp.down_proj.weight": draw(size, inner), "lm_head.weight": draw(draft_vocab, size),
        "d2t": torch.arange(draft_vocab) * 2, "t2d": torch.zeros(3072, dtype=torch.bool),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    return tensors | {f"{name}.weight": torch.ones(size) for name in norms}


EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 768,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 3072, "head_dim": 64,
    "max_position_embeddings": 2048, "draft_vocab_size": 100, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, (2, 3, 3)), ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, (1, 2, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
    ],
)
def test_eagle3_reads_the_layers_that_its_config_names(
    tmp_path: Path, more: dict[str, Any], layers: tuple[int, ...]
) -> None:
    if len(set(layers)) < 3:  # the demo model is too small for the default
        with pytest.raises(ConfigError, match="must be ascending"):
            load("eagle3", write(tmp_path, EAGLE3_CONFIG | more, make_eagle3()))
        return
    eagle = load("eagle3", write(tmp_path, EAGLE3_CONFIG | more, make_eagle3()))
    assert eagle.aux_layers == layers
    assert eagle._token_map[:3].tolist() == [0, 3, 6]  # token = output + offset


def test_eagle3_of_speculators_and_wrong_maps(tmp_path: Path) -> None:
    inner = {
        name: value
        for name, value in EAGLE3_CONFIG.items()
        if name not in ("architectures", "draft_vocab_size")
    }
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": inner, "draft_vocab_size": 100,
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    }  # fmt: skip
    eagle = load("eagle3", write(tmp_path, config, make_eagle3()))
    assert eagle.net.shape.norm_before_residual
    with pytest.raises(ConfigError, match="speculators_model_type='dflash' is not supported"):
        load("eagle3", write(tmp_path, config | {"speculators_model_type": "dflash"}, make_eagle3()))
    with pytest.raises(ConfigError, match="fc_norm=True is not supported"):
        load("eagle3", write(tmp_path, config | {"fc_norm": True}, make_eagle3()))
    wrong = make_eagle3() | {"d2t": torch.arange(100) * 50}
    with pytest.raises(ConfigError, match="d2t must map 100 outputs to tokens below 3072"):
        load("eagle3", write(tmp_path, config, wrong))


def test_eagle3_changes_no_text(tmp_path: Path) -> None:
    config = EAGLE3_CONFIG | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    folder = write(tmp_path, config, make_eagle3())
    ids = read_prompts(open_encoder(FOLDER), 1, 1)["chat"][0]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, logprobs=1)
    spec = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    settings: dict[str, Any] = {"num_threads": 1, "num_blocks": 100, "max_model_len": 512}
    with LLM(**settings) as plain, LLM(speculative_config=spec, **settings) as drafting:
        expected = plain.generate(ids, params, use_tqdm=False)[0]
        found = drafting.generate(ids, params, use_tqdm=False)[0]
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
    assert found.metrics.drafts["eagle3"][0] > 20


def test_a_draft_model_needs_the_same_vocabulary(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="must have the same tokenizer"):
        load("draft_model", checkpoint)


def test_hidden_states_of_rejected_drafts_are_replaced() -> None:
    store = HiddenStore()

    def append(start: int, *values: float) -> None:
        """A step of this row, between two others."""
        rows, starts, counts = np.array([7, 0, 8]), np.array([0, start, start]), np.array([2, len(values), 1])
        store.append(rows, starts, counts, torch.tensor([[-1.0], [-1.0], *([v] for v in values), [-1.0]]))

    def read(start: int, end: int) -> tuple[int, list[float]]:
        first, parts = store.read(0, start, end)
        return first, [value for part in parts for value in part.flatten().tolist()]

    append(0, 0.0, 1.0, 2.0, 3.0)
    append(4, 4.0, 90.0, 91.0)
    append(5, 5.0)
    assert read(3, 6) == (3, [3.0, 4.0, 5.0])
    assert read(1, 4) == (1, [1.0, 2.0, 3.0])
    assert read(5, 7) == (7, [])
    append(20, 20.0)
    assert read(3, 21) == (20, [20.0])
    store.clear(0)
    assert read(20, 21) == (21, [])
