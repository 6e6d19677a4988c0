"""Native libraries for the tests: built once per machine, for it and for older processors."""

import functools
import os
from pathlib import Path

import pytest

from kernels.cpu import NativeBuild, NativeLibrary, build
from kernels.cpu.build import read_cpu_flags
from kernels.cpu.native_ops import NativeOps
from tests.kernels.cpu.remote import RemoteLibrary

CPU_FLAGS = read_cpu_flags()
HAS_TILES = {"amx_tile", "amx_bf16", "amx_int8"} <= CPU_FLAGS
# What the code is compiled for -> a flag of the processor that can run it. The machine itself, then AVX2 alone, then
# AVX-512 without products of bfloat16 and int8. Each costs 10 s, so there is none that equals the machine itself.
ARCHITECTURES = {"native": "avx2"}
if "avx512f" in CPU_FLAGS:
    ARCHITECTURES["x86-64-v3"] = "avx2"
if {"avx512_vnni", "avx512_bf16"} & CPU_FLAGS:
    ARCHITECTURES["x86-64-v4"] = "avx512f"
# Where it is set, as to armv8-a, native ops are those of an emulated ARM: see `make test-arm`.
ARM = os.environ.get("NATIVE_ARM")
if ARM:
    ARCHITECTURES = {"native": "avx2"}
# The machine itself with AMX, whose instructions are loops where it has none; only products differ.
TILE_TWIN = "tile twin"


@functools.cache
def load_library(architecture: str) -> NativeLibrary | str:
    """The library, or the reason why there is none."""
    if ARM and architecture == "native":
        return RemoteLibrary(ARM)
    with pytest.MonkeyPatch.context() as patch:
        if architecture == TILE_TWIN:
            patch.setattr(build, "_FLAGS", (*build._FLAGS, "-DTROUPE_TILE_TWIN", f"-I{Path(__file__).parent}"))
        started = NativeBuild(architecture="native" if architecture == TILE_TWIN else architecture)
        started.start()
    return started.wait() or started.status


def require_library(architecture: str = "native") -> NativeLibrary:
    """The library; the test is skipped where there can be none."""
    if architecture == TILE_TWIN and HAS_TILES and "AMX" in require_library().isa_name:
        return require_library()
    if ARCHITECTURES.get(architecture, "avx2") not in CPU_FLAGS:
        pytest.skip(f"the processor does not run {architecture} code")
    library = load_library(architecture)
    if isinstance(library, str):
        assert "failed" not in library, library
        pytest.skip(f"native ops are {library}")
    return library


@pytest.fixture(params=ARCHITECTURES)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """Native ops on two threads, for each instruction set."""
    return NativeOps(require_library(request.param), num_threads=2)


@pytest.fixture(params=[*ARCHITECTURES, *([] if HAS_TILES else [TILE_TWIN])])
def product_ops(request: pytest.FixtureRequest) -> NativeOps:
    """Native ops on two threads, for each way to multiply matrices."""
    return NativeOps(require_library(request.param), num_threads=2)


@pytest.fixture
def native() -> NativeOps:
    """Native ops on two threads, for this machine."""
    return NativeOps(require_library(), num_threads=2)
