"""Files that a damaged or hostile one could crash or block are read in a process of their own, by readers/main.py."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.extraction.decoding import UnreadableSource

MAX_SECONDS = 30  # of processor time
MAX_MEMORY = 2**30  # bytes of address space
ADDRESS = re.compile(r" ?<[^<>]* at 0x[0-9a-fA-F]+>")  # of an object in the message of a library
MAIN = Path(__file__).with_name("readers") / "main.py"


def run_child(function: str, data: bytes, name: str, patience: int = 4, **asked: Any) -> dict[str, Any]:
    """Return what a function answers for a file.

    Args:
        function: as pdf.read_pages, in a module of `readers`. It takes the file's content and `asked`, and returns JSON
            with an object, in which `refused` says why it does not read the file.
        patience: how many times as long as its processor time it may take, with the processes that it starts.
    """
    module, _, called = function.partition(".")
    head = {"module": module, "function": called, "limits": [MAX_SECONDS, MAX_MEMORY], "asked": asked}
    too_slow = f"{name} takes longer than {MAX_SECONDS} s to read; split it or save it as text"
    try:
        # -P: the other files in the folder must not hide modules of the standard library.
        child = subprocess.run(
            [sys.executable, "-P", MAIN], input=json.dumps(head).encode() + b"\n" + data,
            capture_output=True, timeout=patience * MAX_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreadableSource(too_slow) from error
    if child.returncode == -signal.SIGXCPU:
        raise UnreadableSource(too_slow)
    if child.returncode:
        lines = child.stderr.decode(errors="replace").splitlines() or [""]
        reason = ADDRESS.sub("", lines[-1].partition(": ")[2] or lines[-1])
        if child.returncode < 0 or "MemoryError" in lines[-1]:
            reason = f"it is damaged, or needs more than {MAX_MEMORY >> 20} MiB of memory"
        raise UnreadableSource(f"{name} cannot be read as {Path(name).suffix[1:].upper() or 'PDF'}: {reason}")
    found: dict[str, Any] = json.loads(child.stdout)
    if "refused" in found:
        raise UnreadableSource(f"{name} {found['refused']}")
    return found
