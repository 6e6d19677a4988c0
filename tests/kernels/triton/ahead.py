"""Ahead-of-time compilation of the kernels for a GPU that is not there, and what the result is made of."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one architecture."""

    ttir: str
    ptx: str
    cubin: bytes
    num_registers: int
    stack_bytes: int
    shared_bytes: int

    def count(self, pattern: str) -> int:
        """How many instructions of the machine code match; to take it apart costs half a second, once."""
        return len(re.findall(pattern, _dump(self.cubin, "--dump-sass")))


def compile_for(
    arch: int, kernel: Any, arguments: dict[str, str], constants: dict[str, Any], **options: int
) -> Compiled:
    """Compile a kernel for sm_<arch>.

    Args:
        arguments: type of each argument, as "*bf16" or "i32"; "i32:16" is one that 16 divides. Pointers are
            aligned.
        constants: the arguments in capitals.
        options: num_warps and num_stages.
    """
    names = kernel.arg_names
    signature = {name: arguments[name].split(":")[0] if name in arguments else "constexpr" for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if arguments.get(name, "").startswith("*") or arguments.get(name, "").endswith(":16")
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = built.asm["cubin"]
    usage = _dump(cubin, "--dump-resource-usage")
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    ttir, ptx = str(built.asm["ttir"]), built.asm["ptx"]
    return Compiled(ttir, ptx, cubin, numbers["REG"], numbers["STACK"], built.metadata.shared)


@cache
def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", what, file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
