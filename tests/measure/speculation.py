"""Benchmarks of speculative decoding with drafts of a given quality, for models without a trained drafter.

python -m tests.measure.speculation --shape qwen3-0.6b --dtype bfloat16 --rate 0.8 --num-speculative-tokens 4
python -m tests.measure.speculation --rate 0 --batch-size 16        # drafts that are never right, chosen adaptively

The answers of each round are recorded without drafts first. Then each request gets its answer as its prediction, in
which every token is replaced by another one with probability 1 - rate. The engines run in turn, and the texts must be
equal. A second engine without drafts shows how much two equal engines differ on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import ExitStack
from typing import Any

from app.bench.settings import add_engine_flags, as_settings, engine_settings, fit, read_model_config
from app.bench.spread import Spread, ratio
from app.bench.workload import add_number, make_random
from engine import LLM, SamplingParams


def corrupt(token_ids: list[int], rate: float, vocab_size: int, chance: random.Random) -> list[int]:
    """Replace each token by another one with probability 1 - rate."""
    return [
        token_id if chance.random() < rate else (token_id + chance.randrange(1, vocab_size)) % vocab_size
        for token_id in token_ids
    ]


def run_once(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, predictions: list[list[int]] | None
) -> tuple[float, list[list[int]]]:
    """Return the seconds and the answers."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, predictions=predictions)
    return time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the engines in turn. Returns the figures."""
    speculative = {
        "method": arguments.methods, "num_speculative_tokens": arguments.num_speculative_tokens,
        "adaptive": not arguments.fixed,
    }
    num, length = arguments.batch_size, arguments.input_len + arguments.output_len
    with engine_settings(arguments, enable_prefix_caching=False) as given, ExitStack() as stack:
        config = fit(given, num, num * (length + 32), length + 16)
        vocab_size = read_model_config(config)["vocab_size"]
        jobs = make_random(num, arguments.input_len, arguments.output_len, 0, vocab_size, 0)
        prompts = [list(job.prompt_token_ids) for job in jobs]
        engines = [
            stack.enter_context(LLM(**as_settings(config) | more))
            for more in ({}, {}, {"speculative_config": speculative})
        ]
        chance = random.Random(1)
        times: list[list[float]] = [[], [], []]
        for number in range(1 + arguments.num_iters):
            # Other answers in each round, since some sources learn from earlier ones.
            params = SamplingParams(
                temperature=arguments.temperature,
                seed=number,
                max_tokens=arguments.output_len,
                ignore_eos=True,
            )
            _, answers = run_once(engines[0], prompts, params, None)
            predictions = [corrupt(answer, arguments.rate, vocab_size, chance) for answer in answers]
            # The order alternates, so that no engine always follows the same one. The first round warms up.
            for at in (0, 1, 2) if number % 2 else (2, 1, 0):
                seconds, found = run_once(engines[at], prompts, params, predictions if at == 2 else None)
                if found != answers:
                    raise RuntimeError("drafts changed a text")
                if number:
                    times[at].append(seconds)
        sources = engines[2].stats().drafts
    speeds = [Spread(tuple(num * arguments.output_len / each for each in column)) for column in times]
    for at, name in ((1, "without drafts again"), (2, "with drafts")):
        over = f"over {ratio(speeds[at], speeds[0])!s}, best over best {min(times[0]) / min(times[at]):.3f}"
        print(f"without drafts {speeds[0]!s} tok/s; {name} {speeds[at]!s} tok/s; {over}")
    drafts = {name: [each.num_draft_tokens, sum(each.accepted_per_position)] for name, each in sources.items()}
    print("drafted and accepted:", json.dumps(drafts))
    return {"without_drafts_s": times[0], "control_s": times[1], "with_drafts_s": times[2], "drafts": drafts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_number(parser, "--rate", 0.8, 0, 1, "share of right tokens in the prediction")
    parser.add_argument("--methods", nargs="+", default=["prediction"], help="sources (prediction)")
    add_number(parser, "--num-speculative-tokens", 4, 1, 64, "most drafts of a step")
    parser.add_argument("--fixed", action="store_true", help="always draft as much as possible")
    add_number(parser, "--input-len", 64, 1, 10**6, "tokens of a prompt")
    add_number(parser, "--output-len", 96, 1, 10**6, "tokens of an answer")
    add_number(parser, "--batch-size", 1, 1, 4096, "requests at once")
    add_number(parser, "--temperature", 0.8, 0, 2, "sampling temperature")
    add_number(parser, "--num-iters", 5, 1, 1000, "rounds")
    add_engine_flags(parser)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
