"""JournalFile: writes every request and its answer to a file, from which `python -m app replay` computes it again.

A record is the length of its body and the CRC-32 of it (both uint32, little endian), then the body, see
`engine/codec.py`. When FILE reaches half of its limit it is renamed to FILE.1, which replaces an older one; requests
that are not finished then are written again. A torn record at the end, from a crash, is cut off at the next start.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import msgspec

from engine.codec import decode, encode
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.input.images.intake import ImagePrompt
from engine.messages import AddRequest
from engine.outputs import FinishReason

logger = logging.getLogger("troupe.engine")

VERSION = 1
RETRY_S = 5.0  # after a failed write
MAX_BYTES = 2**30  # of the file and its predecessor FILE.1
_HEADER = struct.Struct("<II")


class Began(msgspec.Struct, frozen=True, tag=True):
    """A request that was accepted by the front."""

    time: float  # seconds since the epoch
    message: AddRequest


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of a completion. A stop string may end the text before the last of these tokens."""

    handle: int
    token_ids: list[int]
    finish_reason: FinishReason


class Opened(msgspec.Struct, frozen=True, tag=True):
    """First record of a file and of each start of the engine."""

    version: int
    config: EngineConfig  # without the key of the cluster
    fingerprint: str  # of weights, arithmetic and KV layout


Record = Began | Ended | Opened


class JournalFile:
    """Writes in a thread of its own. If a write fails, the engine serves on, and the records are written later.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.journal is not None
        self._path = Path(config.journal)
        self._config = replace(config, data_parallel_key=None)
        self._opened = b""
        self._unfinished: dict[int, bytes] = {}  # Began, by the handle of each unfinished completion
        self._backlog: list[bytes] = []  # records that could not be written
        self._num_lost = 0
        self._retry_time = 0.0
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"journal={config.journal!r} cannot be opened: {error.strerror}") from error
        self._thread = Thread(target=self._run, name="troupe-journal", daemon=True)
        self._thread.start()

    def begin(self, fingerprint: str) -> None:
        """Record which model answers."""
        self._queue.put(Opened(VERSION, self._config, fingerprint))

    def add(self, message: AddRequest) -> None:
        self._queue.put(Began(time.time(), message))

    def end(self, handle: int, token_ids: list[int], finish_reason: FinishReason) -> None:
        self._queue.put(Ended(handle, token_ids, finish_reason))

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._file)

    def _open(self) -> int:
        # Prompts and answers are private.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._size = find_end(self._path)
        os.ftruncate(file, self._size)
        return file

    def _run(self) -> None:
        is_open = True
        while is_open:
            frames: list[bytes] = []
            size = 0
            while not frames or (not self._queue.empty() and size < MAX_BYTES // 16):
                if (record := self._queue.get()) is None:
                    is_open, self._retry_time = False, min(self._retry_time, time.monotonic())
                    break
                frames.append(self._frame(record))
                size += len(frames[-1])
            self._write(frames)

    def _frame(self, record: Record) -> bytes:
        """Return the bytes of a record, and note which requests are unfinished."""
        body = encode(record)
        frame = _HEADER.pack(len(body), zlib.crc32(body)) + body
        match record:
            case Opened():
                self._opened = frame
            case Began(message=message):
                self._unfinished |= {each.handle: frame for each in message.completions}
            case Ended(handle=handle):
                self._unfinished.pop(handle, None)
        return frame

    def _write(self, frames: list[bytes]) -> None:
        self._backlog += frames
        if time.monotonic() < self._retry_time:
            self._shorten_backlog()
            return
        try:
            if self._size and self._size + sum(map(len, self._backlog)) > MAX_BYTES // 2:
                self._rotate()
            data = b"".join(self._backlog)
            written = os.pwrite(self._file, data, self._size)
            if written < len(data):
                os.pwrite(self._file, data[written:], self._size + written)  # raises the reason
        except OSError as error:
            if not self._retry_time:
                logger.error("cannot write the journal %s: %s; requests go on", self._path, error.strerror)
            self._retry_time = time.monotonic() + RETRY_S
            self._shorten_backlog()
            return
        self._size += len(data)
        self._backlog.clear()
        if self._retry_time:
            logger.warning("the journal is written again; %d records were lost", self._num_lost)
            self._retry_time, self._num_lost = 0.0, 0

    def _shorten_backlog(self) -> None:
        """Keep at most an eighth of the limit in memory."""
        size = sum(map(len, self._backlog))
        while size > MAX_BYTES // 8:
            size -= len(self._backlog.pop(0))
            self._num_lost += 1

    def _rotate(self) -> None:
        if self._path.exists():  # otherwise an earlier attempt ended here
            os.replace(self._path, f"{self._path}.1")
        old, self._file = self._file, self._open()
        os.close(old)
        self._backlog = list(dict.fromkeys([self._opened, *self._unfinished.values(), *self._backlog]))


@dataclass(slots=True)
class RecordedRequest:
    """A request of a journal."""

    config: EngineConfig
    fingerprint: str
    time: float
    message: AddRequest
    ends: dict[int, Ended]  # by handle

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt, with its images if there are any."""
        message = self.message
        return (
            ImagePrompt(message.prompt_token_ids, message.images)
            if message.images
            else message.prompt_token_ids
        )


def read_journal(path: str) -> list[RecordedRequest]:
    """Return the requests of a journal and of the older part beside it, oldest first.

    Raises:
        ConfigError: the file cannot be read, or another version of the program wrote it.
    """
    requests: dict[tuple[str, int], RecordedRequest] = {}  # a rotation repeats unfinished requests
    by_handle: dict[int, RecordedRequest] = {}
    opened = None
    for part in (f"{path}.1", path):
        if part != path and not os.path.exists(part):
            continue
        for record in _read_records(part):
            match record:
                case Opened(version=version):
                    if version != VERSION:
                        raise ConfigError(f"{part} has version {version} of the journal, not {VERSION}")
                    opened = record
                case Began(message=message):
                    assert opened is not None, "a journal begins with Opened"
                    key = (message.request_id, message.completions[0].handle)
                    if key not in requests or requests[key].time != record.time:
                        requests[key] = RecordedRequest(
                            opened.config, opened.fingerprint, record.time, message, {}
                        )
                    by_handle |= {each.handle: requests[key] for each in message.completions}
                case Ended(handle=handle):
                    if handle in by_handle:
                        by_handle[handle].ends[handle] = record
    return list(requests.values())


def _read_records(path: str) -> Iterator[Record]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror}") from error
    start = 0
    while start + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, start)
        body = data[start + _HEADER.size : start + _HEADER.size + length]
        if len(body) < length:
            return  # it is being written, or was when the engine ended
        if zlib.crc32(body) != checksum:
            raise ConfigError(f"the journal {path} is damaged at byte {start}")
        try:
            yield decode(body, Record)  # type: ignore[arg-type]
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the journal {path} has an unknown record at byte {start}: {error}") from error
        start += _HEADER.size + length


def find_end(path: Path) -> int:
    """Return where the last whole record ends."""
    end, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length = _HEADER.unpack(header)[0]
            if end + _HEADER.size + length > size:
                break
            end += _HEADER.size + length
            file.seek(end)
    return end
