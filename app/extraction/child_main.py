"""A process that reads one file from stdin and writes JSON, with limits of its own; see child.py.

It imports nothing of the project, so that it starts fast. The first line of stdin is JSON, the rest the file.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import sys


def limit(max_seconds: int, max_bytes: int) -> None:
    """Limit this process: its processor time and memory, and its time in all if the server was killed."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    signal.alarm(10 * max_seconds)


if __name__ == "__main__":
    head = json.loads(sys.stdin.buffer.readline())
    read = runpy.run_path(head["path"])[head["function"]]
    limit(*head["limits"])
    json.dump(read(sys.stdin.buffer.read(), **head["asked"]), sys.stdout)
