"""A process that reads one file from stdin and writes JSON, with limits of its own; see `app.extraction.child`.

It imports this folder, and for mails `decoding.py` beside it, so that it starts fast. The first line of stdin is JSON,
the rest the file.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path


def limit(max_seconds: int, max_bytes: int) -> None:
    """Limit this process: its processor time and memory, and its time in all if the server was killed."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    signal.alarm(10 * max_seconds)


if __name__ == "__main__":
    head = json.loads(sys.stdin.buffer.readline())
    sys.path.append(str(Path(__file__).parents[1]))  # last: modules of the standard library have names of its files
    read = getattr(importlib.import_module(f"readers.{head['module']}"), head["function"])
    limit(*head["limits"])
    json.dump(read(sys.stdin.buffer.read(), **head["asked"]), sys.stdout)
