"""MappedStore: a hash table of units in a file, or in shared memory, that any number of processes map at once.

    file:   header page (what made the units) | entry 0, entry 1, ... | unit 0, unit 1, ...
    entry:  key | checksum of key and unit | time of the last use             (64 bytes)

There are no locks and no index outside the file. A key may be in one of eight entries; a new unit replaces the least
recently used one. Readers copy a unit first and verify the copy, so a unit that is being replaced is a miss.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.kv_transfer_config import UNIT_TOKENS
from engine.transfer.units import Unit, UnitLayout, compute_checksum

_PAGE_BYTES = 4096
_ENTRY = struct.Struct("<40sIxxxxQ8x")
_LAST_USE = struct.Struct("<Q")
_LAST_USE_AT = 48  # in an entry
_NUM_WAYS = 8


class MappedStore:
    """A KVConnector over one file.

    Raises:
        OSError: the file cannot be had.
        ValueError: it is too small for eight units, or holds units of another model or setting.
    """

    def __init__(self, path: Path, num_bytes: int, layout: UnitLayout) -> None:
        self._stride = -(-layout.num_bytes // 64) * 64
        self._num_buckets = num_bytes // (self._stride + _ENTRY.size) // _NUM_WAYS
        if not self._num_buckets:
            raise ValueError(
                f"kv_buffer_size={num_bytes} is less than {_NUM_WAYS} units of {layout.num_bytes} bytes"
            )
        num_entries = self._num_buckets * _NUM_WAYS
        self._units_at = _PAGE_BYTES + -(-num_entries * _ENTRY.size // _PAGE_BYTES) * _PAGE_BYTES
        size = self._units_at + num_entries * self._stride
        header = f"troupe kv 1 {layout} {num_entries}".encode().ljust(_PAGE_BYTES, b"\0")
        self._map = _map(path, size, header)
        self._content = np.frombuffer(self._map, dtype=np.uint8)

    def get_num_new_matched_tokens(self, keys: Sequence[bytes]) -> int:
        found = next((at for at, key in enumerate(keys) if self._find(key) is None), len(keys))
        return found * UNIT_TOKENS

    def start_load_kv(self, units: Sequence[Unit]) -> list[bool]:
        return [self._load(key, parts) for key, parts in units]

    def save_kv(self, units: Sequence[Unit]) -> None:
        for key, parts in units:
            self._save(key, parts)

    def discard_kv(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (index := self._find(key)) is not None:
                self._write_entry(index, b"", 0, 0)

    def shutdown(self) -> None:
        """Unmap the file, whose units stay."""
        del self._content
        self._map.close()

    def _find(self, key: bytes) -> int | None:
        """Return the index of the key's entry."""
        padded = key.ljust(40, b"\0")
        first = self._find_bucket(key)
        entries = ((index, self._read_entry(index)) for index in range(first, first + _NUM_WAYS))
        return next((index for index, (found, _, _) in entries if found == padded), None)

    def _find_bucket(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") % self._num_buckets * _NUM_WAYS

    def _load(self, key: bytes, parts: Sequence[np.ndarray]) -> bool:
        index = self._find(key)
        if index is None:
            return False
        _, checksum, _ = self._read_entry(index)
        at = self._units_at + index * self._stride
        for part in parts:
            np.copyto(part, self._content[at : at + part.nbytes])
            at += part.nbytes
        if compute_checksum(key, parts) != checksum:
            self._write_entry(index, b"", 0, 0)  # so that it is saved again
            return False
        _LAST_USE.pack_into(self._map, _PAGE_BYTES + index * _ENTRY.size + _LAST_USE_AT, time.time_ns())
        return True

    def _save(self, key: bytes, parts: Sequence[np.ndarray]) -> None:
        index = self._find(key)
        checksum = compute_checksum(key, parts)
        if index is None or self._read_entry(index)[1] != checksum:
            first = self._find_bucket(key)
            if index is None:
                index = min(range(first, first + _NUM_WAYS), key=lambda each: self._read_entry(each)[2])
            self._write_entry(index, b"", 0, 0)
            at = self._units_at + index * self._stride
            for part in parts:
                np.copyto(self._content[at : at + part.nbytes], part)
                at += part.nbytes
        self._write_entry(index, key, checksum, time.time_ns())

    def _read_entry(self, index: int) -> tuple[bytes, int, int]:
        """Return key, checksum and time of last use."""
        key, checksum, used = _ENTRY.unpack_from(self._map, _PAGE_BYTES + index * _ENTRY.size)
        return key, checksum, used

    def _write_entry(self, index: int, key: bytes, checksum: int, used: int) -> None:
        _ENTRY.pack_into(self._map, _PAGE_BYTES + index * _ENTRY.size, key, checksum, used)


def _map(path: Path, size: int, header: bytes) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another process may make the file now
        if not os.fstat(descriptor).st_size:
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, header, 0)
        elif os.pread(descriptor, _PAGE_BYTES, 0) != header:
            raise ValueError("it holds units of another model, setting or size")
        return mmap.mmap(descriptor, size)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicitly: the mapping keeps a copy of the descriptor
        os.close(descriptor)
