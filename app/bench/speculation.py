"""Benchmarks of speculative decoding with drafts of a given quality, for models without a trained drafter.

python -m app.bench.speculation --shape qwen3-0.6b --dtype bfloat16 --rate 0.8 --num-speculative-tokens 4
python -m app.bench.speculation --rate 0 --batch-size 16        # drafts that are never right, chosen adaptively

The answers are recorded without drafts first. Then each request gets its answer as its prediction, in which every token
is replaced by another one with probability 1 - rate. Both engines run in turn, and the texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from app.bench.settings import add_engine_flags, as_settings, engine_settings, fit, read_model_config
from app.bench.spread import Spread, ratio
from app.bench.workload import make_random
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
    """Run both engines in turn. Returns the figures."""
    speculative = {
        "method": arguments.methods,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "adaptive": not arguments.fixed,
    }
    num, length = arguments.batch_size, arguments.input_len + arguments.output_len
    with engine_settings(arguments, enable_prefix_caching=False) as given:
        config = fit(given, num, num * (length + 32), length + 16)
        vocab_size = read_model_config(config)["vocab_size"]
        jobs = make_random(num, arguments.input_len, arguments.output_len, 0, vocab_size, 0)
        prompts = [list(job.prompt_token_ids) for job in jobs]
        params = SamplingParams(
            temperature=arguments.temperature, seed=7, max_tokens=arguments.output_len, ignore_eos=True
        )
        plain = LLM(**as_settings(config))
        drafting = LLM(**(as_settings(config) | {"speculative_config": speculative}))
        try:
            _, answers = run_once(plain, prompts, params, None)
            chance = random.Random(1)
            predictions = [corrupt(answer, arguments.rate, vocab_size, chance) for answer in answers]
            run_once(drafting, prompts, params, predictions)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(arguments.num_iters):
                times[0].append(run_once(plain, prompts, params, None)[0])
                seconds, found = run_once(drafting, prompts, params, predictions)
                times[1].append(seconds)
                if found != answers:
                    raise RuntimeError("drafts changed a text")
            sources = drafting.stats().drafts
        finally:
            plain.close()
            drafting.close()
    speeds = [Spread(tuple(num * arguments.output_len / each for each in column)) for column in times]
    over = f"over {ratio(speeds[1], speeds[0])!s}, best over best {min(times[0]) / min(times[1]):.3f}"
    print(f"without drafts {speeds[0]!s} tok/s; with drafts {speeds[1]!s} tok/s; {over}")
    drafts = {
        name: [each.num_draft_tokens, sum(each.accepted_per_position)] for name, each in sources.items()
    }
    print("drafted and accepted:", json.dumps(drafts))
    return {"without_drafts_s": times[0], "with_drafts_s": times[1], "drafts": drafts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", type=float, default=0.8, help="share of right tokens in the prediction (0.8)"
    )
    parser.add_argument("--methods", nargs="+", default=["prediction"], help="sources (prediction)")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="most drafts of a step (4)")
    parser.add_argument("--fixed", action="store_true", help="always draft as much as possible")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt (64)")
    parser.add_argument("--output-len", type=int, default=96, help="tokens of an answer (96)")
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once (1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling (0.8)")
    parser.add_argument("--num-iters", type=int, default=5, help="rounds (5)")
    add_engine_flags(parser)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
