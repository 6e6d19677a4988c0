"""GGUF files against the package `gguf` and transformers, and what is refused in them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from engine import LLM, read_sampling_defaults
from engine.cache_folder import CacheFolder
from engine.errors import ConfigError
from engine.input.tokenizer import Tokenizer
from engine.model import ModelConfig, load_model
from engine.model.formats.gguf_blocks import KINDS, GGUFTensor
from engine.model.pooling import read_embedding_spec
from kernels.cpu.native_ops import NativeOps
from kernels.cpu.weights import WeightKind, make_convert
from kernels.grouped import round_grouped
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.engine.model.formats.gguf_files import load_reference, write_gguf
from tests.engine.model.mixed_batch import find_ops
from tests.kernels.cpu.conftest import require_library

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


@pytest.mark.parametrize("isa", ["native", "x86-64-v3"])
@pytest.mark.parametrize("number", [2, 3, 6, 7, 8, 12, 13, 14, 20, 39])
def test_native_ops_split_blocks_as_gguf_decodes_them(number: int, isa: str) -> None:
    """Random bytes: all codes, and scales that are infinite or NaN too. Groups of Q6_K are rounded to 8 bits."""
    kind = KINDS[number]
    ops = NativeOps(require_library(isa), 2)
    convert = make_convert(ops.library, ops.pool)
    rows = np.random.default_rng(0).integers(0, 256, (50, 3 * kind.block_bytes), dtype=np.uint8)
    tensor = GGUFTensor(kind, torch.from_numpy(rows), torch.Size((50, 3 * kind.block_size)))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(rows, Type(number))
    assert Type(number).name == kind.name
    assert np.array_equal(tensor.dequantize().numpy(), expected, equal_nan=True)
    found = tensor.read(slice(None), convert)
    assert found.form == tensor.form
    if kind.type == Type.Q6_K:
        wanted = round_grouped(torch.from_numpy(expected), 8)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales.nan_to_num(), wanted.scales.float().nan_to_num())
    else:
        assert np.array_equal(found.dequantize().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("number", [2, 3, 6, 7, 8, 12, 13, 39])
def test_other_ops_split_blocks_as_gguf_decodes_them(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes, as above. The blocks are not decoded on the way, which took most of the time of a load."""
    kind = KINDS[number]
    rows = np.random.default_rng(0).integers(0, 256, (50, 3 * kind.block_bytes), dtype=np.uint8)
    tensor = GGUFTensor(kind, torch.from_numpy(rows), torch.Size((50, 3 * kind.block_size)))
    expected = tensor.dequantize()
    monkeypatch.delattr(gguf.quants, "dequantize")
    found = tensor.read(slice(None))
    assert found.form == tensor.form
    assert np.array_equal(found.dequantize().numpy(), expected.numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("family", "overrides", "kind"),
    [
        ("llama", {}, Type.F32), ("llama", {}, Type.Q4_K), ("qwen2", {}, Type.Q8_0),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, Type.Q4_0),
        ("qwen3", {"tie_word_embeddings": True}, Type.Q4_K),
    ],
)
def test_logits_equal_those_of_transformers_with_the_decoded_weights(
    tmp_path: Path, family: str, overrides: dict[str, Any], kind: Type
) -> None:
    source = make_transformers_model(family, **SIZES, **overrides)
    if family == "qwen2":
        source.config.head_dim = 32
    path = tmp_path / "model.gguf"
    decoded = write_gguf(save(source, tmp_path), path, {"": kind})
    expected = compute_expected(load_reference(source, decoded), make_prompt(40))
    actual = Driver(load_model(path)).step({"a": make_prompt(40)})["a"]
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "packed_4", "packed_8"),
    [(Type.Q4_0, WeightKind.CENTRED4, WeightKind.CENTRED8), (Type.Q4_K, WeightKind.GROUPED4, WeightKind.GROUPED8)],
)
def test_native_ops_keep_the_codes(tmp_path: Path, kind: Type, packed_4: WeightKind, packed_8: WeightKind) -> None:
    """Scales are rounded to float16, which is within a hundredth of a level.

    A stacked matrix with more bits in one part has them in all; the tied head has the codes of the embedding.
    """
    source = make_transformers_model("qwen3", **SIZES, tie_word_embeddings=True)
    path = tmp_path / "model.gguf"
    decoded = write_gguf(save(source, tmp_path), path, {"layers.1.self_attn.v_proj": Type.Q8_0, "": kind})
    model = load_model(path, ops=find_ops())
    kinds = [layer.attention.qkv_proj.packed.kind for layer in model.layers]
    assert kinds == [packed_4, packed_8, packed_4]
    assert model.lm_head.packed.kind == packed_4
    down = model.ops.unpack_linear(model.layers[0].mlp.down_proj.packed)
    torch.testing.assert_close(down, decoded["model.layers.0.mlp.down_proj.weight"], atol=1e-3, rtol=0)
    logits = Driver(model).step({"a": make_prompt(40)})["a"]
    expected = compute_expected(load_reference(source, decoded), make_prompt(40))
    assert torch.cosine_similarity(logits, expected, dim=-1).median() > 0.98


