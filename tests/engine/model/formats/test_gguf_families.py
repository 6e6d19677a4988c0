"""GGUF files of every family, as llama.cpp's converter writes them, against the logits of transformers.

`make_gguf_files.py` made the files in gguf/ and says how.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import ConfigError
from engine.model import ModelConfig, load_model
from engine.model.formats.gguf_config import ARCHITECTURES
from engine.model.formats.gguf_file import GGUFFile
from engine.model.moe import Experts
from kernels.cpu.weights import WeightKind
from tests.engine.model.drive import Driver
from tests.engine.model.formats.gguf_files import add_value
from tests.engine.model.formats.make_gguf_files import FOLDER, LOGITS, MODELS, PROMPT
from tests.engine.model.mixed_batch import find_ops

BLOCK = 32
CODES = {kind for kind in WeightKind if kind >= WeightKind.GROUPED4}


def compute_logits(path: Path) -> torch.Tensor:
    return Driver(load_model(path)).step({"a": PROMPT})["a"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    expected = torch.from_numpy(np.load(LOGITS)[name])
    torch.testing.assert_close(compute_logits(FOLDER / f"{name}.gguf"), expected, atol=1e-4, rtol=0)


def test_there_is_a_file_of_each_architecture() -> None:
    found = {GGUFFile(FOLDER / f"{name}.gguf").metadata["general.architecture"] for name in MODELS}
    assert found == ARCHITECTURES.keys() - {"deepseek2"}  # see `test_gguf_deepseek.py`


@pytest.mark.parametrize("name", MODELS)
def test_a_rounded_file_equals_a_file_of_its_decoded_weights(name: str, tmp_path: Path) -> None:
    """Rows and experts are taken out of blocks, and orders are undone, without a change of the weights."""
    rounded, decoded = tmp_path / "rounded.gguf", tmp_path / "decoded.gguf"
    rewrite(FOLDER / f"{name}.gguf", rounded, decoded)
    assert torch.equal(compute_logits(rounded), compute_logits(decoded))


@pytest.mark.parametrize("name", [name for name, (_, sizes) in MODELS.items() if any("expert" in key for key in sizes)])
def test_native_ops_keep_the_codes_of_experts(name: str, tmp_path: Path) -> None:
    rounded, decoded = tmp_path / "rounded.gguf", tmp_path / "decoded.gguf"
    rewrite(FOLDER / f"{name}.gguf", rounded, decoded)
    coded, plain = load_model(rounded, ops=find_ops()), load_model(decoded)
    pairs = [each for each in zip(coded.modules(), plain.modules(), strict=True) if isinstance(each[0], Experts)]
    assert pairs
    for pair in pairs:
        (packed,), (expected,) = (each.list_packed() for each in pair)
        assert {each.kind for each in (*packed.gate, *packed.up, *packed.down)} <= CODES
        found, wanted = coded.ops.unpack_experts(packed), plain.ops.unpack_experts(expected)
        assert torch.equal(found.gate_up, wanted.gate_up) and torch.equal(found.down, wanted.down)
    logits = [Driver(each).step({"a": PROMPT})["a"] for each in (coded, plain)]
    assert torch.cosine_similarity(*logits, dim=-1).median() > 0.97


def test_a_divided_file_is_read_from_its_first_part_and_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(gguf.GGUFReader(FOLDER / "qwen3.gguf"), tmp_path / "model.gguf", {}, split_max_tensors=7)
    parts = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    expected = compute_logits(FOLDER / "qwen3.gguf")
    assert torch.equal(compute_logits(tmp_path / parts[0]), expected)
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("engine.model.checkpoint.snapshot_download", download)
    model = load_model(f"some/models:{parts[0]}")
    assert torch.equal(Driver(model).step({"a": PROMPT})["a"], expected)
    assert set(map(repr, asked)) == {repr(("some/models", [f"model-*-of-{len(parts):05}.gguf"]))}
    with pytest.raises(ConfigError, match="is a part of a file; name the first one"):
        load_model(tmp_path / parts[1])
    (tmp_path / parts[-1]).unlink()
    with pytest.raises(ConfigError, match=rf"is the first of {len(parts)} parts; {parts[-1]} is not beside it"):
        load_model(tmp_path / parts[0])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor=0.5",
        ),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0},
            "attn_factor=2.0",
        ),
        ({"rope.dimension_count": 8}, r"qwen3\.rope\.dimension_count=8 must be 16"),
        ({"attention.scale": 0.5}, r"qwen3\.attention\.scale=0.5"),
    ],
)
def test_settings_without_an_equivalent_are_refused_by_name(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    copy(gguf.GGUFReader(FOLDER / "qwen3.gguf"), tmp_path / "model.gguf", entries)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "model.gguf")


def test_every_setting_of_yarn_is_read(tmp_path: Path) -> None:
    entries = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5}
    entries |= {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    named = {f"rope.scaling.{key}": value for key, value in entries.items()}
    copy(gguf.GGUFReader(FOLDER / "qwen3.gguf"), tmp_path / "model.gguf", named)
    rope = ModelConfig.from_pretrained(tmp_path / "model.gguf").rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


def rewrite(source: Path, rounded: Path, decoded: Path) -> None:
    """Write a file with its matrices in Q8_0, Q4_0 and Q5_1 in turn, and one with their decoded values."""
    reader = gguf.GGUFReader(source)
    codes = {}
    for tensor in reader.tensors:
        if tensor.tensor_type == Type.F16 and tensor.data.shape[-1] % BLOCK == 0:
            kind = (Type.Q8_0, Type.Q4_0, Type.Q5_1)[len(codes) % 3]
            codes[tensor.name] = gguf.quants.quantize(tensor.data.astype(np.float32), kind), kind
    copy(reader, rounded, {}, codes)
    values = {name: (gguf.quants.dequantize(*pair), None) for name, pair in codes.items()}
    copy(reader, decoded, {}, values)


def copy(
    reader: gguf.GGUFReader,
    target: Path,
    entries: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, Type | None]] | None = None,
    **options: Any,
) -> None:
    """Write a file again, with further metadata below its architecture's name and some other tensors."""
    name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name, **options)
    for field in reader.fields.values():
        known = ("general.architecture", *(f"{name}.{key}" for key in entries))
        if not field.name.startswith(("GGUF.", *known)):
            inner: Any = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for key, value in entries.items():
        add_value(writer, f"{name}.{key}", value)
    for tensor in reader.tensors:
        data, kind = (tensors or {}).get(tensor.name, (tensor.data.astype(np.float32), None))
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
