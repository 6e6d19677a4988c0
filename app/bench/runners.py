"""Runners: engines for the same offline work, ours and other projects'."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.bench.workload import Job, find_lengths
from engine import LLM, EngineConfig, LoRARequest, SamplingParams
from grammar import GrammarSpec

PEERS = ("transformers",)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # "auto" on CPU: float32


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
        self, settings: dict[str, Any], grammar: GrammarSpec | None = None, temperature: float = 0.0,
        adapters: Sequence[LoRARequest] = (),
    ) -> None:
        self.llm = LLM(**settings)
        self._adapters = adapters  # requests use them in turn
        self._params = SamplingParams(temperature=temperature, ignore_eos=True, seed=0, grammar=grammar)

    def run(self, jobs: Sequence[Job]) -> float:
        """See `Runner.run`."""
        params = [replace(self._params, max_tokens=job.max_tokens) for job in jobs]
        start = time.perf_counter()
        chosen = [self._adapters[at % len(self._adapters)] if self._adapters else None for at in range(len(jobs))]
        prompts = [job.prompt_token_ids for job in jobs]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
        spent = time.perf_counter() - start
        for job, output in zip(jobs, outputs, strict=True):
            num_tokens = len(output.outputs[0].token_ids)
            if num_tokens != job.max_tokens:
                raise RuntimeError(f"an answer has {num_tokens} tokens instead of {job.max_tokens}")
        return spent

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
            )
            spent = time.perf_counter() - start
        finally:
            torch.set_num_threads(before)
        assert out.shape[1] == ids.shape[1] + num_tokens, "transformers stopped early"
        return spent

    def close(self) -> None:
        """As `Runner.close`."""
        del self.model


def make_peer(name: str, config: EngineConfig, num_threads: int) -> Runner:
    """Load the peer of that name, of PEERS, with the model of `config`."""
    assert name in PEERS, "the flag has checked the name"
    return TransformersRunner(config, num_threads)
