"""How near the logits of every dtype, quantization and implementation on the CPU stay to transformers' in float32.

Tolerances on models of random weights, worst token of every batch: float32 1e-4 absolute; bfloat16 a cosine of 0.995;
int8, alone or with bfloat16, 0.985.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model import DecoderModel, load_model
from kernels import Ops, torch_ops
from kernels.cpu import NativeBuild, make_native_ops
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save

FLOAT, BRAIN = torch.float32, torch.bfloat16
KINDS: list[tuple[torch.dtype, Literal["int8"] | None]] = [
    (FLOAT, None), (BRAIN, None), (FLOAT, "int8"), (BRAIN, "int8"),
]  # fmt: skip
MIN_COSINE = {(BRAIN, None): 0.995, (FLOAT, "int8"): 0.985, (BRAIN, "int8"): 0.985}
PROMPTS = {name: make_prompt(n, n) for name, n in {"decode": 90, "chunk": 200, "fresh": 33, "one": 1}.items()}


@functools.cache
def make_ops(name: str) -> Ops:
    if name == "torch":
        return torch_ops.make_ops()
    build = NativeBuild()
    build.start()
    library = build.wait()
    if library is None:
        pytest.skip(f"no native ops here: {build.status}")
    return make_native_ops(library, 2)


@functools.cache
def make_expected(family: str) -> PreTrainedModel:
    return make_transformers_model(family)


def load(family: str, ops: str, dtype: torch.dtype, quantization: Literal["int8"] | None) -> DecoderModel:
    with tempfile.TemporaryDirectory() as folder:
        path = save(make_expected(family), Path(folder))
        return load_model(path, dtype=dtype, ops=make_ops(ops), quantization=quantization)


def run_mixed(driver: Driver) -> dict[str, Tensor]:
    """A decode step, the second chunk of a prompt, a whole prompt and a single token, all in one step."""
    driver.step({"decode": PROMPTS["decode"][:89], "chunk": PROMPTS["chunk"][:100]})
    rest = {"decode": PROMPTS["decode"][89:], "chunk": PROMPTS["chunk"][100:]}
    return driver.step(rest | {"fresh": PROMPTS["fresh"], "one": PROMPTS["one"]})


def run_preempted(driver: Driver) -> dict[str, Tensor]:
    """A request loses its blocks after 120 tokens and is computed again beside others."""
    driver.step({"chunk": PROMPTS["chunk"][:120], "decode": PROMPTS["decode"][:50]})
    driver.free_blocks += driver.block_tables.pop("chunk")
    del driver.num_computed["chunk"]
    driver.step({"decode": PROMPTS["decode"][50:89], "fresh": PROMPTS["fresh"]})
    return driver.step({"chunk": PROMPTS["chunk"], "decode": PROMPTS["decode"][89:]})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{str(kind[0])[6:]}-{kind[1]}")
@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_stay_near_those_of_transformers(
    family: str, ops: str, kind: tuple[torch.dtype, Literal["int8"] | None]
) -> None:
    model = load(family, ops, *kind)
    for run in (run_mixed, run_preempted):
        for name, logits in run(Driver(model)).items():
            expected = compute_expected(make_expected(family), PROMPTS[name])[-len(logits) :]
            if kind in MIN_COSINE:
                cosine = torch.cosine_similarity(logits, expected, dim=-1).min()
                assert cosine > MIN_COSINE[kind], (run.__name__, name)
            else:
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_int8_rounds_what_it_is_given() -> None:
    """So that the tolerances above are those of int8, and not of a flag that does nothing."""
    plain, rounded = (
        run_mixed(Driver(load("qwen3", "torch", FLOAT, each)))["fresh"] for each in (None, "int8")
    )
    assert (plain - rounded).abs().max() > 0.01
