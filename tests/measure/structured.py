"""Tokens per second with a schema on every row over free text, with and without forced drafts.

    python -m tests.measure.structured [--model PATH | --shape qwen3-0.6b] [--rows 1 4 16] [--tokens 96] [--pairs 5]

The runs alternate, so that a busy machine slows all alike; printed is the median of the ratios of neighbours.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from app.bench.shapes import SHAPES, write_shape
from app.bench.throughput import RECORDS
from engine import LLM, SamplingParams
from grammar import GrammarSpec

DEMO_MODEL = Path("assets/demo_model")
PROMPT = "List the animals of a zoo with their number, as JSON.\n"


def measure(llm: LLM, rows: int, tokens: int, grammar: GrammarSpec | None) -> float:
    """Return tokens per second."""
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.6, seed=seed, grammar=grammar)
        for seed in range(rows)
    ]
    start = time.perf_counter()
    outputs = llm.generate([PROMPT] * rows, params, use_tqdm=False)
    num_tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
    return num_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    settings = {"model": arguments.model, "max_num_seqs": max(arguments.rows), "max_model_len": 1024}
    schema = GrammarSpec.json_schema(RECORDS)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape:
            settings |= {
                "model": str(write_shape(arguments.shape, Path(folder))), "load_format": "dummy",
                "tokenizer": str(DEMO_MODEL),
            }  # fmt: skip
        plain, forced = LLM(**settings), LLM(**settings, speculative_config={"method": "forced"})
        for rows in arguments.rows:
            found: dict[str, list[float]] = {}
            for pair in range(-1, arguments.pairs):
                free = measure(plain, rows, arguments.tokens, None)
                ratios = {
                    "schema": measure(plain, rows, arguments.tokens, schema) / free,
                    "schema, forced drafts": measure(forced, rows, arguments.tokens, schema) / free,
                }
                for name, ratio in ratios.items():
                    found.setdefault(name, []).extend([ratio] * (pair >= 0))
            shown = ", ".join(f"{name} {statistics.median(ratios):.3f}" for name, ratios in found.items())
            print(f"{rows} rows: free text {free:.0f} tok/s; over it: {shown}", flush=True)


if __name__ == "__main__":
    main()
