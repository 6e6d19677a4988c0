"""Starts servers, core and rank processes, and modules of kernels' tests, as forks of a process with their imports.

An interpreter that imports torch and the engine takes 3 s of processor time, one of a server 8 s, a fork of one 0.02 s.
All else is as after an exec: the parent, arguments, environment, descriptors and the module that runs. Ranks that a
core process starts, and the processes of a server, are started by exec; so is `python -m app` without `serve`.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

MODULES = ("engine.cluster.core_process", "engine.parallel.rank_process")
SERVERS = (["app", "serve"], ["tests.browser.fragile_app", "serve"])
SERVER_IMPORTS = ("app.cli.main", "app.cli.serve", "app.server", "app.ui.demo")  # at the first server
LATER = ("transformers.tokenization_utils_tokenizers",)  # what they import when they load a model
PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE_BYTES, MAX_PID_BYTES, MAX_DESCRIPTORS = 2**17, 20, 250
TITLE = "x" * 400  # room for the title of a fork
_exec: Any = subprocess._fork_exec  # type: ignore[attr-defined]


class ForkServer:
    """Replaces the function with which `subprocess` starts a program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait()

    def _fork_exec(self, args: list[str], programs: Any, closes: bool, kept: tuple[int, ...], *rest: Any) -> int:
        folder, environment, stdin, _, _, stdout, _, stderr, _, error_pipe, *_ = rest
        is_known = args[:2] == [sys.executable, "-m"] and (
            args[2] in MODULES or args[2].startswith("tests.kernels.") or args[2:4] in SERVERS
        )
        preexec = rest[-2]
        if not is_known or folder is not None or preexec is not None:
            return int(_exec(args, programs, closes, kept, *rest))
        given = {number: number for number in kept if number != error_pipe}  # by the number in the new process
        given |= {at: at if end == -1 else end for at, end in enumerate((stdin, stdout, stderr))}
        values = [f"{name}={value}" for name, value in os.environ.items()]
        if environment is not None:
            values = [os.fsdecode(each) for each in environment]
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        request = {"args": args[2:], "environment": values, "numbers": [*given], "ignores_interrupts": ignores}
        with self._lock:
            connection = self._connect()
            libc = ctypes.CDLL(None)
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], list(given.values()))
                return int(connection.recv(MAX_PID_BYTES))
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _connect(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno()), TITLE]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1]
                )
        return self._connection


def serve(connection: socket.socket) -> None:
    """Fork for each request until the tests have ended.

    A fork forks once more and ends, so that the second fork becomes a child of the process that asked.
    """
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not text:
            return
        request = json.loads(text)
        if request["args"][:2] in SERVERS:
            import_all(SERVER_IMPORTS)
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            pid = os.fork()
            if not pid:
                become(request, descriptors)
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.waitpid(child, 0)
        connection.send(os.read(reader, MAX_PID_BYTES))
        for each in (reader, writer, *descriptors):
            os.close(each)


def become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run a module in this fork as `python -m` does."""
    code = 1
    try:
        place_descriptors(dict(zip(request["numbers"], descriptors, strict=True)))
        # Those of the parent stood for files of another kind.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(each.split("=", 1) for each in request["environment"])
        ignores = request["ignores_interrupts"]
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
        sys.argv = request["args"]
        set_title("\0".join([sys.executable, "-m", *sys.argv]))
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def place_descriptors(sources: dict[int, int]) -> None:
    """Give descriptors their numbers, and close all others."""
    free = max(*sources, *sources.values()) + 1
    for at, source in enumerate(sources.values()):
        os.dup2(source, free + at)
    for at, number in enumerate(sources):
        os.dup2(free + at, number)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in sources:
            with suppress(OSError):  # the one of the list itself
                os.close(each)


def set_title(title: str) -> None:
    """Overwrite the arguments that /proc shows; tests find processes by them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


@cache
def import_all(names: tuple[str, ...]) -> None:
    """Import modules, and let no collection look at what they make."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1, "a fork would have one thread alone"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_all((*MODULES, *LATER))
    for name in MODULES:
        del sys.modules[name]  # each fork runs one as its main module
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
