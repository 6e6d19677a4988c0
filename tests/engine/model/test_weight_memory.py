"""Weights that the device has no room for are refused with numbers; those that fit are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.model import DecoderModel, ModelConfig, load_model
from engine.model.linear import Linear
from engine.model.weight_memory import check_weight_memory, count_parameters, estimate_head_copy
from kernels.cpu import make_native_ops
from tests.engine.model.drive import make_transformers_model, save
from tests.engine.model.test_families import VARIANTS
from tests.kernels.cpu.conftest import require_library

LeaveFree = Callable[..., None]
CPU = torch.device("cpu")
SHAPES: list[tuple[str, dict[str, Any]]] = [("mistral", {}), ("cohere2", {}), ("gemma3", {}), *VARIANTS.values()]


def read_config(family: str, folder: Path, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_pretrained(save(make_transformers_model(family, **overrides), folder))


@pytest.fixture
def leave_free(monkeypatch: pytest.MonkeyPatch) -> LeaveFree:
    """Makes the host say one amount after the other, the last one for good."""

    def leave(*amounts: int) -> None:
        left = list(amounts)
        measure = "engine.model.weight_memory.measure_host_memory"
        monkeypatch.setattr(measure, lambda: (2**50, left.pop(0) if len(left) > 1 else left[0]))
        monkeypatch.setattr("engine.model.weight_memory.gc.collect", int)  # a second, with all that tests import

    return leave


@pytest.mark.parametrize(("family", "overrides"), SHAPES)
def test_the_parameters_counted_are_those_of_the_model(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(family, tmp_path, **overrides)
    model = DecoderModel(config, torch.float32, torch.device("meta"))
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    assert (estimate_head_copy(config, torch.float32) == 0) is not config.tie_word_embeddings


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_that_just_fits_is_loaded(tmp_path: Path, leave_free: LeaveFree, quantization: Any) -> None:
    config = read_config("qwen3", tmp_path, tie_word_embeddings=True)
    num_bytes = count_parameters(config) * 2
    leave_free(num_bytes)
    load_model(tmp_path, dtype=torch.bfloat16, quantization=quantization)
    leave_free(num_bytes - 1)
    with pytest.raises(ConfigError, match="does not fit"):
        load_model(tmp_path, dtype=torch.bfloat16, quantization=quantization)


def test_both_numbers_are_told_and_a_way_out_if_it_is_one(tmp_path: Path, leave_free: LeaveFree) -> None:
    """Quantized weights are whole before they are rounded, and half of too much may be too much."""
    number = count_parameters(read_config("llama", tmp_path))
    leave_free(2 * number)
    told = rf"{number} parameters take 0\.3 MiB as float32, and cpu has 0\.1 MiB free"
    with pytest.raises(ConfigError, match=f"{told}; dtype='bfloat16' takes half"):
        load_model(tmp_path)
    leave_free(2 * number - 1)
    with pytest.raises(ConfigError, match=f"{told}$"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match=f"{told}; quantization='int8' saves memory after loading only"):
        load_model(tmp_path, quantization="int8")


def test_what_only_waits_to_be_collected_is_collected_first(tmp_path: Path, leave_free: LeaveFree) -> None:
    config = read_config("llama", tmp_path)
    leave_free(0, 4 * count_parameters(config))
    load_model(tmp_path)


@pytest.mark.parametrize(
    ("hidden_size", "free", "message"),
    [
        (2**62, None, "hidden_size=.* too large"), (2**44, None, "GiB free"),
        (2**44, 2**62, r"does not fit: .* GiB free.*can't allocate memory"),
    ],
    ids=["counted", "asked for", "allocated"],
)
def test_a_size_that_no_machine_has_is_a_config_error(
    tmp_path: Path, leave_free: LeaveFree, hidden_size: int, free: int | None, message: str
) -> None:
    if free is not None:
        leave_free(free)
    shape = make_transformers_model("qwen3").config.to_dict() | {"hidden_size": hidden_size}
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, config=ModelConfig.from_dict(shape), load_format="dummy")


def test_a_device_that_runs_out_while_packing_is_a_config_error(tmp_path: Path) -> None:
    config = read_config("llama", tmp_path)
    with (
        pytest.raises(ConfigError, match=r"takes half of that\. CUDA out of memory\.$"),
        check_weight_memory("m", config, torch.float32, CPU),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")
    with (pytest.raises(RuntimeError, match="something else"), check_weight_memory("m", config, torch.float32, CPU)):
        raise RuntimeError("something else")


def test_matrices_in_codes_need_less_than_half_on_any_ops(tmp_path: Path, leave_free: LeaveFree) -> None:
    config = read_config("llama", tmp_path)
    leave_free(2 * count_parameters(config))
    with check_weight_memory("m", config, torch.float32, CPU, keeps_codes=True):
        pass


FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtypes", "quantization"),
    [((FLOAT, FLOAT), None), ((FLOAT, BRAIN), "int8"), ((BRAIN, BRAIN), "int4"), ((BRAIN, BRAIN), None)],
)
def test_a_model_on_native_ops_needs_what_its_packed_matrices_take(
    tmp_path: Path, dtypes: tuple[torch.dtype, ...], quantization: Any, leave_free: LeaveFree
) -> None:
    """A tied head is one matrix with the embedding, unless it is rounded."""
    wanted, stored = dtypes
    sizes = {"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    save(make_transformers_model("qwen3", tie_word_embeddings=True, **sizes).to(stored), tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    ops = make_native_ops(require_library(), 1)
    model = load_model(tmp_path, wanted, ops=ops, quantization=quantization)
    packed = {id(each.packed): each.packed for each in model.modules() if isinstance(each, Linear)}
    packed[id(model.embedding)] = model.embedding
    head = model.lm_head.packed.panels.nbytes
    assert head <= estimate_head_copy(config, wanted, quantization) <= head * 1.01
    held = sum(each.panels.nbytes for each in packed.values())
    held += sum(each.untyped_storage().nbytes() for each in model.parameters())
    leave_free(int(0.9 * held))
    with pytest.raises(ConfigError, match="does not fit"):
        load_model(tmp_path, wanted, ops=ops, quantization=quantization)
    leave_free(int(held * 1.1))
    load_model(tmp_path, wanted, ops=ops, quantization=quantization)
