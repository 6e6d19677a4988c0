"""Compares the outputs of every method with those without drafts, on the demo model, its companions and random models.

`python -m tests.engine.spec.compare_methods --num-requests 500`: requests of every kind side by side in a small cache,
with preemptions and with aborts of other requests. Prints the number of differences per method, and the acceptance.
"""

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from engine import Engine, EngineConfig, SamplingParams
from engine.config_fields import DEMO_MODEL
from tests.engine.mixed_requests import TIGHT, Completion, MixedRequest, make_mixed_requests, run_mixed
from tests.engine.spec.mtp_folders import FAMILIES as MTP_FAMILIES
from tests.engine.spec.mtp_folders import write_mtp_folder
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.kernels.cpu.conftest import require_library

VOCAB_SIZE = 3072
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "forced": {"method": "forced"},
    "draft_model": {"method": "draft_model", "model": f"{DEMO_MODEL}/draft", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "model": f"{DEMO_MODEL}/eagle", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "all": {"method": ["ngram", "suffix", "eagle"], "model": f"{DEMO_MODEL}/eagle", "adaptive": True},
}


async def run(method: dict[str, Any] | str, requests: list[MixedRequest], **more: Any) -> tuple[Any, Any]:
    """Return the completions of all requests, and the engine's statistics."""
    speculative: Any = method if isinstance(method, str) else {"adaptive": False, **method}
    config = EngineConfig(**{**TIGHT, "num_threads": 1, **more}, speculative_config=speculative)
    async with Engine(config) as engine:
        disturber = asyncio.create_task(disturb(engine))
        found = await run_mixed(engine, requests)
        disturber.cancel()
        await asyncio.gather(disturber, return_exceptions=True)
        stats = engine.stats()
    return found, stats


async def disturb(engine: Engine) -> None:
    """Start other requests and abort them after a few tokens."""
    for number in range(10_000):
        params = SamplingParams(max_tokens=60, seed=number, output_kind="delta")
        async for _ in engine.generate([5 + number % 90] * 40, params, f"other-{number}", priority=number % 3):
            if number % 3:
                break
        await asyncio.sleep(0.01)


def count_differences(expected: list[list[Completion]], found: list[list[Completion]]) -> int:
    return sum(one != other for one, other in zip(expected, found, strict=True))


def make_mtp_folder(family: str, folder: Path) -> str:
    """Write a random model with a layer that predicts, and a tokenizer."""
    make_byte_level_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("</s>")
    write_mtp_folder(family, folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end)
    return str(folder)


async def compare(names: list[str], requests: list[MixedRequest], **more: Any) -> None:
    """Print the figures of each method with one model."""
    expected, stats = await run("off", requests, **more)
    print(json.dumps({"method": "none", "steps": stats.num_steps, "preemptions": stats.num_preemptions}), flush=True)
    for name in names:
        found, stats = await run(METHODS[name], requests, **more)
        figures = {
            "method": name,
            "different": count_differences(expected, found),
            "steps": stats.num_steps,
            "preemptions": stats.num_preemptions,
            "drafts": {
                source: [counts.num_draft_tokens, sum(counts.accepted_per_position)]
                for source, counts in stats.drafts.items()
            },
        }
        print(json.dumps(figures | more), flush=True)


async def main(num_requests: int, names: list[str]) -> None:
    require_library()  # other ops would run until it is built, with other bits
    if others := [name for name in names if name != "mtp"]:
        await compare(others, make_mixed_requests(0, VOCAB_SIZE, num_requests))
    for family in MTP_FAMILIES if "mtp" in names else ():
        with TemporaryDirectory() as folder:
            model = make_mtp_folder(family, Path(folder))
            await compare(["mtp"], make_mixed_requests(num_requests=num_requests), model=model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    asyncio.run(main(arguments.num_requests, arguments.methods))
