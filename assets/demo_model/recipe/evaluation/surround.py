"""Writes a set with other text around each document, for `extract --evaluate`.

`python -m assets.demo_model.recipe.evaluation.surround handwritten.jsonl --tokens 1000 --out around.jsonl`
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from .evaluate import read_lines

HERE = Path(__file__).parent


def surround(
    text: str, num_tokens: int, count_tokens: Callable[[str], int], paragraphs: Sequence[str]
) -> str:
    """The document with about `num_tokens` of other text around it, half before and half behind.

    Whole paragraphs are taken in order, and again from the start when there are not enough; the one that would
    be too long is cut at a word.
    """
    before = _take(num_tokens // 2, count_tokens, paragraphs)
    behind = _take(num_tokens - num_tokens // 2, count_tokens, paragraphs[::-1])
    return "\n\n".join([*before, text, *behind])


def _take(num_tokens: int, count_tokens: Callable[[str], int], paragraphs: Sequence[str]) -> list[str]:
    taken: list[str] = []
    left = num_tokens
    while left > 0:
        paragraph = paragraphs[len(taken) % len(paragraphs)]
        while paragraph and count_tokens(paragraph) > left:
            paragraph = paragraph.rpartition(" ")[0]
        if not paragraph:
            break
        taken.append(paragraph)
        left -= count_tokens(paragraph)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="Put other text around each document of a set.")
    parser.add_argument("set", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--model", type=Path, default=HERE.parents[1], help="its tokenizer counts")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    paragraphs = [part.strip() for part in (HERE / "surroundings.txt").read_text(encoding="utf-8").split("\n\n")]
    lines = []
    for case in read_lines(args.set):
        text = surround(case["text"], args.tokens, lambda part: len(tokenizer.encode(part)), paragraphs)
        lines.append(json.dumps(case | {"text": text}, ensure_ascii=False))
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
