"""Runs the tests of the kernels in a process whose Triton interprets them on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.conftest import IS_INTERPRETED

ROOT = Path(__file__).resolve().parents[3]
# One process each, in any worker: much of a short file's time goes into the start.
GROUPS = [
    pytest.param(names, id=" ".join(names), marks=pytest.mark.xdist_group(names[0]))
    for names in (
        ("paged_attention", "lm_head", "lora"),
        ("cascade_attention", "elementwise", "states"),
        ("self_check", "sampling", "experts"),
    )
]


@pytest.mark.timeout(900)
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process that interprets")
@pytest.mark.parametrize("names", GROUPS)
def test_the_interpreter_agrees_with_the_references(names: tuple[str, ...]) -> None:
    paths = [f"tests/kernels/triton/test_{name}.py" for name in names]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=600", *paths],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " skipped" not in result.stdout.splitlines()[-1]
