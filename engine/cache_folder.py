"""CacheFolder: files in the user's cache from which a later start reads what an earlier one computed."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

logger = logging.getLogger("troupe.worker")

_MAX_TOTAL_BYTES = 64 * 2**30  # the files that were used longest ago are removed
_MIN_FREE_BYTES = 4 * 2**30  # on the disk, after a file was written
_STALE_S = 3600.0


class CacheFolder:
    """Files by name. A folder that cannot be used is as good as an empty one."""

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME")
        self.path = folder or (Path(base) if base else Path("~/.cache").expanduser()) / "troupe" / "packed"

    def find(self, name: str) -> Path | None:
        """Return a file, unless it is missing or others can change it."""
        path = self.path / name
        try:
            info = path.stat()
            os.utime(path)
        except OSError:
            return None
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            logger.warning("cache: %s can be changed by others, and is not used", path)
            return None
        return path

    def write(self, name: str, pieces: Iterable[bytes | memoryview], size: int) -> None:
        """Write a file of about `size` bytes, if the disk has room. It appears when it is complete."""
        path = self.path / f"{name}.{os.getpid()}.tmp"
        try:
            self.path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
            self._make_room(size)
            if shutil.disk_usage(self.path).free < size + _MIN_FREE_BYTES:
                logger.info("cache: %s is not stored, the disk of %s is nearly full", name, self.path)
                return
            with path.open("wb") as file:
                path.chmod(stat.S_IRUSR | stat.S_IWUSR)
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            path.replace(self.path / name)
            logger.info("cache: %s is stored in %s for the next start", name, self.path)
        except OSError as error:
            logger.info("cache: %s is not stored: %s", name, error)
        finally:
            path.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove what broken writers left, and the files that were used longest ago, if there are too many."""
        for path in self.path.glob("*.tmp"):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)
        kept = (path for path in self.path.iterdir() if path.suffix != ".tmp")
        files = sorted(kept, key=lambda path: path.stat().st_mtime)
        total = size + sum(path.stat().st_size for path in files)
        for path in files:
            if total <= _MAX_TOTAL_BYTES and shutil.disk_usage(self.path).free >= size + _MIN_FREE_BYTES:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


def hash_inputs(files: Sequence[Path], *settings: str) -> str:
    """Return a name for what is computed from files and settings. Files count by place, size and time of change."""
    found = hashlib.sha256("\0".join(settings).encode())
    for file in files:
        info = file.stat()
        found.update(f"\0{os.path.realpath(file)}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}".encode())
    return found.hexdigest()[:32]
