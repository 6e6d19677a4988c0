"""Runs the tests of the kernels in a process whose Triton interprets them on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.conftest import IS_INTERPRETED

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("paged_attention", "self_check", "sampling", "experts", "states", "elementwise", "lora", "linear", "models")


@pytest.mark.timeout(900)
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process that interprets")
@pytest.mark.parametrize("chosen", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_the_interpreter_agrees_with_the_references(chosen: str) -> None:
    paths = [f"tests/kernels/triton/test_{name}.py" for name in NAMES]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=600", "-m", chosen, *paths],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " skipped" not in result.stdout.splitlines()[-1]
