"""The process that compiles for xgrammar_backend.py: started by path, killed when a compile takes too long.

Frames on stdin and stdout: 4 bytes of length, big endian, then JSON text; nothing is pickled. The first frame
in is {"tokenizer": ..., "max_memory_bytes": ..., "max_seconds": ...}; each further one a compile order, answered
by {"compiled": ...} or {"error": ...}. Imports nothing of ours, so that it starts without a package around it.

xgrammar imports torch, for masks on the device, and transformers, for the name of a type; compiling needs neither,
and importing them takes ten times as long as everything else. So stand-ins take their place here. Should a version
of xgrammar not put up with that, the process starts once more with the real ones (argument `whole`).
"""

import importlib
import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any, BinaryIO

WHOLE = "whole"


class StandIn(ModuleType):
    """A module that has every name, each a class that takes any arguments."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *values, **options: None})


def import_xgrammar() -> Any:
    """Return xgrammar, imported without torch and transformers where it lets us."""
    if WHOLE in sys.argv:
        return importlib.import_module("xgrammar")
    try:
        # Its foreign function layer asks whether torch is there, and gets by without.
        sys.modules["torch"] = None  # type: ignore[assignment]
        importlib.import_module("tvm_ffi")
        for name in ("torch", "transformers"):
            sys.modules[name] = StandIn(name)
        return importlib.import_module("xgrammar")
    except (ImportError, AttributeError, TypeError):
        os.execv(sys.executable, [sys.executable, "-P", __file__, WHOLE])


def read_frame(stream: BinaryIO) -> Any:
    """Return the next frame, None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(int.from_bytes(head, "big")))


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Send a frame."""
    data = json.dumps(value).encode()
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def compile_order(compiler: Any, order: dict[str, Any]) -> dict[str, str]:
    """Compile one grammar."""
    try:
        compiled = compiler.compile_grammar(order["text"])
    except RuntimeError as error:
        return {"error": str(error)}
    return {"compiled": compiled.serialize_json()}


def limit_memory(num_bytes: int) -> None:
    """Allow `num_bytes` of address space beyond what the imports took, where the system can say that."""
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


def main() -> None:
    """Answer orders until the other side closes the stream."""
    # Before the first frame is read: a process that starts once more would miss it.
    xgrammar = import_xgrammar()
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What libraries print must not get between the frames.
    os.dup2(2, 1)
    hello = read_frame(orders)
    if hello is None:
        return
    info = xgrammar.TokenizerInfo.deserialize_json(hello["tokenizer"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    limit_memory(hello["max_memory_bytes"])
    write_frame(answers, {"ready": True})
    while (order := read_frame(orders)) is not None:
        # Ends this process if it outlives a parent that could not kill it.
        signal.alarm(hello["max_seconds"])
        answer = compile_order(compiler, order)
        signal.alarm(0)
        write_frame(answers, answer)


if __name__ == "__main__":
    main()
