"""What the pool of native ops holds after a step, as the process sees it, beside what was estimated."""

import gc
from pathlib import Path

import pytest
import torch

from engine.model import DecoderModel, ModelConfig, RopeConfig
from engine.worker.step_memory import StepMemory
from kernels.cpu.native_ops import NativeOps
from tests.engine.model.drive import Driver

NUM_TOKENS = 1000


def measure_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_takes_no_more_than_was_estimated(native: NativeOps, dtype: torch.dtype) -> None:
    ops = native.make_ops()
    assert ops.estimate_scratch is not None
    config = ModelConfig("Qwen3ForCausalLM", 100, 512, 2048, 1, 8, 4, 64, 2048, RopeConfig())
    with torch.inference_mode():
        model = DecoderModel(config, dtype, torch.device("cpu"), ops).eval()
        for parameter in model.parameters():
            parameter.fill_(0.01)
        model.pack()
        driver = Driver(model)
        driver.step({"a": [1, 2]})
        gc.collect()  # nothing of other tests may be freed in between
        before = measure_resident()
        driver.step({"b": [3] * NUM_TOKENS})
        grown = measure_resident() - before
    memory = StepMemory(config, dtype, NUM_TOKENS, 1, ops.estimate_scratch)
    assert 2**24 < grown <= memory.estimate_step(NUM_TOKENS, NUM_TOKENS)
    assert (
        memory.estimate_step() > StepMemory(config, dtype, NUM_TOKENS, 1, lambda _: 0).estimate_step() + 2**24
    )
