"""JournalFile: writes every request and its answer to a file, from which `python -m app replay` computes it again.

A record is a line of JSON. When FILE reaches half of its limit it is renamed to FILE.1, which replaces an older one;
requests that are not finished then are written again.
"""

from __future__ import annotations

import base64
import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.input.images.intake import ImagePrompt
from engine.messages import AddRequest
from engine.outputs import FinishReason

logger = logging.getLogger("troupe.engine")

VERSION = 2
RETRY_S = 5.0  # after a failed write
MAX_BYTES = 2**30  # of the file and its predecessor FILE.1
MAX_QUEUED = 2**16  # records that wait while the disk is full; later ones are lost


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

    Not a RotatingFileHandler: what its buffers hold when the disk is full is lost, or written twice.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.journal is not None
        self._path = config.journal
        self._config = replace(config, data_parallel_key=None)
        self._opened = b""
        self._preface = b""  # of a new part
        self._unfinished: dict[int, Began] = {}  # by the handle of each unfinished completion
        self._records: Queue[Record | None] = Queue(MAX_QUEUED)
        self._num_lost = 0
        self._is_closing = Event()
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"journal={config.journal!r} cannot be opened: {error.strerror}") from error
        self._thread = Thread(target=self._run, name="troupe-journal", daemon=True)
        self._thread.start()

    def begin(self, fingerprint: str) -> None:
        """Record which model answers."""
        self._put(Opened(VERSION, self._config, fingerprint))

    def add(self, message: AddRequest) -> None:
        self._put(Began(time.time(), message))

    def end(self, handle: int, token_ids: list[int], finish_reason: FinishReason) -> None:
        self._put(Ended(handle, token_ids, finish_reason))

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._is_closing.set()
        self._records.put(None)
        self._thread.join()
        os.close(self._file)

    def _put(self, record: Record) -> None:
        try:
            self._records.put_nowait(record)
        except Full:
            self._num_lost += 1

    def _open(self) -> None:
        # Prompts and answers are private.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size
        if self._size:  # a crash may have torn the last line
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as view:
                self._size = view.rfind(b"\n") + 1
            os.ftruncate(self._file, self._size)

    def _run(self) -> None:
        has_failed = False
        while (record := self._records.get()) is not None:
            line = _encode(record)
            match record:
                case Opened():
                    self._opened = line
                case Began(message=message):
                    self._unfinished |= dict.fromkeys((each.handle for each in message.completions), record)
                case Ended(handle=handle):
                    self._unfinished.pop(handle, None)
            while (cause := self._write(line)) is not None:
                if not has_failed:
                    logger.error("cannot write the journal %s: %s; requests go on", self._path, cause)
                has_failed = True
                if self._is_closing.wait(RETRY_S):
                    break
            else:
                if has_failed:
                    logger.warning("the journal is written again; %d records were lost", self._num_lost)
                    has_failed, self._num_lost = False, 0

    def _write(self, line: bytes) -> str | None:
        """Write a line. Returns the cause if nothing of it was written."""
        try:
            if self._size and self._size + len(line) > MAX_BYTES // 2:
                self._rotate()
            line = self._preface + line
            if os.pwrite(self._file, line, self._size) == len(line):
                self._size, self._preface = self._size + len(line), b""
                return None
            cause: str | None = os.strerror(errno.ENOSPC)
        except OSError as error:
            cause = error.strerror
        os.ftruncate(self._file, self._size)
        return cause

    def _rotate(self) -> None:
        """Begin a new part, with what is needed to read it."""
        with suppress(FileNotFoundError):  # an earlier attempt ended after this line
            os.replace(self._path, f"{self._path}.1")
        old = self._file
        self._open()
        os.close(old)
        unfinished = {id(each): each for each in self._unfinished.values()}  # once for all its completions
        self._preface = b"".join([self._opened, *map(_encode, unfinished.values())])


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
    """Return the requests of a journal and of the older part beside it, oldest first."""
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
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or not complete
        try:
            yield _make_decoder().decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the journal {path} is damaged in line {number}: {error}") from error


def _encode(record: Record) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encode_array) + b"\n"


def _encode_array(array: Any) -> dict[str, Any]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"no message holds a {type(array).__name__}")
    data = base64.b64encode(np.ascontiguousarray(array).data).decode()
    return {"dtype": array.dtype.str, "shape": array.shape, "data": data}


@cache
def _make_decoder() -> msgspec.json.Decoder[Record]:
    return msgspec.json.Decoder(Record, dec_hook=_decode_array)  # type: ignore[arg-type]


def _decode_array(_: type, values: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(values["data"]), values["dtype"]).reshape(values["shape"])
