"""Loading safetensors: single, sharded, wrong in every way we could think of, and dummy weights."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from engine.device.kv_cache import allocate_kv_cache, compute_bytes_per_block
from engine.errors import ConfigError
from engine.model import load_model
from engine.model.checkpoint import read_tensors, resolve_checkpoint
from engine.model.linear import Linear
from tests.engine.model.drive import Driver, make_prompt, make_transformers_model, save
from tests.engine.model.mixed_batch import find_ops


def make_checkpoint(folder: Path, family: str = "qwen3", **overrides: Any) -> Path:
    return save(make_transformers_model(family, **overrides), folder)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the checkpoint (dots written as two underscores); None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


def compute_logits(folder: Path) -> torch.Tensor:
    return Driver(load_model(folder)).step({"a": make_prompt(20)})["a"]


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path, tied: bool) -> None:
    model = make_transformers_model("qwen2", tie_word_embeddings=tied)
    single = save(model, tmp_path / "single")
    sharded = save(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(compute_logits(sharded), compute_logits(single))


def test_weights_are_cast_to_the_dtype_asked_for(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_each_matrix_is_packed_before_the_next_layer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: str, quantization: Any
) -> None:
    """The embedding too, so that the model never lies in memory twice."""
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True, num_hidden_layers=3)
    events: list[str] = []
    pack = Linear.pack

    def log_pack(self: Linear, *arguments: Any) -> None:
        events.append("packed")
        pack(self, *arguments)

    def log_read(files: list[Path], hold: Callable[[torch.Tensor], None]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sorted(read_tensors(files, hold=hold)):
            events.append(name)
            yield name, tensor

    monkeypatch.setattr(Linear, "pack", log_pack)
    monkeypatch.setattr("engine.model.loader.read_tensors", log_read)
    load_model(folder, ops=find_ops(ops), quantization=quantization)
    starts = [events.index(f"model.layers.{layer}.input_layernorm.weight") for layer in range(3)]
    packed = [events[:start].count("packed") for start in starts]
    assert packed[1] - packed[0] == packed[2] - packed[1] == 4
    assert ("packed" in events[:2]) is (ops == "native")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matrices_packed_from_the_file_are_those_of_a_copy(tmp_path: Path, stored: torch.dtype) -> None:
    model = make_transformers_model("phi3").to(stored)
    save(model, tmp_path)
    packed, plain = load_model(tmp_path, ops=find_ops()), load_model(tmp_path)
    for one, other in zip(packed.modules(), plain.modules(), strict=True):
        if isinstance(one, Linear) and isinstance(other, Linear):
            assert torch.equal(one.unpack(), other.unpack())
    assert torch.equal(packed.unpack_embedding(), plain.unpack_embedding())


def test_weights_hash_is_that_of_the_numbers_wherever_they_lie(tmp_path: Path) -> None:
    """One number at the start of a tensor and one at the end of another."""
    rewrite(make_checkpoint(tmp_path / "a"))
    before = load_model(tmp_path / "a").weights_hash
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert load_model(tmp_path / "b").weights_hash == before
    embedding = load_file(tmp_path / "a" / "model.safetensors")["model.embed_tokens.weight"]
    found = {before}
    for place in ((0, 0), (-1, -1)):
        changed = embedding.clone()
        changed[place] += 1
        rewrite(tmp_path / "b", model__embed_tokens__weight=changed)
        found.add(load_model(tmp_path / "b").weights_hash)
    assert len(found) == 3


K_PROJ, Q_PROJ = "model.layers.1.self_attn.k_proj", "model.layers.0.self_attn.q_proj"
OTHER_SHAPE = r"q_proj\.weight has shape .* its config says \[64, 48\]"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{K_PROJ}.weight", None, f"missing: {K_PROJ}.weight; unexpected: none"),
        (f"{Q_PROJ}.bias", torch.zeros(64), f"unexpected: {Q_PROJ}.bias"),
        ("model.norm.weight", torch.zeros(48, dtype=torch.int8), r"model\.norm\.weight is torch\.int8"),
        *((f"{Q_PROJ}.weight", torch.zeros(shape), OTHER_SHAPE) for shape in [(3,), (48, 64), (1, 1), ()]),
    ],
)
def test_a_tensor_that_the_config_does_not_describe_is_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    rewrite(make_checkpoint(tmp_path), **{name: tensor})
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_saved_rope_frequencies_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    before = compute_logits(make_checkpoint(tmp_path))
    rewrite(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert torch.equal(compute_logits(tmp_path), before)


def test_tied_head_must_repeat_the_embedding(tmp_path: Path) -> None:
    before = compute_logits(make_checkpoint(tmp_path, tie_word_embeddings=True))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lm_head__weight=embedding.clone())
    assert torch.equal(compute_logits(tmp_path), before)
    rewrite(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match=r"lm_head\.weight repeats model\.embed_tokens\.weight, but they differ"):
        load_model(tmp_path)


HEADER = b'{"a":' * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-100], r"model\.safetensors cannot be read as safetensors"),
        (lambda _: len(HEADER).to_bytes(8, "little") + HEADER, r"model\.safetensors cannot be read"),
        (None, "only safetensors are read"),
    ],
    ids=["cut short", "nested without end", "missing"],
)
def test_broken_file_is_named(tmp_path: Path, content: Callable[[bytes], bytes] | None, message: str) -> None:
    file = make_checkpoint(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content(whole))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["{", "{}", '{"weight_map": {"a": "gone.safetensors"}}', '{"weight_map": {"a": "../config.json"}}',
     '{"weight_map": {"a": "x.safetensors", "b": ["x"]}}', '{"weight_map": []}', "[]", '{"a":' * 100_000],
)  # fmt: skip
def test_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (make_checkpoint(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_model(tmp_path)


def test_dummy_weights_depend_only_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_transformers_model("qwen2").config.to_dict()))
    models = [load_model(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["embed_tokens"], states[2]["embed_tokens"])
    assert Driver(models[0]).step({"a": make_prompt(5)})["a"].isfinite().all()


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-such", "a/b/c"])
def test_path_that_is_no_folder_is_named_with_its_field_and_not_taken_for_a_hub_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer '{name}' is not a folder$"):
        resolve_checkpoint(name, ("config.json",), "tokenizer")


def test_hub_name_of_a_wrong_form_is_explained() -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        load_model("no such model!")


def test_hub_name_that_is_not_cached_offline_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        return huggingface_hub.snapshot_download(name, local_files_only=True, cache_dir=tmp_path, **options)

    monkeypatch.setattr("engine.model.checkpoint.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="'some/model' is not a folder, is not in the local hub cache"):
        load_model("some/model")


class FakeHub:
    """A repository on the hub, and the cache folder that matching files come to."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository = repository
        self.cache = cache
        self.calls: list[list[str]] = []  # what each call brought

    def snapshot_download(self, name: str, allow_patterns: list[str], revision: str | None = None) -> str:
        files = sorted(path for path in self.repository.rglob("*") if path.is_file())
        names = [path.relative_to(self.repository).as_posix() for path in files]
        chosen = list(filter_repo_objects(names, allow_patterns=allow_patterns))
        self.calls.append([each for each in chosen if not (self.cache / each).exists()])
        for each in chosen:
            (self.cache / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repository / each, self.cache / each)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(tmp_path / "repository", tmp_path / "cache")
    monkeypatch.setattr("engine.model.checkpoint.snapshot_download", hub.snapshot_download)
    return hub


