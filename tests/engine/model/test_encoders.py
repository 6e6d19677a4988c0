"""Encoders: the hidden states, vectors and scores of transformers, the same bits in any batch."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedModel

from engine import LLM, ConfigError, InvalidRequest, inspect_model
from engine.model import load_model, read_model_config
from engine.model.attn_metadata import AttnMetadata
from kernels import Ops
from kernels.cpu import make_native_ops
from tests.engine.encoder_folders import FAMILIES, compute_hidden, make_encoder_folder
from tests.kernels.cpu.conftest import require_library

TEXTS = ["the quick brown fox", "jumps", "the lazy dogs", "over a rather long text about nothing much"]


def run(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """Compute whole texts in one step; an encoder reads nothing else of the step."""
    none, lengths = torch.zeros(0, dtype=torch.int32), [len(text) for text in texts]
    metadata = AttnMetadata(none, none, none, none, lengths, lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        hidden = model(torch.tensor([each for text in texts for each in text]), positions, [], metadata)
    return list(hidden.split(lengths))


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Texts of several lengths, within and beyond the windows, two of one length."""
    reference = make_encoder_folder(tmp_path, family)
    model = load_model(tmp_path)
    texts = [torch.randint(4, 56, (length,)).tolist() for length in (23, 1, 40, 23, 7)]
    for ids, hidden in zip(texts, run(model, texts), strict=True):
        torch.testing.assert_close(hidden, compute_hidden(reference, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_text_has_the_same_bits_alone_and_in_a_batch(family: str, tmp_path: Path) -> None:
    make_encoder_folder(tmp_path, family)
    ops: Ops = make_native_ops(require_library(), 2)
    model = load_model(tmp_path, ops=ops)
    texts = [torch.randint(4, 56, (length,)).tolist() for length in (24, 9, 24, 24, 5, 24, 70)]
    for ids, hidden in zip(texts, run(model, texts), strict=True):
        assert torch.equal(hidden, run(model, [ids])[0])


@pytest.mark.parametrize("is_split", [False, True])
def test_memory_is_checked_for_matrices_of_three_halves(
    is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_encoder_folder(tmp_path)
    config: Any = read_model_config(tmp_path)
    ops = make_native_ops(require_library(), 2)
    ops = replace(ops, pack_split=ops.pack_linear if is_split else None)
    monkeypatch.setattr("engine.model.weight_memory.measure_free_bytes", lambda device: 5 * config.num_parameters)
    with pytest.raises(ConfigError, match="does not fit") if is_split else nullcontext():
        load_model(tmp_path, ops=ops)


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
def test_vectors_are_pooled_as_the_files_say(mode: str, tmp_path: Path) -> None:
    reference = make_encoder_folder(tmp_path, mode=mode, matryoshka_dimensions=[8])
    tokenizer = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path)) as llm:
        found, (short,) = llm.embed(TEXTS), llm.embed([TEXTS[0]], dimensions=8)
    pools: dict[str, Any] = {"cls_token": lambda h: h[0], "lasttoken": lambda h: h[-1]}
    for text, each in zip(TEXTS, found, strict=True):
        hidden = compute_hidden(reference, tokenizer.encode(text).ids)
        vector = pools.get(mode, lambda h: h.mean(0))(hidden)
        assert each.vector == pytest.approx((vector / vector.norm()).numpy(), abs=1e-5)
    expected = found[0].vector[:8] / np.linalg.norm(found[0].vector[:8])
    assert short.vector == pytest.approx(expected, abs=1e-6)


def add_dense(folder: Path, sizes: list[tuple[int, int]], activation: str, has_bias: bool) -> list[torch.nn.Module]:
    """Add layers between pooling and normalisation, as sentence-transformers writes those of EmbeddingGemma."""
    modules = json.loads((folder / "modules.json").read_text())
    layers: list[torch.nn.Module] = []
    for number, (num_inputs, num_outputs) in enumerate(sizes, 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        linear = torch.nn.Linear(num_inputs, num_outputs, bias=has_bias)
        tensors = {f"linear.{name}": each.data for name, each in linear.named_parameters()}
        save_file(tensors, place / "model.safetensors")
        data = {"in_features": num_inputs, "out_features": num_outputs, "bias": has_bias}
        data["activation_function"] = f"torch.nn.modules.{activation}"
        (place / "config.json").write_text(json.dumps(data))
        modules.insert(number, {"path": place.name, "type": "sentence_transformers.models.Dense"})
        layers += [linear, torch.nn.Tanh() if "Tanh" in activation else torch.nn.Identity()]
    (folder / "modules.json").write_text(json.dumps(modules))
    return layers


@pytest.mark.parametrize(("activation", "has_bias"), [("linear.Identity", False), ("activation.Tanh", True)])
def test_vectors_pass_through_the_dense_layers_of_the_files(activation: str, has_bias: bool, tmp_path: Path) -> None:
    reference = make_encoder_folder(tmp_path, "gemma3_text", matryoshka_dimensions=[8, 40])
    layers = add_dense(tmp_path, [(32, 64), (64, 40)], activation, has_bias)
    tokenizer = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path)) as llm:
        found, (short,) = llm.embed(TEXTS), llm.embed([TEXTS[0]], dimensions=8)
    for text, each in zip(TEXTS, found, strict=True):
        hidden = compute_hidden(reference, tokenizer.encode(text).ids).mean(0)
        with torch.inference_mode():
            expected = torch.nn.functional.normalize(torch.nn.Sequential(*layers)(hidden), dim=0)
        assert each.vector == pytest.approx(expected.numpy(), abs=1e-5)
    assert short.vector == pytest.approx(found[0].vector[:8] / np.linalg.norm(found[0].vector[:8]), abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "activation", "message"),
    [
        ([(32, 64), (32, 8)], "linear.Identity", "Dense module 2 takes 32 numbers, and gets 64"),
        ([(32, 64)], "activation.GELU", "the activation GELU is not supported; Tanh and Identity are"),
    ],
)
def test_dense_layers_that_do_not_fit_are_refused(
    sizes: list[tuple[int, int]], activation: str, message: str, tmp_path: Path
) -> None:
    make_encoder_folder(tmp_path)
    add_dense(tmp_path, sizes, activation, has_bias=False)
    with LLM(str(tmp_path)) as llm, pytest.raises(InvalidRequest, match=message):
        llm.embed(["hello"])


