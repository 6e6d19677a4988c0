"""The parts that run a whole engine: `python -m tests.measure.gpu_day.parts nano-14b --json FILE`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app.bench.runners import TroupeRunner
from app.bench.shapes import SHAPES, Json
from app.bench.throughput import RECORDS
from app.bench.workload import Job, count_tokens, make_nano, make_random
from engine import LLM, SamplingParams
from engine.device.cuda_link import CudaLink
from grammar import GrammarSpec
from tests.engine.model.drive import make_prompt, make_transformers_model
from tests.measure.roofline import Footprint

DEMO_MODEL = Path(__file__).resolve().parents[3] / "assets" / "demo_model"
FAMILIES = ("llama", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
TEMPERATURE = 0.6
RECORDING_S = 20.0
LOGIT_BYTES = 8  # a float32 written and read
# Measured on one H200: bytes a second of a copy, operations a second of a bfloat16 product.
H200 = (4.3e12, 790e12)
SMOKE_SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 3200, "dtype": "float32",
}  # fmt: skip


def await_graphs(runner: TroupeRunner) -> None:
    """Wait until the idle engine has recorded its graphs, up to a time limit."""
    deadline = time.monotonic() + RECORDING_S
    while runner.llm.describe_runtime().get("num_graphs_left", 0) and time.monotonic() < deadline:
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Setup:
    """Device and size of the work of a part."""

    folder: Path  # for the configs of models
    is_smoke: bool

    def pick(self, full: int, smoke: int) -> int:
        """Return the full or the smoke size of the work."""
        return smoke if self.is_smoke else full

    def shape(self, name: str) -> Json:
        """Return the config of a model's shape, or of a tiny model for a smoke run."""
        return SHAPES[name] | (SMOKE_SHAPE if self.is_smoke else {})

    def settings(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return the settings of an engine with random weights of a shape."""
        target = self.folder / name
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps(self.shape(name)), encoding="utf-8")
        settings: dict[str, Any] = {
            "model": str(target), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2176,
            "max_num_seqs": 256, "max_num_batched_tokens": 8192, "device": "cuda", "attention_backend": "triton",
        }  # fmt: skip
        if self.is_smoke:
            settings |= {"device": "cpu", "attention_backend": "sdpa", "num_blocks": 600, "max_num_seqs": 8}
            settings |= {"max_model_len": 256, "enable_native_ops": False}
        return settings | changes


@contextmanager
def warm_runner(
    settings: dict[str, Any], jobs: list[Job], grammar: GrammarSpec | None = None
) -> Iterator[TroupeRunner]:
    """Yield an engine that has run the jobs and recorded all its graphs."""
    runner = TroupeRunner(settings, grammar, TEMPERATURE)
    try:
        runner.run(jobs)
        await_graphs(runner)
        yield runner
    finally:
        runner.close()


def run_work(settings: dict[str, Any], jobs: list[Job], grammar: GrammarSpec | None = None) -> float:
    """Return the seconds of the work on a warm engine."""
    shorter = [Job(job.prompt_token_ids, max(2, job.max_tokens // 8)) for job in jobs]
    with warm_runner(settings, shorter, grammar) as runner:
        return runner.run(jobs)


def measure_nano(setup: Setup, shape: str) -> Json:
    """Measure the small engines' work: output tokens a second, and their share of the device's limit."""
    config = setup.shape(shape)
    jobs = make_nano(0.02 if setup.is_smoke else 1.0, config["vocab_size"])[: setup.pick(256, 6)]
    seconds = run_work(setup.settings(shape), jobs)
    rate = count_tokens(jobs)[1] / seconds
    measured = compute_ceiling(config, jobs, *measure_rates(setup))
    h200 = compute_ceiling(config, jobs, *H200)
    return {
        "seconds": seconds, "tokens_per_s": rate, "measured_ceiling": measured,
        "share_of_measured_ceiling": rate / measured, "h200_ceiling": h200, "share_of_h200_ceiling": rate / h200,
    }


def measure_rates(setup: Setup) -> tuple[float, float]:
    """Measure bytes a second of a copy and operations a second of a product on this device."""
    device = "cpu" if setup.is_smoke else "cuda"
    source = torch.ones(setup.pick(2**28, 2**16), device=device)
    matrix = torch.ones(setup.pick(8192, 64), setup.pick(8192, 64), device=device)
    if not setup.is_smoke:
        matrix = matrix.bfloat16()
    target = torch.empty_like(source)
    copy = _time(lambda: target.copy_(source))
    product = _time(lambda: matrix @ matrix)
    return 2 * source.numel() * 4 / copy, 2 * matrix.shape[0] ** 3 / product


def _time(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def measure_single(setup: Setup) -> Json:
    """Measure milliseconds per token of a single request; two lengths cancel the prefill."""
    found = {}
    for shape in ("qwen3-0.6b", "qwen3-8b"):
        prompt = [7] * setup.pick(128, 8)
        short, long = setup.pick(64, 4), setup.pick(320, 12)
        with warm_runner(setup.settings(shape), [Job(prompt, long)]) as runner:
            times = [min(runner.run([Job(prompt, size)]) for _ in range(3)) for size in (short, long)]
        found[shape] = (times[1] - times[0]) / (long - short) * 1e3
    return {"ms_per_token": found}


def measure_switches(setup: Setup) -> Json:
    """Measure the same work with graphs and overlap, and without either."""
    jobs = make_random(setup.pick(64, 3), setup.pick(128, 6), setup.pick(256, 6), 0.0, 1000, 0)
    variants: dict[str, dict[str, Any]] = {
        "all on": {}, "no graphs": {"enable_cuda_graphs": False}, "no overlap": {"enable_overlap": False},
        "neither": {"enable_cuda_graphs": False, "enable_overlap": False},
    }
    num_out = count_tokens(jobs)[1]
    settings = {name: setup.settings("qwen3-0.6b", **changes) for name, changes in variants.items()}
    return {"tokens_per_s": {name: num_out / run_work(each, jobs) for name, each in settings.items()}}


def measure_structured(setup: Setup) -> Json:
    """Measure a JSON schema on every row against free text; the demo model's tokenizer replaces the shape's."""
    tokenizer = {"tokenizer": str(DEMO_MODEL), "skip_tokenizer_init": False}
    jobs = make_random(setup.pick(128, 3), setup.pick(128, 6), setup.pick(256, 8), 0.0, 1000, 0)
    settings = setup.settings("qwen3-0.6b", **tokenizer)
    num_out = count_tokens(jobs)[1]
    free = num_out / run_work(settings, jobs)
    structured = num_out / run_work(settings, jobs, GrammarSpec.json_schema(RECORDS))
    return {
        "free_tokens_per_s": free, "structured_tokens_per_s": structured, "structured_over_free": structured / free,
    }


def check_syncs(setup: Setup) -> Json:
    """Run prefill, decode, sampling and filters under torch's check for waits in the launch section."""
    jobs = make_random(setup.pick(40, 3), setup.pick(200, 6), setup.pick(40, 6), 0.5, 1000, 0)
    CudaLink.checks_syncs = not setup.is_smoke
    run_work(setup.settings("qwen3-0.6b", core="local"), jobs)
    return {"verdict": "not checked on a CPU" if setup.is_smoke else "no launch waits for the device"}


def compare_families(setup: Setup) -> Json:
    """Compare the logprobs of greedy tokens with those of transformers on the device, of tiny models in float32.

    Raises:
        RuntimeError: one differs by more than sums in another order do.
    """
    found = {}
    for family in FAMILIES[: setup.pick(len(FAMILIES), 1)]:
        reference = make_transformers_model(family)
        folder = setup.folder / family
        reference.save_pretrained(folder)
        device = "cpu" if setup.is_smoke else "cuda"
        own = {"model": str(folder), "load_format": "auto", "dtype": "float32", "max_model_len": 256}
        settings = setup.settings("qwen3-0.6b", **own)
        with LLM(**settings) as llm:
            params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": make_prompt(70)}], params, use_tqdm=False)
        ids, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert logprobs is not None, "asked for"
        ours = torch.tensor([each[token].logprob for each, token in zip(logprobs, ids, strict=True)])
        tokens = torch.tensor([[*make_prompt(70), *ids]], device=device)
        with torch.inference_mode():
            logits = reference.to(device)(tokens).logits[0, -len(ids) - 1 : -1].float().log_softmax(-1).cpu()
        found[family] = float((ours - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]).abs().max())
        if not found[family] < 1e-2:
            raise RuntimeError(f"{family}: logprobs differ by {found[family]:.3g}")
    return {"largest_difference": found}


