"""Measures how many tokens a step yields on the demo model with its companions, and how long the answers take.

`python -m tests.engine.spec.measure_acceptance [--temperature 1] [--times]`: extraction and chat prompts of the demo
model's evaluation, one request at a time, three drafts a step. `forced` is measured under the schema's grammar; its
share is that of accepted forced drafts among all output tokens.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

from assets.demo_model.recipe.companions.acceptance import read_lines, read_prompts
from assets.demo_model.recipe.companions.frozen import FOLDER, open_encoder
from assets.demo_model.recipe.writing.schemas import load_schema
from engine import LLM, RequestOutput, SamplingParams
from grammar import GrammarSpec
from tests.engine.spec.compare_methods import METHODS


def list_jobs(num: int, temperature: float) -> dict[str, list[tuple[list[int], SamplingParams]]]:
    """Prompts with parameters, by task; `schema` is extraction under the grammar."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=160)
    prompts = read_prompts(open_encoder(FOLDER), num, num)
    jobs = {task: [(ids, params) for ids in found] for task, found in prompts.items()}
    lines = read_lines(FOLDER / "recipe" / "evaluation" / "generated.jsonl")
    kinds = [line["kind"] for line in lines[:: max(1, len(lines) // num)][:num]]
    specs = [GrammarSpec.json_schema(load_schema(kind)) for kind in kinds]
    jobs["schema"] = [
        (ids, replace(params, grammar=spec)) for ids, spec in zip(prompts["extraction"], specs, strict=True)
    ]
    return jobs


def run(llm: LLM, jobs: list[tuple[list[int], SamplingParams]]) -> tuple[float, list[RequestOutput]]:
    """Return the seconds and the outputs, one request after the other."""
    start = time.perf_counter()
    outputs = [llm.generate(ids, params, use_tqdm=False)[0] for ids, params in jobs]
    return time.perf_counter() - start, outputs


def describe(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return tokens per step, not counting the first token, and the share of each source among the tokens."""
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    accepted: dict[str, int] = {}
    for output in outputs:
        for source, (_, count) in output.metrics.drafts.items():
            accepted[source] = accepted.get(source, 0) + count
    num_rest = num_tokens - len(outputs)
    return {
        "tokens_per_step": round(num_rest / max(1, num_rest - sum(accepted.values())), 3),
        "shares": {source: round(count / num_tokens, 3) for source, count in accepted.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=16, help="prompts of a task (16)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods", nargs="*", default=[name for name in METHODS if name != "all"])
    parser.add_argument("--tasks", nargs="*", default=["extraction", "chat", "schema"])
    parser.add_argument("--draft-sample-method", default="probabilistic")
    parser.add_argument(
        "--times", action="store_true", help="compare the time with an engine without drafts, adaptively"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    jobs = list_jobs(args.num, args.temperature)
    settings: dict[str, Any] = {"num_threads": args.num_threads, "attention_backend": "native", "num_blocks": 600}
    settings["enable_prefix_caching"] = False
    plain = LLM(**settings)
    for name in args.methods:
        config = {"num_speculative_tokens": 8 if name == "forced" else 3, "adaptive": args.times}
        config |= {"method": name, "draft_sample_method": args.draft_sample_method} | METHODS[name]
        drafting = LLM(speculative_config=config, **settings)
        for task in args.tasks:
            expected = run(plain, jobs[task])[1]
            found = run(drafting, jobs[task])[1]
            figures = {"method": name, "task": task, "temperature": args.temperature} | describe(found)
            pairs = zip(expected, found, strict=True)
            figures["different"] = sum(one.outputs[0].token_ids != two.outputs[0].token_ids for one, two in pairs)
            if args.times:
                rounds = [(run(plain, jobs[task])[0], run(drafting, jobs[task])[0]) for _ in range(args.rounds)]
                figures["over_none"] = round(min(one for one, _ in rounds) / min(two for _, two in rounds), 3)
                figures["each"] = [round(one / two, 3) for one, two in rounds]
            print(json.dumps(figures), flush=True)
        drafting.close()
    plain.close()


if __name__ == "__main__":
    main()
