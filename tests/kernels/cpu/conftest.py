"""Native libraries for the tests: built once per machine, for it and for older processors."""

import functools

import pytest

from kernels.cpu import NativeBuild, NativeLibrary, build
from kernels.cpu.build import read_cpu_flags
from kernels.cpu.native_ops import NativeOps

# What the code is compiled for -> a flag of the processor that can run it. The machine itself, then AVX2 alone, then
# AVX-512 without products of bfloat16 and int8.
ARCHITECTURES = {"native": "avx2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
# The machine itself with AMX, whose instructions are loops; only products differ.
TILE_TWIN = "tile twin"


@functools.cache
def load_library(architecture: str) -> NativeLibrary | str:
    """The library, or the reason why there is none."""
    with pytest.MonkeyPatch.context() as patch:
        if architecture == TILE_TWIN:
            patch.setattr(build, "_FLAGS", (*build._FLAGS, "-DTROUPE_TILE_TWIN"))
        started = NativeBuild(architecture="native" if architecture == TILE_TWIN else architecture)
        started.start()
    return started.wait() or started.status


def require_library(architecture: str = "native") -> NativeLibrary:
    """The library; the test is skipped where there can be none."""
    if ARCHITECTURES.get(architecture, "avx2") not in read_cpu_flags():
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


@pytest.fixture(params=[*ARCHITECTURES, TILE_TWIN])
def product_ops(request: pytest.FixtureRequest) -> NativeOps:
    """Native ops on two threads, for each way to multiply matrices."""
    return NativeOps(require_library(request.param), num_threads=2)


@pytest.fixture
def native() -> NativeOps:
    """Native ops on two threads, for this machine."""
    return NativeOps(require_library(), num_threads=2)
