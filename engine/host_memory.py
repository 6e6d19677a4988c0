"""Measures the RAM that this process may use, within its control groups (cgroup v1 or v2), and returns freed RAM."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

_MAX_FILE_BYTES = 64 * 2**20  # of mapped files, before their pages are given back
_RELEASE_PERIOD_S = 0.02
# glibc's mallopt. It raises its own threshold to 32 MiB: grammars and texts that live long then lie between the large
# tensors that are freed, and a server of 950 MiB grows to 1,150.
_MALLOPT_TRIM, _MALLOPT_MMAP = -1, -3
_MAPPED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """File names of one cgroup version."""

    mount: str
    controller: str  # its name in /proc/self/cgroup
    limit: str
    usage: str
    caches: tuple[str, ...]  # keys of memory.stat: file pages, counted as usage, child groups included


_VERSIONS = (
    _GroupFiles("sys/fs/cgroup", "", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _GroupFiles(
        "sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def measure_host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (total, free) bytes of RAM within the tightest limit. Reclaimable file pages count as free."""
    total, free = _measure_machine(root)
    for files in _VERSIONS:
        for folder in _list_groups(root, files):
            limit = _read(folder / files.limit).strip()
            if not limit.isdigit():
                continue
            usage = int(_read(folder / files.usage).strip() or 0)
            table = _read_table(folder / "memory.stat")
            held = usage - sum(table.get(name, 0) for name in files.caches)
            total = min(total, int(limit))
            free = min(free, max(0, int(limit) - max(0, held)))
    return total, free


def measure_unified_memory() -> tuple[int, int]:
    """Return (total, free) bytes of RAM that Metal lets this process use; the GPU of a Mac has no other memory."""
    total, free = measure_host_memory()
    limit = torch.mps.recommended_max_memory()
    return min(total, limit), max(0, min(free, limit - torch.mps.driver_allocated_memory()))


def _measure_machine(root: Path) -> tuple[int, int]:
    table = _read_table(root / "proc/meminfo")
    if "MemTotal" in table and "MemAvailable" in table:
        return table["MemTotal"] * 1024, table["MemAvailable"] * 1024
    # Not every system reports free memory.
    free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf(free) * page


def _list_groups(root: Path, files: _GroupFiles) -> Iterator[Path]:
    """List the folders of this process's group and of its parents; some may not exist."""
    folder = root / files.mount
    yield folder
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if files.controller not in controllers.split(","):
            continue
        # A container may see its path on the host, which does not exist below its own mount.
        for part in Path(path).parts[1:]:
            if part == "..":
                break
            folder /= part
            yield folder


def _read_table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@contextmanager
def release_pages(files: Sequence[Path]) -> Iterator[Callable[[Tensor], None]]:
    """Keep few pages of mapped files in memory while the block reads them once.

    Pages that were read count as memory of this process until the system needs them. A thread gives them back early,
    so that a whole checkpoint never counts beside the packed model. What is read again comes from the system's cache.

    Yields a function to call with each tensor that lies in such a file. The block's end lets go of it: until then its
    addresses stay those of the file, and cannot become memory that another thread writes to.
    """
    held: list[Tensor] = []
    if sys.platform != "linux":
        yield held.append
        return
    start, is_over = _measure_file_pages(), Event()

    def watch() -> None:
        while not is_over.wait(_RELEASE_PERIOD_S):
            if _measure_file_pages() - start > _MAX_FILE_BYTES:
                _release(files, held)

    thread = Thread(target=watch, name="page-release", daemon=True)
    thread.start()
    try:
        yield held.append
    finally:
        is_over.set()
        thread.join()
        _release(files, held)


def _measure_file_pages() -> int:
    return int(_read(Path("/proc/self/statm")).split()[2]) * os.sysconf("SC_PAGE_SIZE")


def _release(files: Sequence[Path], held: Sequence[Tensor]) -> None:
    """Drop the pages of the private mappings that tensors lie in. The readers of checkpoints never write to them."""
    libc, names = ctypes.CDLL(None), {os.path.realpath(file) for file in files}
    addresses = [tensor.data_ptr() for tensor in held]
    for line in _read(Path("/proc/self/maps")).splitlines():
        place, rights, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0] in names and rights[3] == "p":
            begin, end = (int(each, 16) for each in place.split("-"))
            if any(begin <= address < end for address in addresses):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Give memory that Python and torch have freed back to the system, where the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_blocks(num_bytes: int = _MAPPED_BYTES) -> None:
    """Let the C library map each block of so many bytes by itself, so that its memory is free when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MALLOPT_MMAP, num_bytes)
        mallopt(_MALLOPT_TRIM, 8 * num_bytes)
