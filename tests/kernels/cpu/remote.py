"""RemoteLibrary: native ops compiled for 64-bit ARM, run by qemu on this process's memory; see `remote.cpp`."""

import ctypes
import functools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu import NativeLibrary, build, library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Every processor of 64 bits; then one with products of bytes and bfloat16.
ARM_ARCHITECTURES = ("armv8-a", "armv8.6-a+dotprod+bf16+i8mm")
_REQUEST = struct.Struct("=32s12qfi")
_STARTED: list["subprocess.Popen[bytes]"] = []  # they end with their input, which is this process's
_MAPS = re.compile(r"^(7\w+)-(\w+) (?!.*\[)", re.MULTILINE)


def compile_arm(sources: list[Path], name: str, *flags: str) -> Path:
    """The compiled program or library, kept beside the libraries of this machine; skips without a cross compiler."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} found")
    compiler = build.NativeBuild()
    command = [COMPILER, *flags]
    target = build._default_cache() / f"{compiler._hash([*command, *(path.read_text() for path in sources)])}-{name}"
    build._make_private(target.parent)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            out = Path(folder) / name
            build._compile([*command, *map(str, sources), "-o", str(out)])
            out.replace(target)
    return target


def find_top(pid: int | str) -> tuple[int, int]:
    """The lowest and highest address of the libraries of a process and of what it has mapped."""
    found = _MAPS.findall(Path(f"/proc/{pid}/maps").read_text())
    return int(found[0][0], 16), int(found[-1][1], 16)


class RemoteLibrary(NativeLibrary):
    """The functions of a library, each called in the emulator."""

    def __init__(self, architecture: str) -> None:
        self.path = compile_arm(sorted(build.SOURCES.glob("*.cpp")), "arm.so", *build._FLAGS, f"-march={architecture}")
        self._watch_lock, self._call_lock = threading.Lock(), threading.Lock()
        self._process = self._start(compile_arm([Path(__file__).with_suffix(".cpp")], "remote", "-O2"))
        self._functions: dict[str, Any] = {}
        for name, (result, types) in library.SIGNATURES.items():
            raw = [c if issubclass(c, ctypes._SimpleCData) else ctypes.c_void_p for c in types]
            function = ctypes.CFUNCTYPE(result, *raw)(functools.partial(self._call, name))
            function.argtypes = types
            self._functions[name] = function

    def _start(self, program: Path) -> "subprocess.Popen[bytes]":
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # other processes may read this one's memory
        command = [EMULATOR, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", program, self.path, str(os.getpid())]
        for _ in range(100):
            # The emulator's own memory must lie where this process has none: above all of it, which grows downwards.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            self._send(process, "troupe_isa", (), 0)
            if find_top(process.pid)[0] > find_top("self")[1]:
                _STARTED.append(process)
                return process
            with process:
                process.kill()
        pytest.skip("the emulator's memory lies below this process's each time")

    def _call(self, name: str, *arguments: Any) -> int:
        number = next((each for each in arguments if isinstance(each, float)), 0.0)
        integers = [each or 0 for each in arguments if not isinstance(each, float)]
        with self._call_lock:
            return self._send(self._process, f"troupe_{name}", integers, number)

    @staticmethod
    def _send(process: "subprocess.Popen[bytes]", name: str, integers: Any, number: float) -> int:
        assert process.stdin and process.stdout
        process.stdin.write(_REQUEST.pack(name.encode(), *integers, *[0] * (12 - len(integers)), number, 0))
        answer = process.stdout.read(8)
        if len(answer) != 8:
            sys.exit("the emulator has ended")
        return int.from_bytes(answer, sys.byteorder, signed=True)
