"""What all tests share: one worker a file under `pytest -n`, one torch thread a worker, and `--native-arch`.

make test-avx2                                    the suite as a machine with AVX2 and no AVX-512 runs it
pytest --native-arch x86-64-v3 tests/kernels      native ops for an older processor, in child processes as well
"""

import gc
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.forked_processes import ForkServer
from tests.processor_time import ProcessorTime

# A slow or busy machine is no failure, and a change is judged by the examples that the change before it passed.
settings.register_profile("any machine", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("any machine")

# The workers share the cores. Set before torch is imported; servers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers of tests must leave the user's data alone, and do not share it.
os.environ.setdefault("TROUPE_DATA_DIR", "none")
# They serve the embedded model alone, whatever else was fetched on this machine.
os.environ.setdefault("TROUPE_CHAT_MODEL", "none")

LONGEST = ("tests/browser/", "tests/kernels/triton/", "tests/engine/worker/test_decode_graphs.py", "tests/real/")

WRAPPER = """#!/bin/sh
for word do
  shift
  if [ "$word" = -march=native ]; then word={flag}; fi
  set -- "$@" "$word"
done
exec {compiler} "$@"
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native-arch", metavar="ARCH", help="compile native ops for ARCH, such as x86-64-v3 (AVX2)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(config))
    forks = ForkServer()
    forks.install()
    config.add_cleanup(forks.close)
    if arch := config.getoption("--native-arch"):
        put_compiler_first(arch)


def put_compiler_first(arch: str) -> None:
    """Put a g++ on PATH that compiles for `arch` where it is asked for this machine.

    Its path is part of the key of the library cache, so the libraries of the machine itself stay apart.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "troupe/compilers", arch)
    if os.environ["PATH"].startswith(os.fspath(folder)):
        return  # a worker of the run that put it there
    compiler = shutil.which("g++")
    if compiler is None:
        raise pytest.UsageError("--native-arch needs g++")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = WRAPPER.format(flag=shlex.quote(f"-march={arch}"), compiler=shlex.quote(compiler))
    new = Path(f"{folder / 'g++'}.{os.getpid()}")
    new.write_text(text)
    new.chmod(0o700)
    new.replace(folder / "g++")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while everything is imported, and never look again at what then exists: it stays."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


class FileScheduling(LoadScopeScheduling):
    """Keeps the tests of a file in one worker, so that its fixtures are made once; the browser tests are one file."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/browser" if nodeid.startswith("tests/browser/") else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)
