"""Memory of the host: what the machine has, less what control groups keep from this process."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.host_memory import measure_host_memory, release_pages

MIB = 2**20
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def make_machine(root: Path, groups: str = "") -> Path:
    """A machine of 8 GiB of which 6 are available."""
    write(root / "proc/meminfo", f"MemTotal: {2**23} kB\nMemFree: 1000 kB\nMemAvailable: {6 * 2**20} kB\n")
    write(root / "proc/self/cgroup", groups)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit_v2(folder: Path, limit: str, current: int = 0, inactive: int = 0, active: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{current}\n")
    files = f"file {inactive + active}\ninactive_file {inactive}\nactive_file {active}\n"
    write(folder / "memory.stat", f"anon 5\n{files}")


def limit_v1(folder: Path, limit: int, usage: int = 0, inactive: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{usage}\n")
    write(folder / "memory.stat", f"cache 1\ninactive_file 0\ntotal_inactive_file {inactive}\ntotal_active_file 0\n")


@pytest.mark.parametrize(
    ("limit", "used", "measured"),
    [(None, 7000, (8192, 6144)), (2048, 1500, (2048, 2048 - 900)), (1024, 1700, (1024, 0))],
)
def test_what_a_container_uses_is_not_free_but_its_file_pages_are(
    tmp_path: Path, limit: int | None, used: int, measured: tuple[int, int]
) -> None:
    """Also those used lately: a checkpoint that was just read gives way to the model made of it."""
    make_machine(tmp_path, "0::/\n")
    if limit is not None:
        limit_v2(tmp_path / V2, str(limit * MIB), used * MIB, 100 * MIB, 500 * MIB)
    assert measure_host_memory(tmp_path) == (measured[0] * MIB, measured[1] * MIB)


def test_the_first_version_of_control_groups_counts_as_well(tmp_path: Path) -> None:
    groups = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    limit_v1(make_machine(tmp_path, groups) / V1, 1024 * MIB, 700 * MIB, 100 * MIB)
    assert measure_host_memory(tmp_path) == (1024 * MIB, 424 * MIB)


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    make_machine(tmp_path, "0::/user.slice/mine.scope\n")
    limit_v2(tmp_path / V2 / "user.slice", str(4096 * MIB), 3900 * MIB)
    limit_v2(tmp_path / V2 / "user.slice/mine.scope", str(1024 * MIB), 100 * MIB)
    limit_v2(tmp_path / V2 / "user.slice/other.scope", str(MIB), MIB)
    assert measure_host_memory(tmp_path) == (1024 * MIB, 196 * MIB)


def test_a_group_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    limit_v2(make_machine(tmp_path, "4:memory:/\n0::/\n") / V2, "max", 7000 * MIB)
    limit_v1(tmp_path / V1, 9223372036854771712, 7000 * MIB)
    assert measure_host_memory(tmp_path) == (8192 * MIB, 6144 * MIB)


def test_a_group_path_from_outside_the_container_does_not_leave_its_mount(tmp_path: Path) -> None:
    limit_v2(make_machine(tmp_path, "0::/../../other\n") / V2, str(2048 * MIB))
    limit_v2(tmp_path / "sys/other", str(MIB))
    assert measure_host_memory(tmp_path) == (2048 * MIB, 2048 * MIB)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_system_without_proc_is_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    if not is_told:
        monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")
    total, free = measure_host_memory(tmp_path)
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free < total if is_told else free == total
    total, free = measure_host_memory()  # of this machine
    assert 0 < free <= total


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_pages_of_files_that_are_read_once_are_given_back(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    with file.open("wb") as writer:
        writer.truncate(300 * 2**20)
    data = torch.from_file(str(file), shared=False, size=300 * 2**20, dtype=torch.uint8)
    start = largest = count_file_pages()
    with release_pages([file]) as hold:
        hold(data)
        for piece in data.split(2**20):
            assert not piece.any()
            largest = max(largest, count_file_pages())
            time.sleep(0.001)
    assert (largest - start) * os.sysconf("SC_PAGE_SIZE") < 200 * 2**20
    assert (count_file_pages() - start) * os.sysconf("SC_PAGE_SIZE") < 16 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_memory_that_another_thread_may_own_is_not_given_back(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(2**20))
    held, other = (torch.from_file(str(file), shared=False, size=2**20, dtype=torch.uint8) for _ in range(2))
    held[0] = other[0] = 1  # into pages that belong to this process alone
    with release_pages([file]) as hold:
        hold(held)
    assert (held[0], other[0]) == (0, 1)


def count_file_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[2])


MIXED_BLOCKS = """
import ctypes, sys

def count_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "mapped":
    from engine.host_memory import map_large_blocks
    map_large_blocks()
before = count_mib()
libc.free(libc.malloc(30 * 2**20))  # after this, glibc by itself maps no block up to 30 MiB
large = []
for _ in range(100):
    large.append(libc.malloc(2**20))
    ctypes.memset(large[-1], 1, 2**20)
    ctypes.memset(libc.malloc(2000), 1, 2000)  # lives on
for block in large[:-1]:
    libc.free(block)
print(count_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_small_blocks_between_large_ones_do_not_keep_their_memory() -> None:
    kept, mapped = (
        int(subprocess.run([sys.executable, "-c", MIXED_BLOCKS, how], capture_output=True, check=True).stdout)
        for how in ("kept", "mapped")
    )
    assert kept > mapped + 80, (kept, mapped)
