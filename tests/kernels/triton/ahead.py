"""Ahead-of-time compilation of the kernels for a GPU that is not there, and what the result is made of."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
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
    sass: str
    num_registers: int
    stack_bytes: int
    shared_bytes: int

    def count(self, pattern: str) -> int:
        """How many instructions of the machine code match."""
        return len(re.findall(pattern, self.sass))


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
    return _inspect(str(built.asm["ttir"]), built.asm["ptx"], built.asm["cubin"], built.metadata.shared)


def _inspect(ttir: str, ptx: str, cubin: bytes, shared_bytes: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", "--dump-sass", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", dump)}
    return Compiled(ttir, ptx, dump, numbers["REG"], numbers["STACK"], shared_bytes)
