"""Catalogue: the models that this machine knows by name.

    embedded    the demo model of this repository
    folder      what lies under `models_dir`: folders with a config.json, and GGUF files, by their paths within it
    package     models of the Python registry, see packaged_models.py
    hub         what lies in the hub's cache: `owner/name`, or `owner/name:file.gguf`

Only config files and headers are read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from engine.config_fields import DEMO_MODEL
from engine.errors import ConfigError
from engine.input.tokenizer import TOKENIZER_PATTERNS
from engine.model.checkpoint import read_json_object, weight_files
from engine.model.formats.gguf_file import GGUFFile, list_parts, name_parts
from engine.model.hub_download import download_files
from engine.packaged_models import PACKAGED_MODELS, Progress

Source = Literal["embedded", "folder", "package", "hub"]

_MAX_DEPTH = 3  # of folders under models_dir: owner/name/file
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_LICENSE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)
_CONFIG_FILES = (
    *TOKENIZER_PATTERNS, "preprocessor_config.json", "modules.json", "1_Pooling/*", "README.md", "*.index.json",
)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """What is known about a model without loading it.

    Attributes:
        model: what `EngineConfig` takes as its model.
        is_here: whether it can be loaded without fetching anything.
        num_parameters: counted in a GGUF file, else estimated from the size of the weights; 0 before they are here.
        context_length: tokens; None if its files do not say.
        problem: why it cannot be loaded; "" if nothing speaks against it.
    """

    name: str
    model: str
    source: Source
    num_bytes: int = 0
    is_here: bool = True
    format: str = "safetensors"
    architecture: str = ""
    license: str | None = None
    context_length: int | None = None
    modalities: tuple[str, ...] = ("text",)
    problem: str = ""
    num_parameters: int = 0

    def list_facts(self) -> list[tuple[str, str]]:
        """Return the entry as names and texts, for people."""
        facts = [
            ("name", self.name), ("source", self.source), ("state", self.state), ("where", self.model),
            ("format", self.format), ("size", f"{self.num_bytes / 2**20:,.1f} MiB"),
            ("license", self.license or "not stated"), ("modalities", ", ".join(self.modalities)),
        ]
        return facts + [("problem", self.problem)] * bool(self.problem)

    @property
    def state(self) -> str:
        return "broken" if self.problem else "here" if self.is_here else "to fetch"


# Small models of the hub that are offered before they are here; sizes as of their model.safetensors.
SUGGESTED = tuple(
    CatalogueEntry(name, name, "hub", num_bytes, False, "safetensors", architecture, "apache-2.0", length, modalities)
    for name, num_bytes, architecture, length, modalities in (
        ("Qwen/Qwen3-0.6B", 1_503_300_328, "Qwen3ForCausalLM", 40_960, ("text",)),
        (
            "HuggingFaceTB/SmolVLM-256M-Instruct", 513_028_808, "Idefics3ForConditionalGeneration", 8_192,
            ("text", "image"),
        ),
    )
)


@dataclass(frozen=True)
class Catalogue:
    """Finds, fetches and removes models.

    Attributes:
        aliases: further name -> name of a model, or what `EngineConfig` takes.
    """

    models_dir: str | Path | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def list(self) -> list[CatalogueEntry]:
        """Return all models, those of `models_dir` first, each name once."""
        packages = [describe_model(name, name, "package") for name in PACKAGED_MODELS]
        embedded = describe_model(Path(DEMO_MODEL).name, DEMO_MODEL, "embedded")
        found = [*self._list_folder(), embedded, *packages, *list_hub_cache(), *SUGGESTED]
        return list({each.name: each for each in reversed(found)}.values())[::-1]

    def find(self, name: str) -> CatalogueEntry | None:
        """Return the model of a name or alias; None if there is none."""
        entries = {each.name: each for each in self.list()}
        meant = self.aliases.get(name)
        if meant is None:
            return entries.get(name)
        found = entries.get(meant) or describe_model(meant, meant, "folder")
        return replace(found, name=name)

    def fetch(self, name: str, report: Progress = lambda done, total: None) -> CatalogueEntry:
        """Fetch a packaged model, or one of the hub, going on with what an earlier try has left.

        Raises:
            ConfigError: nothing of this name can be fetched, the disk is full, or a checksum is wrong.
        """
        name = self.aliases.get(name, name)
        found = self.find(name)
        if found is not None and found.is_here and not found.problem:
            return found
        repository, colon, file = name.partition(":")
        if name in PACKAGED_MODELS:
            PACKAGED_MODELS[name].fetch(report)
            return describe_model(name, name, "package")
        if repository.partition("@")[0].count("/") != 1 or repository.startswith((".", "~", "/")):
            known = ", ".join(PACKAGED_MODELS)
            raise ConfigError(f"model {name[:200]!r} cannot be fetched; known are {known}, and owner/name of the hub")
        if colon:
            download_files(repository, name_parts(file), report)
        else:
            fetch_repository(repository, report)
        return describe_model(name, name, "hub")

    def remove(self, name: str) -> int:
        """Delete a model's files. Returns the number of bytes.

        Raises:
            ConfigError: there is none, or it belongs to an installation.
        """
        entry = self.find(name)
        if entry is None or not entry.is_here:
            raise ConfigError(f"model {name!r} is not here; `models` lists those that are")
        match entry.source:
            case "embedded":
                raise ConfigError(f"model {name!r} belongs to Troupe and cannot be removed")
            case "package":
                package = PACKAGED_MODELS[entry.name]
                if package.path != package.own_path:
                    raise ConfigError(f"model {name!r} is an installed package; use pip uninstall {package.package}")
                shutil.rmtree(package.own_path.parent)
            case "hub":
                _remove_from_hub_cache(entry.name)
            case _:
                path = Path(entry.model)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    for part in [path] if path.is_dir() else list_parts(path):
                        part.unlink()
        return entry.num_bytes

    def _list_folder(self) -> Iterator[CatalogueEntry]:
        if self.models_dir is None:
            return
        folder = Path(self.models_dir).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"models_dir {str(folder)!r} is not a folder")
        for path in sorted(_find_models(folder, _MAX_DEPTH)):
            yield describe_model(path.relative_to(folder).as_posix(), str(path), "folder")


def describe_model(name: str, model: str, source: Source) -> CatalogueEntry:
    """Return the entry of a model; what is wrong with its files is in it."""
    entry = CatalogueEntry(name, model, source)
    if (package := PACKAGED_MODELS.get(model)) is not None and not Path(model).exists():
        path = package.path
        entry = replace(entry, model=str(path), num_bytes=package.num_bytes, license=package.license, format="gguf")
        if not path.is_file():
            return replace(entry, is_here=False)
    else:
        path = Path(model).expanduser()
        if not path.exists():
            found = _find_in_hub_cache(model)
            if found is None:
                return replace(entry, is_here=False, problem=f"{model} is neither a path nor in the hub's cache")
            path = found
    try:
        return _describe_file(entry, path) if path.is_file() else _describe_folder(entry, path)
    except (ConfigError, OSError) as error:
        return replace(entry, problem=str(error))


def list_hub_cache() -> list[CatalogueEntry]:
    """Return the checkpoints and GGUF files in the hub's cache; other repositories are left out."""
    try:
        repositories = sorted(scan_cache_dir().repos, key=lambda each: each.repo_id)
    except (CacheNotFound, OSError):
        return []
    found: list[str] = []
    for repository in repositories:
        names = {file.file_name for each in repository.revisions for file in each.files}
        if repository.repo_type != "model":
            continue
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            found.append(repository.repo_id)
        files = sorted(name for name in names if name.endswith(".gguf") and not _LATER_PART.search(name))
        found += [f"{repository.repo_id}:{name}" for name in files]
    return [describe_model(name, name, "hub") for name in found]


