"""The adapter, draft model and EAGLE layer are saved as others load them; drafts are counted right."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from assets.demo_model.recipe.companions import adapter, eagle
from assets.demo_model.recipe.companions.acceptance import (
    count_accepted,
    draft_with_model,
)
from assets.demo_model.recipe.companions.draft import SHAPE
from assets.demo_model.recipe.companions.frozen import FOLDER, load_decoder, open_encoder
from assets.demo_model.recipe.training.batches import Batch, make_batch
from assets.demo_model.recipe.training.examples import Encoder, sample_example
from assets.demo_model.recipe.training.export import export_checkpoint
from assets.demo_model.recipe.training.model import Decoder, ModelShape
from assets.demo_model.recipe.training.tokenizer import sample_texts, train_tokenizer

TINY = ModelShape(
    num_layers=2, width=32, num_heads=2, num_kv_heads=1, head_size=16, mlp_width=48, vocabulary_size=400
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(sample_texts(60, Random(1)), vocabulary_size=400)
    export_checkpoint(dict(Decoder(TINY).named_parameters()), TINY, tokenizer, folder)
    return folder


@pytest.fixture
def base(checkpoint: Path) -> Decoder:
    return load_decoder(checkpoint)


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> Encoder:
    return open_encoder(checkpoint)


def sample_batch(encoder: Encoder, count: int = 3) -> Batch:
    rng = Random(4)
    return make_batch([sample_example(encoder, rng) for _ in range(count)])


def test_an_untrained_adapter_changes_nothing_and_a_trained_one_changes_the_answer(base: Decoder) -> None:
    ids = torch.randint(0, 400, (1, 20))
    before = base(ids)
    layers = adapter.add_adapter(base)
    assert len(layers) == 7 * TINY.num_layers
    assert torch.equal(base(ids), before)
    next(iter(layers.values())).lora_B.data.fill_(0.5)
    assert not torch.equal(base(ids), before)


def test_an_adapter_is_saved_under_the_names_of_peft(base: Decoder, tmp_path: Path) -> None:
    adapter.save_adapter(adapter.add_adapter(base), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    assert tensors[name].shape == (16, adapter.RANK)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["task_type"]) == ("LORA", adapter.RANK, "CAUSAL_LM")


def test_training_the_adapter_leaves_the_model_alone(base: Decoder, encoder: Encoder) -> None:
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    layers = adapter.train_adapter(base, encoder, seconds=0.4, seed=1)
    assert any(layer.lora_B.abs().max() > 0 for layer in layers.values())
    for path, layer in layers.items():
        assert torch.equal(layer.base.weight, before[f"{path}.weight"])


def test_an_eagle_layer_learns_a_batch_and_leaves_the_model_alone(base: Decoder, encoder: Encoder) -> None:
    torch.manual_seed(0)
    module = eagle.EagleLayer(base)
    before, batch = base.embed_tokens.weight.clone(), sample_batch(encoder)
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        loss = eagle.eagle_loss(module, base, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(base.embed_tokens.weight, before)


def test_an_eagle_layer_is_saved_under_the_names_of_its_project(base: Decoder, tmp_path: Path) -> None:
    eagle.save_eagle(eagle.EagleLayer(base), tmp_path, TINY)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["fc.weight"].shape == (32, 64)
    assert "layers.0.self_attn.q_norm.weight" in saved
    assert not any("embed" in name for name in saved)


def test_a_draft_checkpoint_loads_in_transformers(encoder: Encoder, tmp_path: Path) -> None:
    tokenizer: Tokenizer = encoder.tokenizer
    export_checkpoint(dict(Decoder(SHAPE).named_parameters()), SHAPE, tokenizer, tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert sum(weight.numel() for weight in model.parameters()) < 900_000


def test_a_perfect_drafter_is_always_accepted_and_a_wrong_one_never() -> None:
    output = list(range(10, 23))

    def perfect(ids: list[int], count: int) -> list[int]:
        return output[len(ids) - 2 :][:count]

    # 13 tokens: one from the prefill, then three steps of three accepted tokens and one of the model's own
    assert count_accepted([1, 2], output, perfect, 3) == ([3, 3, 3], [3, 3, 3])
    assert count_accepted([1, 2], output, lambda ids, count: [0] * count, 3) == ([0, 0, 0], [12, 0, 0])


def test_a_model_that_drafts_for_itself_is_always_accepted(base: Decoder) -> None:
    with torch.inference_mode():
        output = draft_with_model(base)([3, 4, 5], 9)
        accepted, proposed = count_accepted([3, 4, 5], output, draft_with_model(base), 3)
    assert accepted == proposed == [2, 2, 2]


@pytest.mark.parametrize("name", ["draft", "eagle", "lora"])
def test_what_ships_beside_the_model_belongs_to_it(name: str) -> None:
    folder = FOLDER / name
    if not folder.exists():
        pytest.skip(f"assets/demo_model/{name} is not there")
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    width = json.loads((FOLDER / "config.json").read_text())["hidden_size"]
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())
    assert name == "draft" or any(width in tensor.shape for tensor in tensors.values())


def test_everything_together_stays_below_forty_megabytes() -> None:
    weights = [path.stat().st_size for path in FOLDER.rglob("*.safetensors")]
    assert sum(weights) < 40e6
    assert sum(weights) - (FOLDER / "model.safetensors").stat().st_size < 15e6
