"""The process that compiles for xgrammar_backend.py: started by path, killed when a compile takes too long.

Frames on stdin and stdout: 4 bytes of length, big endian, then JSON text; nothing is pickled. The first frame
in is {"tokenizer": ..., "max_memory_bytes": ..., "max_seconds": ...}; each further one a compile order, answered
by {"compiled": ...} or {"error": ...}. Imports nothing of ours, so that it starts without a package around it.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

import xgrammar


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
        if order["kind"] == "ebnf":
            compiled = compiler.compile_grammar(order["text"])
        else:
            separators = order["separators"]
            compiled = compiler.compile_json_schema(
                order["text"],
                any_whitespace=separators is None,
                separators=None if separators is None else tuple(separators),
                max_whitespace_cnt=order["max_whitespace"],
                strict_mode=False,
            )
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
