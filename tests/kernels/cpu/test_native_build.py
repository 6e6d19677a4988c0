"""Building the native library: from the cache, in the background, and what is said when it cannot be."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import NativeBuild, build
from tests.kernels.cpu.conftest import load_library, require_library


def make_compiler(folder: Path, body: str) -> Path:
    """A program called g++ that answers --version and otherwise does as told; `$out` is where the result goes."""
    folder.mkdir(exist_ok=True)
    script = folder / "g++"
    script.write_text(
        f"""#!/bin/sh
if [ "$1" = --version ]; then echo "g++ 12"; exit 0; fi
for word in "$@"; do out="$word"; done
{body}
"""
    )
    script.chmod(0o755)
    return script


def run(cache: Path) -> NativeBuild:
    started = NativeBuild(cache)
    started.start()
    started.wait()
    return started


@pytest.fixture
def only_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder on PATH, empty; the processor can run anything."""
    load_library("native")  # found once a process: not on this PATH
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(build, "read_cpu_flags", lambda: frozenset(["avx2", "fma", "bmi2", "f16c"]))
    return folder


def test_without_a_compiler_it_says_so(tmp_path: Path, only_compiler: Path) -> None:
    tried = run(tmp_path / "cache")
    assert tried.library is None
    assert tried.status == "not available: no C++ compiler found (g++, c++, clang++)"


def test_a_compiler_that_fails_is_quoted_in_one_line(tmp_path: Path, only_compiler: Path) -> None:
    make_compiler(only_compiler, 'echo "In file x:"; echo "x.cpp:1: error: no such thing"; echo more; exit 1')
    tried = run(tmp_path / "cache")
    assert tried.status == "not available: the compiler failed: x.cpp:1: error: no such thing"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_result_that_is_no_library_is_not_used(tmp_path: Path, only_compiler: Path) -> None:
    make_compiler(only_compiler, 'echo text > "$out"')
    tried = run(tmp_path / "cache")
    assert tried.library is None
    assert tried.status.startswith("not available: ")
    assert "cannot be loaded" in tried.status


def test_an_old_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "read_cpu_flags", lambda: frozenset(["sse2", "fma"]))
    assert run(tmp_path / "cache").status == "not available: the processor lacks avx2, bmi2, f16c"


def test_another_platform_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert "not linux on riscv64" in run(tmp_path / "cache").status


def test_arm_is_compiled_for_its_own_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_compiler: Path
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    make_compiler(only_compiler, 'echo "error: $*"; exit 1')
    assert " -mcpu=native " in run(tmp_path / "cache").status


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, only_compiler: Path) -> None:
    make_compiler(only_compiler, "exit 1")
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    assert "others may write to" in run(cache).status


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, only_compiler: Path) -> None:
    make_compiler(only_compiler, "exit 1")
    (tmp_path / "file").touch()
    assert run(tmp_path / "file" / "cache").status.startswith("not available: ")


def test_only_the_owner_may_write_to_the_cache(tmp_path: Path, only_compiler: Path) -> None:
    make_compiler(only_compiler, "exit 1")
    run(tmp_path / "deep" / "cache")
    assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) == 0o700


def test_a_library_that_others_may_write_to_is_built_again(tmp_path: Path, only_compiler: Path) -> None:
    library = require_library().path
    make_compiler(only_compiler, f'/bin/cp {library} "$out"')
    cache = tmp_path / "cache"
    assert run(cache).library is not None
    (built,) = cache.iterdir()
    assert stat.S_IMODE(built.stat().st_mode) == 0o700
    make_compiler(only_compiler, "exit 3")
    assert run(cache).library is not None, "from the cache, without the compiler"
    built.chmod(0o722)
    assert run(cache).library is None


def test_other_flags_of_the_processor_are_another_library(
    tmp_path: Path, only_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(only_compiler, f'/bin/cp {require_library().path} "$out"')
    run(tmp_path / "cache")
    monkeypatch.setattr(build, "read_cpu_flags", lambda: frozenset(["avx2", "fma", "bmi2", "f16c", "avx512f"]))
    run(tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_builds_at_the_same_time_compile_once(tmp_path: Path, only_compiler: Path) -> None:
    """Every process of a server, and every worker of a test run, starts with one."""
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do /bin/sleep 0.01; done"
    make_compiler(only_compiler, f'echo x >> {calls}; {wait}; /bin/cp {require_library().path} "$out"')
    builds = [NativeBuild(tmp_path / "cache") for _ in range(3)]
    for each in builds:
        each.start()
    gate.touch()
    assert all(each.wait() is not None for each in builds)
    assert calls.read_text() == "x\n"


def test_it_starts_once_and_waits_without_a_limit_or_with_one(tmp_path: Path, only_compiler: Path) -> None:
    gate = tmp_path / "gate"
    make_compiler(only_compiler, f"while [ ! -e {gate} ]; do /bin/sleep 0.01; done; exit 1")
    started = NativeBuild(tmp_path / "cache")
    started.start()
    started.start()
    assert started.wait(0.01) is None
    assert started.status == "being built"
    assert not started.is_done
    gate.touch()
    assert started.wait() is None
    assert started.status.startswith("not available: the compiler failed")


def test_a_process_may_end_while_a_pool_waits() -> None:
    require_library()
    program = (
        "import torch; from kernels.cpu import NativeBuild, make_native_ops\n"
        "build = NativeBuild(); build.start(); ops = make_native_ops(build.wait(), 4)\n"
        "print(float(ops.rms_norm(torch.ones(100, 1000), torch.ones(1000), 0.0).sum()))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "100000.0", "")