def run_tests(setup: Setup) -> Json:
    """Run the tests that need a device."""
    chosen = ["tests/kernels/triton/test_self_check.py"] if setup.is_smoke else ["tests/kernels", "tests/engine"]
    only = ["-k", "right_kernels_stay"] if setup.is_smoke else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "--tb=line", *chosen, *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:])
    return {"verdict": done.stdout.splitlines()[-1].strip("= ")}


def compute_ceiling(
    config: Json, jobs: Sequence[Job], bytes_per_s: float, flops_per_s: float, value_bytes: int = 2
) -> float:
    """Output tokens a second that no engine can exceed, from what was measured of memory and products.

    A prefill computes; a decode step reads all weights and every running request's keys and values, and writes and
    reads the logits. All requests start together and leave when they are done.

    Args:
        config: the model's config.json.
        value_bytes: of a weight and of an element of the cache.
    """
    footprint = Footprint.from_config(config)
    vocab_weights = config["vocab_size"] * config["hidden_size"]
    seconds = 0.0
    for job in jobs:
        length = len(job.prompt_token_ids)
        attended = 2 * footprint.num_layers * footprint.attention_width * length**2
        products = 2 * (footprint.num_weights - vocab_weights) * length + 2 * vocab_weights
        seconds += (products + attended) / flops_per_s
    for step in range(1, max(job.max_tokens for job in jobs)):
        contexts = [len(job.prompt_token_ids) + step for job in jobs if job.max_tokens > step]
        size = footprint.step_bytes(1, sum(contexts), value_bytes, value_bytes)
        size += len(contexts) * config["vocab_size"] * LOGIT_BYTES
        flops = 2 * footprint.num_weights * len(contexts)
        seconds += max(size / bytes_per_s, flops / flops_per_s)
    return sum(job.max_tokens for job in jobs) / seconds


