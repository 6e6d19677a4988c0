"""A worker process with a deadline: work that can neither be limited nor cancelled is killed instead."""

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

KILL_EVERY_S = 0.05


class WorkerDied(Exception):
    """The worker took too long or ended; the next order starts a new one."""


class KillableWorker:
    """Runs a script that answers length-prefixed JSON frames, one order at a time.

    Args:
        script: path of the script; see xgrammar_worker.py for the frames.
        hello: the first frame of each process.
        start_seconds: how long a process may take to answer it.
    """

    def __init__(self, script: Path, hello: dict[str, Any], start_seconds: float) -> None:
        self._script = script
        self._hello = hello
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None

    def ask(self, order: dict[str, Any], max_seconds: float) -> dict[str, Any]:
        """Return the answer to an order, or kill the process and raise WorkerDied."""
        with self._lock:
            try:
                process = self._start()
                return exchange(process, order, time.monotonic() + max_seconds)
            except (TimeoutError, OSError, EOFError) as error:
                self._kill()
                raise WorkerDied(f"no answer within {max_seconds:g} s or out of memory") from error

    def close(self) -> None:
        """End the process, if there is one, in the middle of an order if need be: that raises WorkerDied."""
        while not self._lock.acquire(timeout=KILL_EVERY_S):
            if (process := self._process) is not None:
                process.kill()  # the thread that waits for its answer holds the lock
        try:
            self._kill()
        finally:
            self._lock.release()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        # -P keeps the script's folder, whose module names are ours, off the import path.
        command = [sys.executable, "-P", str(self._script)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null)
        assert process.stdin is not None, "the worker was started with pipes"
        # A process that does not read must not hold its writer beyond the deadline.
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._finalizer = weakref.finalize(self, end_process, process)
        exchange(process, self._hello, time.monotonic() + self._start_seconds)
        return process

    def _kill(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and close its pipes."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def exchange(process: "subprocess.Popen[bytes]", frame: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Send a frame and read one back before the deadline."""
    assert process.stdin is not None and process.stdout is not None, "the worker was started with pipes"
    data = json.dumps(frame).encode()
    write_all(process.stdin.fileno(), len(data).to_bytes(4, "big") + data, deadline)
    descriptor = process.stdout.fileno()
    length = int.from_bytes(read_exactly(descriptor, 4, deadline), "big")
    answer: dict[str, Any] = json.loads(read_exactly(descriptor, length, deadline))
    return answer


def write_all(descriptor: int, data: bytes, deadline: float) -> None:
    """Write to a pipe that does not block, or raise TimeoutError."""
    rest = memoryview(data)
    while rest:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([], [descriptor], [], remaining)[1]:
            raise TimeoutError
        rest = rest[os.write(descriptor, rest) :]


def read_exactly(descriptor: int, num_bytes: int, deadline: float) -> bytes:
    """Read from a pipe, or raise TimeoutError or EOFError."""
    chunks: list[bytes] = []
    while num_bytes:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
            raise TimeoutError
        chunk = os.read(descriptor, num_bytes)
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        num_bytes -= len(chunk)
    return b"".join(chunks)
