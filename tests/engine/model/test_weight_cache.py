"""Packed models in files: the next start gives the same logits without packing, and nothing stale is used."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.model import DecoderModel, load_model, weight_cache
from engine.model.weight_cache import WeightCache
from tests.engine.model.drive import Driver, make_prompt, make_transformers_model, save
from tests.engine.model.formats.gguf_files import write_gguf
from tests.engine.model.mixed_batch import find_ops

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def start(model: Path, cache: Path, **options: Any) -> tuple[DecoderModel, bool]:
    """Load a model, and return whether its packed weights were mapped."""
    kept = WeightCache(cache, min_bytes=options.pop("min_bytes", 0))
    before = set(cache.glob("*.bin"))
    loaded = load_model(model, ops=find_ops(), cache=kept, **options)
    assert isinstance(loaded, DecoderModel)
    kept.close()
    assert not list(cache.glob("*.tmp"))
    return loaded, bool(before) and set(cache.glob("*.bin")) == before


def compute_logits(model: DecoderModel) -> torch.Tensor:
    return Driver(model).step({"a": make_prompt(40)})["a"]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}), ("gemma3", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("deepseek_v3", {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "q_lora_rank": 64}),
    ],
    ids=["llama", "gemma3", "qwen3", "deepseek_v3"],
)
def test_the_second_start_maps_the_same_model(
    tmp_path: Path, family: str, overrides: dict[str, Any], quantization: Any
) -> None:
    folder = save(make_transformers_model(family, **overrides), tmp_path / "model")
    (first, _), (second, is_mapped) = (start(folder, tmp_path / "cache", quantization=quantization) for _ in range(2))
    assert is_mapped and first.weights_hash == second.weights_hash
    assert torch.equal(compute_logits(second), compute_logits(first))
    assert torch.equal(second.unpack_embedding(), first.unpack_embedding())


def test_experts_and_codes_of_files_are_mapped_too(tmp_path: Path) -> None:
    experts = save(make_transformers_model("gpt_oss"), tmp_path / "experts")
    codes = tmp_path / "codes.gguf"
    source = make_transformers_model("qwen3", **SIZES, tie_word_embeddings=True)
    write_gguf(save(source, tmp_path / "source"), codes, {"": Type.Q4_K})
    for path in (experts, codes):
        (first, _), (second, is_mapped) = (start(path, tmp_path / path.stem) for _ in range(2))
        assert is_mapped
        assert torch.equal(compute_logits(second), compute_logits(first))


def touch(model: Path, file: Path) -> None:
    os.utime(model / "model.safetensors", ns=(1, 1))


def truncate(model: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2000])


def empty(model: Path, file: Path) -> None:
    file.write_bytes(b"")


def spoil_header(model: Path, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"modules"', b'"models_"', 1))


def open_to_others(model: Path, file: Path) -> None:
    file.chmod(0o666)


@pytest.mark.parametrize("change", [touch, truncate, empty, spoil_header, open_to_others])
def test_a_file_that_may_be_of_another_model_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], None]
) -> None:
    folder = save(make_transformers_model("qwen3"), tmp_path / "model")
    first, _ = start(folder, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.bin")
    change(folder, file)
    reads: list[object] = []
    check = "engine.model.loader.hash_weights"  # of the checkpoint, which a mapped model does not read
    monkeypatch.setattr(check, lambda files: reads.append(files) or b"read")
    second, _ = start(folder, tmp_path / "cache")
    assert reads
    assert torch.equal(compute_logits(second), compute_logits(first))


def test_other_settings_and_small_models_have_no_file_in_common(tmp_path: Path) -> None:
    folder, cache = save(make_transformers_model("qwen3"), tmp_path / "model"), tmp_path / "cache"
    start(folder, cache, min_bytes=2**20)
    assert not list(cache.glob("*"))
    start(folder, cache)
    start(folder, cache, quantization="int8")
    start(folder, cache, dtype=torch.bfloat16)
    assert len(list(cache.glob("*.bin"))) == 3


@pytest.mark.parametrize("source", ["kernels/grouped.py", "engine/model/linear.py", "engine/model/mlp.py"])
def test_another_rounding_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """How matrices are rounded, and to how many bits."""
    root, ops = Path(weight_cache.__file__).parents[2], find_ops()
    key = WeightCache(tmp_path).make_key([], ops, "")
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, code: read(path, code) + "#" * (path == root / source))
    assert WeightCache(tmp_path).make_key([], ops, "") != key
    monkeypatch.undo()
    assert WeightCache(tmp_path).make_key([], ops, "") == key


def test_the_file_that_was_used_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    folders = [save(make_transformers_model("qwen3"), tmp_path / name) for name in "abc"]
    start(folders[0], cache)
    start(folders[1], cache)
    old, _ = files = sorted(cache.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns)
    monkeypatch.setattr("engine.cache_folder._MAX_TOTAL_BYTES", sum(file.stat().st_size for file in files))
    os.utime(old, ns=(1, 1))
    start(folders[2], cache)
    assert len(list(cache.glob("*.bin"))) == 2 and not old.exists()


def test_a_full_disk_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cache_folder._MIN_FREE_BYTES", 2**60)
    start(save(make_transformers_model("qwen3"), tmp_path / "model"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.bin"))