def score_alone(model: PreTrainedModel, tokenizer: RustTokenizer, first: str, second: str) -> float:
    pair = tokenizer.encode(first, second)
    options = {} if model.config.type_vocab_size == 1 else {"token_type_ids": torch.tensor([pair.type_ids])}
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([pair.ids]), **options).logits)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("bert", {}),
        ("roberta", {}),
        ("bert", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
    ],
)
def test_pairs_are_scored_by_the_classifier(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    reference = make_encoder_folder(tmp_path, family, mode=None, num_labels=1, **keys)
    tokenizer = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path)) as llm:
        found = [each.score for each in llm.score("quick fox", TEXTS)]
        with pytest.raises(InvalidRequest, match=r"instruction is for rerankers .* cross-encoder"):
            llm.score("fox", "dog", instruction="compare")
    expected = [score_alone(reference, tokenizer, "quick fox", text) for text in TEXTS]
    if not keys:
        expected = [1 / (1 + np.exp(-each)) for each in expected]
    assert found == pytest.approx(expected, abs=1e-4)
    assert np.ptp(found) > 1e-3


def test_a_modernbert_classifier_pools_as_its_config_says(tmp_path: Path) -> None:
    for pooling in ("cls", "mean"):
        folder = tmp_path / pooling
        options: dict[str, Any] = {"classifier_pooling": pooling, "num_labels": 1}
        reference = make_encoder_folder(folder, "modernbert", mode=None, **options)
        model: Any = load_model(folder)
        ids = torch.randint(4, 56, (20,)).tolist()
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([ids])).logits[0]
            torch.testing.assert_close(model.classify(run(model, [ids])[0]), expected, atol=1e-4, rtol=0)


def test_long_texts_are_refused_or_cut_where_the_client_asks(tmp_path: Path) -> None:
    make_encoder_folder(tmp_path, mode="lasttoken")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": True}))
    with LLM(str(tmp_path)) as llm:
        with pytest.raises(InvalidRequest, match=r"input\[1\] has 32 tokens; max_seq_length of this model is 20"):
            llm.embed(["a", "abcde " * 6])
        with pytest.raises(InvalidRequest, match=r"this model is an encoder and generates no text.*/v1/embeddings"):
            llm.generate("hello", use_tqdm=False)
    with pytest.raises(ConfigError, match="enable_lora=True is not supported for an encoder"):
        LLM(str(tmp_path), enable_lora=True)


def test_configs_that_would_be_computed_otherwise_are_refused(tmp_path: Path) -> None:
    make_encoder_folder(tmp_path)
    assert "within each text" in dict(inspect_model(tmp_path).list_facts())["attention"]
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in {"position_embedding_type": "relative_key", "is_decoder": True}.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ConfigError, match=f"{key}={value!r} is not supported for an encoder"):
            read_model_config(tmp_path)
