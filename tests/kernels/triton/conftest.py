"""Where the kernels run: on a CUDA device, or on the CPU in a process whose Triton interprets.

Triton decides when it is imported whether it interprets, so a process does one or the other. `test_interpreter`
starts the process that interprets and runs these same tests there.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


if IS_INTERPRETED:
    # A GPU computes with infinities in silence; numpy, which interprets, warns.
    np.seterr(all="ignore")


@pytest.fixture
def device() -> torch.device:
    if IS_INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip(
            "needs a CUDA device; on the CPU test_interpreter.py runs this test in a process of its own"
        )
    return torch.device("cuda")
