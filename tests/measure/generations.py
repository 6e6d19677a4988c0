"""Generations of a model over many schemas: each has to end valid or by its length.

    python -m tests.measure.generations --schemas maskbench.jsonl [--num 1000] [--max-tokens 48] [--limit-s 600]

The schemas go round, greedy first, then at temperature 1 with ever new seeds. Each finished text is read by an
independent validator. Counts, and the texts of what went wrong; the exit status is 1 if anything did.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from grammar import GrammarError, GrammarSpec, OutputCheck

BATCH_SIZE = 32
PROMPT = "Write a JSON document for this schema:\n"
MAX_PROMPT_CHARS = 600
SAMPLINGS = ("greedy", "temperature 1")


@dataclass(slots=True)
class Counts:
    """Counts of the ways in which generations ended.

    Attributes:
        ends: sampling -> how they ended -> how many.
        wrong: what ended neither valid nor by its length: schema, how, text.
    """

    ends: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in SAMPLINGS})
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, sampling: str, name: str, spec: GrammarSpec, completion: Any) -> None:
        """Count one finished generation."""
        how = str(completion.finish_reason)
        if how == "stop":
            how = "valid" if OutputCheck(spec).is_valid(completion.text) else "invalid"
        self.ends[sampling][how] += 1
        if how not in ("valid", "length"):
            self.wrong.append((name, completion.error or how, completion.text))


def read_specs(path: Path) -> list[tuple[str, GrammarSpec]]:
    """Return (name, spec) of the cases of a file, one a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    return [(case["name"], GrammarSpec.json_schema(case["schema"])) for case in cases]


def count_generations(
    llm: LLM, specs: Sequence[tuple[str, GrammarSpec]], num: int, max_tokens: int, limit_s: float = math.inf
) -> Counts:
    """Generate `num` texts, the schemas one after the other, and count how they ended.

    Args:
        limit_s: no batch is begun after so many seconds.
    """
    counts, start = Counts(), time.monotonic()
    work = ((*specs[number % len(specs)], number) for number in range(num))
    while time.monotonic() - start < limit_s and (batch := list(islice(work, BATCH_SIZE))):
        samplings = [SAMPLINGS[min(number // len(specs), 1)] for _, _, number in batch]
        params = [
            SamplingParams(
                max_tokens=max_tokens, temperature=0.0 if sampling == "greedy" else 1.0, seed=number,
                grammar=spec,
            )
            for sampling, (_, spec, number) in zip(samplings, batch, strict=True)
        ]
        chats = [[{"role": "user", "content": PROMPT + spec.text[:MAX_PROMPT_CHARS]}] for _, spec, _ in batch]
        try:
            outputs = llm.chat(chats, params, use_tqdm=False)
        except GrammarError as error:
            counts.wrong.append(("", f"refused: {error}", ""))
            continue
        for sampling, (name, spec, _), output in zip(samplings, batch, outputs, strict=True):
            counts.add(sampling, name, spec, output.outputs[0])
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=Path, required=True, metavar="FILE", help="cases, one a line")
    parser.add_argument("--num", type=int, default=1000, help="how many generations (1000)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each at most (48)")
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="begin no batch after so many seconds"
    )
    parser.add_argument("--model", help="folder of the model (the embedded one)")
    options = parser.parse_args(arguments)
    chosen = {"model": options.model} if options.model else {}
    with LLM(max_num_seqs=BATCH_SIZE, **chosen) as llm:
        counts = count_generations(
            llm, read_specs(options.schemas), options.num, options.max_tokens, options.limit_s
        )
    for sampling, ends in counts.ends.items():
        told = ", ".join(f"{how} {number}" for how, number in sorted(ends.items()))
        print(f"{sampling:<14} {ends.total():>5} generations: {told or 'none'}")
    for name, why, text in counts.wrong:
        print(f"{name}: {why}\n    {text[:200]!r}")
    return int(bool(counts.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
