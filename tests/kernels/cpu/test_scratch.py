"""What the pool of native ops holds after a step, as the process sees it, beside what was estimated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model import DecoderModel, ModelConfig, RopeConfig
from engine.worker.step_memory import StepMemory
from kernels.cpu.native_ops import NativeOps
from tests.engine.model.drive import Driver
from tests.kernels.cpu.conftest import require_library

NUM_TOKENS = 1000


def measure_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure_step(dtype: torch.dtype) -> tuple[int, int, int]:
    """By how many bytes a step made this process larger, its estimate, and the estimate without scratch."""
    ops = NativeOps(require_library(), num_threads=2).make_ops()
    config = ModelConfig("Qwen3ForCausalLM", 100, 512, 2048, 1, 8, 4, 64, 2048, RopeConfig())
    with torch.inference_mode():
        model = DecoderModel(config, dtype, torch.device("cpu"), ops).eval()
        for parameter in model.parameters():
            parameter.fill_(0.01)
        model.pack()
        driver = Driver(model)
        driver.step({"a": [1, 2]})
        before = measure_resident()
        driver.step({"b": [3] * NUM_TOKENS})
        grown = measure_resident() - before
    memory = StepMemory(config, dtype, NUM_TOKENS, 1, ops.estimate_scratch)
    without = StepMemory(config, dtype, NUM_TOKENS, 1, lambda _: 0)
    lengths = (NUM_TOKENS, NUM_TOKENS)
    return grown, memory.estimate_step(*lengths), without.estimate_step(*lengths)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.soak)])
def test_a_step_takes_no_more_than_was_estimated(dtype: torch.dtype) -> None:
    """In a new process: here the step could take memory that earlier tests had given back."""
    require_library()
    command = [sys.executable, "-m", __name__, str(dtype).removeprefix("torch.")]
    found = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, check=True).stdout
    grown, estimate, without_scratch = json.loads(found)
    assert 2**23 < grown <= estimate
    assert estimate > without_scratch + 2**24


if __name__ == "__main__":
    print(json.dumps(measure_step(getattr(torch, sys.argv[1]))))
