"""`bench latency` beside llama.cpp: python -m tests.measure.llama_cpp.run --peer llama.cpp, and its flags.

It needs a prebuilt library (`library.INSTALL`) and the package gguf.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.bench.latency import add_arguments, measure_all
from app.bench.runners import DTYPES, PEERS, Runner, make_peer
from app.bench.settings import engine_settings
from app.config import UsageError
from engine import EngineConfig
from tests.measure.llama_cpp.runner import LlamaCppRunner

NAMES = ("llama.cpp", "llama.cpp-q4_k_m")


def make_any_peer(name: str, config: EngineConfig, num_threads: int) -> Runner:
    if name in NAMES:
        return LlamaCppRunner(config, num_threads, name.endswith("q4_k_m"))
    return make_peer(name, config, num_threads)


@contextmanager
def shared_weights(config: EngineConfig, peers: Sequence[str]) -> Iterator[EngineConfig]:
    """Prepare the configuration that all runners take; random weights become a checkpoint, as llama.cpp reads files."""
    if set(NAMES).isdisjoint(peers) or config.load_format != "dummy":
        yield config
        return
    if config.device == "cuda":
        raise UsageError("--peer llama.cpp runs on the CPU: give --device cpu")
    with TemporaryDirectory(prefix="troupe-bench-") as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        shape = AutoConfig.from_pretrained(config.model)
        dtype = DTYPES.get(config.dtype, torch.float32)
        AutoModelForCausalLM.from_config(shape, dtype=dtype).save_pretrained(folder)
        yield replace(config, model=folder, load_format="auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_arguments(parser, (*PEERS, *NAMES))
    arguments = parser.parse_args()
    with (
        engine_settings(arguments, enable_prefix_caching=False) as given,
        shared_weights(given, arguments.peer) as config,
    ):
        measure_all(arguments, config, make_any_peer)


if __name__ == "__main__":
    main()