def fetch_repository(repository: str, report: Progress) -> None:
    """Download what the engine reads of a repository: configs, tokenizer, and the weights of its index."""
    download_files(repository, _CONFIG_FILES, lambda done, total: None)
    folder = _find_in_hub_cache(repository)
    index = None if folder is None else folder / "model.safetensors.index.json"
    weights: tuple[str, ...] = ("model.safetensors",)
    if index is not None and index.is_file():
        weights = tuple(sorted({escape(str(each)) for each in read_json_object(index).get("weight_map", {}).values()}))
    download_files(repository, weights, report)


def _find_models(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        is_file = path.is_file() and path.suffix == ".gguf" and not _LATER_PART.search(path.name)
        if is_file or (path / "config.json").is_file():
            yield path
        elif depth > 1 and path.is_dir():
            yield from _find_models(path, depth - 1)


def _find_in_hub_cache(model: str) -> Path | None:
    """Return the folder, or the file, of a name of the hub if it is in the cache."""
    repository, _, file = model.partition(":")
    repo_id, _, revision = repository.partition("@")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    found = folder / "snapshots" / commit / file if commit else None
    return found if found is not None and found.exists() else None


def _remove_from_hub_cache(name: str) -> None:
    repository, colon, file = name.partition(":")
    cache = scan_cache_dir()
    revisions = [revision for repo in cache.repos if repo.repo_id == repository for revision in repo.revisions]
    if not colon:
        cache.delete_revisions(*(each.commit_hash for each in revisions)).execute()
        return
    wanted = set(name_parts(file))
    for each in (each for revision in revisions for each in revision.files if each.file_name in wanted):
        each.blob_path.unlink(missing_ok=True)
        each.file_path.unlink(missing_ok=True)


def _describe_file(entry: CatalogueEntry, path: Path) -> CatalogueEntry:
    facts = _read_gguf(path, path.stat().st_mtime_ns)
    return replace(entry, format="gguf", **facts | ({"license": entry.license} if entry.license else {}))


@lru_cache(maxsize=256)
def _read_gguf(path: Path, stamp: int) -> dict[str, Any]:
    file = GGUFFile(path)
    architecture = str(file.metadata.get("general.architecture", ""))
    length = file.metadata.get(f"{architecture}.context_length")
    return {
        "num_bytes": file.num_bytes, "num_parameters": file.num_parameters, "architecture": architecture,
        "license": file.metadata.get("general.license"),
        "context_length": length if isinstance(length, int) else None,
    }


def _describe_folder(entry: CatalogueEntry, path: Path) -> CatalogueEntry:
    config = read_json_object(path / "config.json")
    text = config.get("text_config")
    inner = config | text if isinstance(text, dict) else config
    length, num_bytes = inner.get("max_position_embeddings"), sum(each.stat().st_size for each in weight_files(path))
    card = path / "README.md"
    found = _LICENSE.search(card.read_text("utf-8", "replace")[:10_000]) if card.is_file() else None
    return replace(
        entry, num_bytes=num_bytes, num_parameters=_estimate_parameters(inner, num_bytes),
        architecture=str((config.get("architectures") or [config.get("model_type", "")])[0]),
        license=found[1] if found else None, context_length=length if isinstance(length, int) else None,
        modalities=("text", "image") if "vision_config" in config else ("text",),
    )


def _estimate_parameters(config: Mapping[str, Any], num_bytes: int) -> int:
    """Return about how many parameters weights of a size have, rather too few than too many."""
    quantized = config.get("quantization_config")
    bits = 16 if "16" in str(config.get("dtype") or config.get("torch_dtype")) else 32
    if isinstance(quantized, dict):
        bits = next((each for each in range(1, 8) if each == quantized.get("bits")), 8)
    return num_bytes * 8 // bits