def measure_idle(setup: Setup) -> Json:
    """Profile a warm run: the largest gap of each step is the one between two forward passes."""
    jobs = make_random(setup.pick(32, 3), setup.pick(64, 4), setup.pick(300, 8), 0.0, 1000, 0)
    has_device = torch.cuda.is_available()
    with warm_runner(setup.settings("qwen3-0.6b"), jobs) as runner:
        before = runner.llm.stats().num_steps
        kinds = [ProfilerActivity.CUDA] if has_device else [ProfilerActivity.CPU]
        with profile(activities=kinds) as profiler:
            runner.run(jobs)
        num_steps = runner.llm.stats().num_steps - before
    if not has_device:
        return {"num_steps": num_steps, "verdict": "no device whose idle time could be measured"}
    busy = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    gaps = find_gaps(busy)[:num_steps]
    gap = median(gaps) if gaps else 0.0
    return {
        "num_steps": num_steps,
        "median_gap_us": gap,
        "idle_share": sum(gaps) / (max(end for _, end in busy) - min(start for start, _ in busy)),
        "verdict": f"median gap between forward passes {gap:.0f} us over {num_steps} steps of {len(jobs)} rows",
    }


def find_gaps(busy: list[tuple[float, float]]) -> list[float]:
    """Times in which no interval runs, longest first."""
    gaps, end = [], float("inf")
    for start, stop in sorted(busy):
        if start > end:
            gaps.append(start - end)
        end = max(end, stop) if end != float("inf") else stop
    return sorted(gaps, reverse=True)


PARTS: dict[str, Callable[[Setup], Json]] = {
    "tests": run_tests, "families": compare_families, "syncs": check_syncs,
    "nano-0.6b": partial(measure_nano, shape="qwen3-0.6b"), "nano-14b": partial(measure_nano, shape="qwen3-14b"),
    "single": measure_single, "switches": measure_switches, "idle": measure_idle, "structured": measure_structured,
}


def main() -> int:
    """Write the part's figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="troupe-gpu-") as folder:
        figures = PARTS[arguments.part](Setup(Path(folder), arguments.smoke))
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
