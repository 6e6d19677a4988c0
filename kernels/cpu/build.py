"""NativeBuild: compiles `src/*.cpp` once per machine, in the background, and reports the result.

    ~/.cache/troupe/kernels/<hash of sources, compiler, flags, processor>.so        .dylib on macOS

The file is renamed into place when it is complete. Only its owner may write to the folder. A lock on the folder lets
one process build; the others wait and load the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kernels.cpu.library import NativeLibrary
from kernels.cpu.structs import SOURCES

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    # The sources use no exceptions, errno or floating-point flags. NaN and infinity stay exact: no -ffast-math.
    # A product and a sum are rounded together only where the source says so, whatever the compiler.
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
# system and machine -> what the processor must have; every 64-bit ARM has NEON
_NEEDED_CPU_FLAGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("linux", "x86_64"): ("avx2", "fma", "bmi2", "f16c"),
    ("linux", "aarch64"): (),
    ("darwin", "arm64"): (),
}
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_BUILD_LIMIT_S = 600
_PROBE_LIMIT_S = 20
_NICENESS = 5


class BuildError(Exception):
    """Native ops are not available; the message is one line and gives the reason."""


class NativeBuild:
    """Finds or builds the library. Thread-safe. Failures are reported by `status`, never raised.

    Args:
        cache: folder of built libraries; default: in the user's cache folder.
        architecture: value of the compiler's -march, on ARM of -mcpu; default: this machine.
    """

    def __init__(self, cache: Path | None = None, architecture: str = "native") -> None:
        self._cache = cache or _default_cache()
        self._architecture = architecture
        self._library: NativeLibrary | None = None
        self._status = "not started"
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def library(self) -> NativeLibrary | None:
        """The library, None until it is loaded."""
        return self._library

    @property
    def status(self) -> str:
        """One line: ready, being built, or the reason why it is not available."""
        return self._status

    @property
    def is_done(self) -> bool:
        """Whether the status is final."""
        return self._is_done.is_set()

    def find_gap(self) -> str:
        """Return why this machine cannot have the library; empty if it can."""
        try:
            self._prepare()
        except (BuildError, OSError) as error:
            return str(error)
        return ""

    def start(self) -> None:
        """Load the library from the cache, or start building it in the background."""
        if self._thread is not None:
            return
        try:
            command = self._prepare()
            target = self._cache / f"{self._hash(command)}{_SUFFIX}"
            if _is_file(target):
                self._load(target)
                return
        except (BuildError, OSError) as error:
            self._finish(f"not available: {error}")
            return
        self._status = "being built"
        self._thread = threading.Thread(
            target=self._build, args=(command, target), name="native-build", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> NativeLibrary | None:
        """Wait until the build has ended. Returns the library, or None if it failed or the timeout passed."""
        self._is_done.wait(timeout_s)
        return self._library

    def _prepare(self) -> list[str]:
        """Return the compiler and its flags.

        Raises:
            BuildError: the platform, the processor or the compiler does not fit.
        """
        machine = (sys.platform, platform.machine())
        if machine not in _NEEDED_CPU_FLAGS:
            known = ", ".join(" on ".join(each) for each in _NEEDED_CPU_FLAGS)
            raise BuildError(f"native ops are for {known}, not {' on '.join(machine)}")
        missing = [flag for flag in _NEEDED_CPU_FLAGS[machine] if flag not in read_cpu_flags()]
        if missing:
            raise BuildError(f"the processor lacks {', '.join(missing)}")
        compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
        if compiler is None:
            raise BuildError(f"no C++ compiler found ({', '.join(_COMPILERS)})")
        _make_private(self._cache)
        option = "-march" if machine[1] == "x86_64" else "-mcpu"
        return [compiler, *_FLAGS, f"{option}={self._architecture}"]

    def _hash(self, command: Sequence[str]) -> str:
        """Return a hash of everything that the compiled code depends on."""
        probe = subprocess.run(
            [command[0], "--version"], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False
        )
        digest = hashlib.sha256()
        for part in (*command, probe.stdout, *sorted(read_cpu_flags())):
            digest.update(part.encode() + b"\0")
        for path in sorted(SOURCES.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:32]

    def _build(self, command: list[str], target: Path) -> None:
        try:
            with _lock(self._cache):
                if not _is_file(target):
                    self._compile_into(command, target)
            self._load(target)
        except (BuildError, OSError, subprocess.SubprocessError) as error:
            self._finish(f"not available: {error}")

    def _compile_into(self, command: list[str], target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._cache, prefix="build-") as folder:
            output = Path(folder) / target.name
            sources = [os.fspath(path) for path in sorted(SOURCES.glob("*.cpp"))]
            _compile([*command, *sources, "-o", os.fspath(output)])
            output.chmod(stat.S_IRWXU)
            output.replace(target)

    def _load(self, path: Path) -> None:
        try:
            self._library = NativeLibrary(path)
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path.name} cannot be loaded: {error}") from error
        self._finish(f"ready ({self._library.isa_name})")

    def _finish(self, status: str) -> None:
        self._status = status.splitlines()[0]
        self._is_done.set()


def read_cpu_flags() -> frozenset[str]:
    """Return the features of this machine's processor as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())


def _compile(command: list[str]) -> None:
    # The output goes to a file: the compiler would block on a full pipe, which is read only at its end.
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(command, stdout=messages, stderr=messages) as process,
    ):
        # A lower priority than the server, which handles requests meanwhile.
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        try:
            code = process.wait(_BUILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BuildError(f"the compiler took longer than {_BUILD_LIMIT_S} s") from None
        messages.seek(0)
        lines = messages.read().decode(errors="replace").splitlines()
    if code:
        first = next(
            (line for line in lines if "error" in line), lines[0] if lines else f"exit status {code}"
        )
        raise BuildError(f"the compiler failed: {first.strip()}")


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "troupe" / "kernels"


def _make_private(folder: Path) -> None:
    """Create the folder. Raises BuildError if other users could write a library into it."""
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise BuildError(f"{folder} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"others may write to {folder}; run chmod 700 on it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder} cannot be written to")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder for the block. The kernel releases it if the process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_file(path: Path) -> bool:
    """Return whether the library exists, belongs to this user and is not writable by others."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