def test_of_a_sharded_repository_only_the_files_of_its_index_are_downloaded(hub: FakeHub) -> None:
    """The index comes before them: the loading page reads their bytes from it."""
    save(make_transformers_model("mistral"), hub.repository, max_shard_size="40KB")
    shards = sorted(path.name for path in hub.repository.glob("*.safetensors"))
    shutil.copy(hub.repository / shards[0], hub.repository / "consolidated.safetensors")
    (hub.repository / "consolidated.safetensors.index.json").write_text("{}")
    (hub.repository / "sub").mkdir()
    for name in (shards[0], "model.safetensors"):
        shutil.copy(hub.repository / shards[0], hub.repository / "sub" / name)
    model = load_model("some/model")
    assert hub.calls == [["config.json"], ["model.safetensors.index.json"], shards]
    assert torch.equal(Driver(model).step({"a": make_prompt(20)})["a"], compute_logits(hub.repository))


def test_the_single_file_of_a_repository_is_downloaded_alone(hub: FakeHub) -> None:
    make_checkpoint(hub.repository)
    shutil.copy(hub.repository / "model.safetensors", hub.repository / "model.fp16.safetensors")
    load_model("some/model")
    assert hub.calls == [["config.json"], ["model.safetensors"]]


def test_the_name_of_a_shard_is_no_pattern(hub: FakeHub) -> None:
    make_checkpoint(hub.repository)
    (hub.repository / "model.safetensors").rename(hub.repository / "part[1].safetensors")
    tensors = load_file(hub.repository / "part[1].safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part[1].safetensors")}
    (hub.repository / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub.repository / "part1.safetensors").write_bytes(b"other")
    load_model("some/model")
    assert hub.calls[-1] == ["part[1].safetensors"]


def test_kv_cache_takes_the_bytes_announced_and_says_when_there_is_no_room(tmp_path: Path) -> None:
    specs = load_model(make_checkpoint(tmp_path)).kv_specs()
    caches = allocate_kv_cache(specs, 7, 16, torch.bfloat16, torch.device("cpu"))
    total = sum(cache.nbytes for pair in caches for cache in pair)
    assert total == 7 * compute_bytes_per_block(specs, 16, torch.bfloat16)
    places = [cache.data_ptr() for pair in caches for cache in pair]
    assert max(places) - min(places) < total + 2**12  # small layers share large pages
    for num_blocks in (2**40, 2**60):
        with pytest.raises(ConfigError, match=f"num_blocks={num_blocks}: cpu cannot allocate a KV cache of"):
            allocate_kv_cache(specs, num_blocks, 16, torch.float32, torch.device("cpu"))


def test_a_checkpoint_without_an_output_head_is_read(tmp_path: Path) -> None:
    """As embedding models are published, such as E5-Mistral."""
    source = make_transformers_model("mistral")
    body, prompt = source.model, make_prompt(20)
    save(body, tmp_path)
    with torch.inference_mode():
        hidden = body(torch.tensor([prompt])).last_hidden_state[0]
    logits = Driver(load_model(tmp_path)).step({"a": prompt})["a"]
    torch.testing.assert_close(logits, hidden @ body.embed_tokens.weight.T, atol=1e-4, rtol=0)
