"""Writes the generated test set: a few fresh documents of each kind from a seed that no training run uses.

`python -m assets.demo_model.recipe.evaluation.testset`; the set is kept beside the code, so that figures stay
comparable when the templates grow.
"""

import argparse
import json
from pathlib import Path
from random import Random

from ..writing.documents import write_document
from ..writing.kinds import KINDS

SEED, NUM_PER_KIND = 20_261_121, 12


def make_lines(num_per_kind: int = NUM_PER_KIND, seed: int = SEED) -> list[str]:
    """The cases of the set, one JSON object each."""
    rng = Random(seed)
    documents = [write_document(kind, rng) for kind in KINDS for _ in range(num_per_kind)]
    return [
        json.dumps(
            {"kind": document.kind, "text": document.text, "record": document.record}, ensure_ascii=False
        )
        for document in documents
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the generated test set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "generated.jsonl")
    parser.add_argument("--per-kind", type=int, default=NUM_PER_KIND)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    args.out.write_text("\n".join(make_lines(args.per_kind, args.seed)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
