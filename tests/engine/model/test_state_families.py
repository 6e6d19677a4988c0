"""Hybrid families: logits against transformers, however prompts are cut and batched."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model import DecoderModel, load_model
from engine.model.report import inspect_model
from kernels.cpu import make_native_ops
from tests.engine.model.drive import (
    HYBRIDS,
    Driver,
    compute_expected,
    make_prompt,
    make_transformers_model,
    save,
)
from tests.kernels.cpu.conftest import require_library


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the checkpoint of a family."""
    return functools.cache(lambda family: save(make_model(family), tmp_path_factory.mktemp(family)))


@functools.cache
def make_model(family: str) -> PreTrainedModel:
    return make_transformers_model(family)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_of_prefill_chunks_and_decode(family: str, is_native: bool, folders: Callable[[str], Path]) -> None:
    ops = make_native_ops(require_library(), 2) if is_native else None
    model = load_model(folders(family), ops=ops)
    assert isinstance(model, DecoderModel)
    prompts = {name: make_prompt(150, seed) for seed, name in enumerate("ab")}
    expected = {name: compute_expected(make_model(family), prompt) for name, prompt in prompts.items()}
    driver = Driver(model)
    assert_near(driver.step({"a": prompts["a"]})["a"], expected["a"])
    driver = Driver(model)
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    # A long chunk beside decodes, then decodes alone, then both again.
    cuts = ({"a": 70}, {"a": 1, "b": 33}, *[{"a": 1, "b": 1}] * 3, {"a": 1, "b": 80}, {"b": 1, "a": 75})
    for counts in cuts:
        done = {name: sum(map(len, found[name])) for name in counts}
        batch = {name: prompts[name][done[name] : done[name] + count] for name, count in counts.items()}
        for name, logits in driver.step(batch).items():
            found[name].append(logits)
    for name, logits in found.items():
        whole = torch.cat(logits)
        assert_near(whole, expected[name][: len(whole)])


def test_stacked_experts_are_read(tmp_path: Path) -> None:
    model = make_model("qwen3_5_moe")
    ours = load_model(save(model, tmp_path, save_original_format=False))
    assert isinstance(ours, DecoderModel)
    prompt = make_prompt(20)
    assert_near(Driver(ours).step({"a": prompt})["a"], compute_expected(model, prompt))
    assert inspect_model(tmp_path).num_state_layers == 3