def test_a_stacked_matrix_is_rounded_to_the_groups_that_a_part_of_it_has(tmp_path: Path) -> None:
    source = make_transformers_model("qwen3", **SIZES)
    path = tmp_path / "model.gguf"
    decoded = write_gguf(save(source, tmp_path), path, {"v_proj": Type.Q8_0, "": Type.Q4_K})
    model = load_model(path, ops=find_ops(), quantization="int4")
    packed = model.layers[0].attention.qkv_proj.packed
    assert (packed.kind, packed.struct.group_size) == (WeightKind.GROUPED6, 32)
    queries = model.ops.unpack_linear(packed)[:256]
    torch.testing.assert_close(queries, decoded["model.layers.0.self_attn.q_proj.weight"], atol=1e-3, rtol=0)


def test_a_stacked_matrix_with_a_part_that_has_no_codes_is_decoded(tmp_path: Path) -> None:
    source = make_transformers_model("llama", **SIZES)
    path = tmp_path / "model.gguf"
    decoded = write_gguf(save(source, tmp_path), path, {"v_proj": Type.F16, "": Type.Q4_K})
    attention = load_model(path, ops=find_ops()).layers[0].attention
    wanted = [decoded[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(attention.qkv_proj.unpack(), torch.cat(wanted))


@pytest.mark.parametrize(
    ("kind", "tokens", "merges"),
    [
        ("gpt2", ['"', ",", "\\", '",', '","', "\\\\", "Ġ", "Ġ,"], ['" ,', '", "', "\\ \\", "Ġ ,"]),
        ("llama", ["<unk>", "\u2581", "a", "b", "ab", "\u2581ab", " b", "a b"], None),
    ],
)
def test_tokenizer_is_the_one_that_transformers_builds_from_the_file(
    kind: str, tokens: list[str], merges: list[str] | None, tmp_path: Path
) -> None:
    metadata = {
        "tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": [*tokens, "<end>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3], "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.scores": [-float(each) for each in range(len(tokens) + 1)],
    } | ({"tokenizer.ggml.merges": merges} if merges else {})
    source = make_transformers_model("llama", vocab_size=len(tokens) + 1)
    path, cache = tmp_path / "model.gguf", CacheFolder(tmp_path / "cache")
    write_gguf(save(source, tmp_path / "source"), path, {"": Type.F32}, metadata)
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    for found in (Tokenizer(path, cache=cache).source, Tokenizer(path, cache=cache).source):
        assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert found.special_tokens_map == expected.special_tokens_map
        assert type(found).__name__ == type(expected).__name__
    (kept,) = cache.path.glob("*.tokenizer.json")
    assert all(isinstance(each, str) for each in json.loads(kept.read_text())["model"]["merges"]) == (kind == "gpt2")


def test_a_file_may_say_how_embeddings_are_made(tmp_path: Path) -> None:
    source = make_transformers_model("qwen3")
    path = tmp_path / "model.gguf"
    write_gguf(save(source, tmp_path), path, {"": Type.F32}, {"qwen3.pooling_type": 3})
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=64) as llm:
        (found,) = llm.embed([{"prompt_token_ids": [5, 9, 2]}])
    with torch.inference_mode():
        last = source.model(torch.tensor([[5, 9, 2]])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.from_numpy(found.outputs.data), last / last.norm(), atol=1e-5, rtol=0)
    write_gguf(tmp_path, path, {"": Type.F32}, {"qwen3.pooling_type": 4})
    with pytest.raises(ConfigError, match=r"model.gguf: qwen3\.pooling_type is 4; 1 \(mean\)"):
        read_embedding_spec(path)


def test_tokenizer_chat_template_and_end_tokens_come_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "he", "ll", "hell", "hello"]
    vocabulary = [*letters, "<|im_end|>", "<|eot|>", "<|endoftext|>", "<EOT>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * len(letters) + [3, 3, 3, 1],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"], "tokenizer.ggml.eos_token_id": len(letters),
        "tokenizer.ggml.eot_token_id": len(letters) + 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }
    source = make_transformers_model("qwen3", vocab_size=len(vocabulary))
    path = tmp_path / "model.gguf"
    write_gguf(save(source, tmp_path), path, {"": Type.F32}, metadata)
    cache = CacheFolder(tmp_path / "cache")

    def check() -> None:
        tokenizer = Tokenizer(path, cache=cache)
        ids = tokenizer.encode("hello you<|im_end|>")
        assert [vocabulary[each] for each in ids] == ["hello", "Ġ", "y", "o", "u", "<|im_end|>"]
        assert tokenizer.decode(ids[:-1]) == "hello you"
        assert tokenizer.has_chat_template
        assert tokenizer.eos_token_ids == (len(letters), len(letters) + 1, len(letters) + 2)

    check()
    build = transformers.PreTrainedTokenizerFast.from_pretrained
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", None)
    check()  # reads what the first start has kept
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", build)
    for file in cache.path.iterdir():
        file.write_text("{")
        check()


