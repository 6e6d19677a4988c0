"""Runners: engines for the same offline work, ours and other projects'."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.bench.llama_cpp_library import INSTALL
from app.bench.workload import Job, find_lengths
from app.config import UsageError
from engine import LLM, EngineConfig, LoRARequest, SamplingParams
from grammar import GrammarSpec

PEERS = ("transformers", "llama.cpp", "llama.cpp-q4_k_m")
RECORDING_S = 20.0
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # "auto" on CPU: float32


class Runner(Protocol):
    """An engine with a loaded model."""

    name: str

    def run(self, jobs: Sequence[Job]) -> float:
        """Run all jobs to the last token, and return the seconds."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class TroupeRunner:
    """Our engine, through `LLM.generate`."""

    name = "troupe"

    def __init__(
        self,
        settings: dict[str, Any],
        grammar: GrammarSpec | None = None,
        temperature: float = 0.0,
        adapters: Sequence[LoRARequest] = (),
    ) -> None:
        self.llm = LLM(**settings)
        self._adapters = adapters  # requests use them in turn
        self._params = SamplingParams(temperature=temperature, ignore_eos=True, seed=0, grammar=grammar)

    def run(self, jobs: Sequence[Job]) -> float:
        """See `Runner.run`."""
        params = [replace(self._params, max_tokens=job.max_tokens) for job in jobs]
        start = time.perf_counter()
        chosen = [
            self._adapters[at % len(self._adapters)] if self._adapters else None for at in range(len(jobs))
        ]
        prompts = [job.prompt_token_ids for job in jobs]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
        spent = time.perf_counter() - start
        for job, output in zip(jobs, outputs, strict=True):
            num_tokens = len(output.outputs[0].token_ids)
            if num_tokens != job.max_tokens:
                raise RuntimeError(f"an answer has {num_tokens} tokens instead of {job.max_tokens}")
        return spent

    def await_graphs(self) -> None:
        """Wait until the idle engine has recorded its graphs, up to a time limit."""
        deadline = time.monotonic() + RECORDING_S
        while self.llm.describe_runtime().get("num_graphs_left", 0) and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        """As `Runner.close`."""
        self.llm.close()


class TransformersRunner:
    """`generate` of transformers on one batch."""

    name = "transformers"

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        self._num_threads = num_threads
        dtype = DTYPES.get(config.dtype, torch.float32)
        device = "cuda" if config.device == "cuda" else "cpu"
        if config.load_format == "dummy":
            shape = AutoConfig.from_pretrained(config.model)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
            model.to(device)  # type: ignore[arg-type]  # its wrapper hides the signature
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> float:
        """See `Runner.run`; all prompts and all answers must have the same length."""
        _, num_tokens = find_lengths(jobs, self.name)
        ids = torch.tensor([job.prompt_token_ids for job in jobs], device=self.model.device)
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            start = time.perf_counter()
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=num_tokens,
                max_new_tokens=num_tokens, pad_token_id=0,
            )  # fmt: skip
            spent = time.perf_counter() - start
        finally:
            torch.set_num_threads(before)
        assert out.shape[1] == ids.shape[1] + num_tokens, "transformers stopped early"
        return spent

    def close(self) -> None:
        """As `Runner.close`."""
        del self.model


def make_peer(name: str, config: EngineConfig, num_threads: int) -> Runner:
    """Load a peer with the model of `config`.

    Raises:
        UsageError: the peer is not installed, or cannot run this model.
    """
    if name == "transformers":
        return TransformersRunner(config, num_threads)
    runner: Runner = _import_llama_cpp().LlamaCppRunner(config, num_threads, name.endswith("q4_k_m"))
    return runner


@contextmanager
def shared_weights(config: EngineConfig, peers: Sequence[str]) -> Iterator[EngineConfig]:
    """Prepare the configuration that all runners take; random weights become a checkpoint for peers that read files.

    Raises:
        UsageError: a peer is not installed, or runs elsewhere than on the CPU.
    """
    if set(peers) <= {"transformers"}:
        yield config
        return
    _import_llama_cpp()
    if config.device == "cuda":
        raise UsageError("--peer llama.cpp runs on the CPU: give --device cpu")
    if config.load_format != "dummy":
        yield config
        return
    with TemporaryDirectory(prefix="troupe-bench-") as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        shape = AutoConfig.from_pretrained(config.model)
        dtype = DTYPES.get(config.dtype, torch.float32)
        AutoModelForCausalLM.from_config(shape, dtype=dtype).save_pretrained(folder)
        yield replace(config, model=folder, load_format="auto")


def _import_llama_cpp() -> Any:
    """Import its runner by name: it needs an optional package and a library."""
    try:
        return importlib.import_module("app.bench.llama_cpp_runner")
    except (ImportError, OSError) as error:
        raise UsageError(
            f"--peer llama.cpp needs what is not here ({error}): pip install gguf; {INSTALL}"
        ) from error
