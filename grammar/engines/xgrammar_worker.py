"""The process that compiles one grammar for by_name.py: started by path, killed when it takes too long.

On stdin {"tokenizer": ..., "text": ..., "max_seconds": ..., "max_memory_bytes": ...}, on stdout {"compiled": ...} or
{"error": ...}. Imports nothing of ours, so that it starts without a package around it.

xgrammar imports torch, for masks on the device, and transformers, for the name of a type. Compiling needs neither, and
importing them takes ten times as long as everything else, so stand-ins take their place.
"""

import importlib
import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module that has every name, each a class that takes any arguments."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *values, **options: None})


def import_xgrammar() -> Any:
    """Return xgrammar, imported without torch and transformers."""
    # Its foreign function layer asks whether torch is there, and gets by without.
    sys.modules["torch"] = None  # type: ignore[assignment]
    importlib.import_module("tvm_ffi")
    for name in ("torch", "transformers"):
        sys.modules[name] = StandIn(name)
    return importlib.import_module("xgrammar")


def limit_memory(num_bytes: int) -> None:
    """Allow `num_bytes` of address space beyond what the imports took, where the system can say that."""
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


def main() -> None:
    xgrammar = import_xgrammar()
    answer = os.fdopen(os.dup(1), "w")
    # What libraries print must not get into the answer.
    os.dup2(2, 1)
    order = json.load(sys.stdin)
    info = xgrammar.TokenizerInfo.deserialize_json(order["tokenizer"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    limit_memory(order["max_memory_bytes"])
    # Ends this process: the time of the imports does not count, and its parent may be gone.
    signal.setitimer(signal.ITIMER_REAL, order["max_seconds"])
    try:
        json.dump({"compiled": compiler.compile_grammar(order["text"]).serialize_json()}, answer)
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            raise
        json.dump({"error": str(error)}, answer)
    answer.flush()


if __name__ == "__main__":
    main()