@pytest.mark.parametrize(
    ("split", "text", "words"),
    [
        ("smollm", "at   12", ["a", "t", "ĠĠĠ", "1", "2"]),  # as GPT-2 it were ĠĠ, Ġ, 1, 2
        ("starcoder", "a  1", ["a", "ĠĠ", "1"]),
        ("glm4", "(h)\n\n1", ["(h", ")ĊĊ", "1"]),
        ("seed-coder", "(h)\n\n1", ["(h", ")", "ĊĊ", "1"]),
        ("hunyuan", "12", ["1", "2"]),
        ("deepseek-llm", "(h  12", ["(", "h", "ĠĠ", "1", "2"]),  # letters and signs apart, digits alone
        ("deepseek-v3", "(h  12", ["(h", "ĠĠ", "12"]),
        ("deepseek-coder", "a  1", ["a", "ĠĠ", "1"]),
        ("gpt-2", "12", ["12"]),
        ("llama-bpe", "whole", ["<bos>", "whole"]),  # a token that no merges make
    ],
)
def test_texts_are_split_as_the_file_says(split: str, text: str, words: list[str], tmp_path: Path) -> None:
    merges = ["Ġ Ġ", "ĠĠ Ġ", "1 2", "( h", "Ċ Ċ", ") ĊĊ"]
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", *(each.replace(" ", "") for each in merges), "whole"]
    path = write_vocabulary(tmp_path, "gpt2", split, [*letters, "<bos>"], merges)
    tokenizer = Tokenizer(path)
    assert tokenizer.source.convert_ids_to_tokens(tokenizer.encode(text)) == words


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre='martian' is not supported; --tokenizer takes"),
        ({"tokenizer.ggml.eos_token_id": 7}, "tokenizer.ggml.eos_token_id=7 must be below 3, the token count"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused_by_its_key(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        Tokenizer(write_vocabulary(tmp_path, "gpt2", "gpt-2", ["a", "b", "ab"], ["a b"], changes))


def write_vocabulary(
    folder: Path, kind: str, split: str, tokens: list[str], merges: list[str], changes: Mapping[str, Any] = {}
) -> Path:
    metadata = {
        "tokenizer.ggml.model": kind, "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3], "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1, **changes,
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    source = make_transformers_model("llama", vocab_size=len(tokens))
    path = folder / "model.gguf"
    write_gguf(save(source, folder / "source"), path, {"": Type.F32}, metadata)
    return path


def test_the_factors_of_llama_3_are_recovered(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    source = make_transformers_model("llama", **SIZES, rope_parameters=scaling)
    inv_freq = source.model.rotary_emb.inv_freq
    plain = 500000.0 ** (-torch.arange(0, 32, 2) / 32)
    folder = save(source, tmp_path)
    write_with_factors(folder, tmp_path / "model.gguf", (plain / inv_freq).numpy())
    rope = ModelConfig.from_pretrained(tmp_path / "model.gguf").rope
    assert (rope.rope_type, rope.original_max_position_embeddings) == ("llama3", 8192)
    assert rope.factor == pytest.approx(32.0)
    write_with_factors(folder, tmp_path / "other.gguf", np.linspace(1, 9, 16, dtype=np.float32))
    with pytest.raises(ConfigError, match=r"rope_freqs.weight does not have the factors of Llama 3"):
        ModelConfig.from_pretrained(tmp_path / "other.gguf")


def write_with_factors(folder: Path, path: Path, factors: np.ndarray) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        names = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size"}
        names |= {"block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size"}
        getattr(writer, f"add_{key}")(config[names.get(key, "num_attention_heads")])
    writer.add_rope_freq_base(500000.0)
    writer.add_tensor("token_embd.weight", np.zeros((10, 256), dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", factors)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"qwen3.expert_count": 8}, r"qwen3\.expert_count=8"),
        ({"qwen3.rope.scaling.type": "su"}, "rope_type='su' is not supported"),
        ({"general.architecture": "rwkv6"}, "general.architecture='rwkv6' is not supported; supported: llama"),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save(make_transformers_model("qwen3"), tmp_path), path, {"": Type.F32}, metadata)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_pretrained(path)


def test_a_tensor_of_another_kind_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, Type.Q5_1)
    path = tmp_path / "model.gguf"
    write_gguf(save(make_transformers_model("qwen3", **SIZES), tmp_path), path, {"": Type.F32, "up_proj": Type.Q5_1})
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_up\.weight has the GGUF type 7; supported: F32, F16"):
        load_model(path)


@pytest.mark.parametrize("cut", [2, 30, 3000, -100])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save(make_transformers_model("qwen3"), tmp_path), path, {"": Type.F32})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/model\.gguf is (truncated|not a GGUF file)"):
        load_model(path)


def test_a_file_that_is_missing_or_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf' is not a file"):
        ModelConfig.from_pretrained(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, I am no model")
    with pytest.raises(ConfigError, match=r"text\.gguf is not a GGUF file"):
        ModelConfig.from_pretrained(tmp_path / "text.gguf")


def test_the_recommended_sampling_comes_from_the_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.05)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    expected = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert read_sampling_defaults(tmp_path / "model.gguf") == expected
    assert read_sampling_defaults(tmp_path / "model.gguf", "vllm") == {}
