"""Evaluates a checkpoint on hand-written documents and chat questions, through transformers with a schema mask.

`python -m assets.demo_model.recipe.evaluation.evaluate --model assets/demo_model`; greedy decoding throughout.
"""

import argparse
import copy
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from app.extraction.scoring import score_record

from ..prompt import Message, extraction_messages
from ..writing.chat import learned_replies
from ..writing.drafts import Record
from ..writing.schemas import Schema, load_schema

HERE = Path(__file__).parent
MAX_STRING, MAX_ITEMS, MAX_TOKENS = 100, 12, 500
STUTTER = re.compile(r"(\b\w+\b)(?:\W+\1\b){2}", re.IGNORECASE)


def bound_schema(schema: Schema) -> Schema:
    """The schema with a length on free strings and lists, so that a weak model cannot run away in one."""
    bounded = copy.deepcopy(schema)
    pending: list[Any] = [bounded]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("type") == "string" and not node.keys() & {"enum", "format"}:
                node.setdefault("maxLength", MAX_STRING)
            if node.get("type") == "array":
                node.setdefault("maxItems", MAX_ITEMS)
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return bounded


class SchemaMask(LogitsProcessor):
    """Masks the tokens that would break a compiled schema, for one sequence."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary_size: int) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self.bitmask = xgrammar.allocate_token_bitmask(1, vocabulary_size)
        self.started = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.started:
            self.matcher.accept_token(int(input_ids[0, -1]))
        self.started = True
        self.matcher.fill_next_token_bitmask(self.bitmask)
        xgrammar.apply_token_bitmask_inplace(scores, self.bitmask)
        return scores


class Checkpoint:
    """A model and its tokenizer, ready to answer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.vocabulary_size = int(self.model.config.vocab_size)
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.vocabulary_size)
        self.compiler = xgrammar.GrammarCompiler(info)

    @torch.inference_mode()
    def answer(self, messages: list[Message], schema: Schema | None = None) -> str:
        """The greedy answer, under the schema's mask when one is given."""
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        masks: list[LogitsProcessor] = []
        if schema is not None:
            text = json.dumps(bound_schema(schema))
            masks = [
                SchemaMask(
                    self.compiler.compile_json_schema(text, any_whitespace=False), self.vocabulary_size
                )
            ]
        limit = MAX_TOKENS if schema is not None else 120
        output = self.model.generate(**inputs, max_new_tokens=limit, do_sample=False, logits_processor=masks)
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@dataclass(slots=True)
class Result:
    """Figures of one evaluation; field scores by kind and by field."""

    by_kind: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    by_field: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_valid: int = 0
    num_whole: int = 0
    num_documents: int = 0

    def add(self, kind: str, found: Record | None, wanted: Record) -> None:
        scores = score_record(found, wanted)
        self.by_kind[kind] += scores.values()
        for name, score in scores.items():
            self.by_field[f"{kind}.{name}"].append(score)
        self.num_documents += 1
        self.num_valid += found is not None
        self.num_whole += min(scores.values()) == 1.0

    def summary(self) -> dict[str, Any]:
        everything = [score for scores in self.by_kind.values() for score in scores]
        return {
            "field": round(sum(everything) / len(everything), 4),
            "whole": f"{self.num_whole}/{self.num_documents}",
            "valid": f"{self.num_valid}/{self.num_documents}",
            "kinds": {
                kind: round(sum(scores) / len(scores), 3) for kind, scores in sorted(self.by_kind.items())
            },
            "fields": {
                name: round(sum(scores) / len(scores), 3) for name, scores in sorted(self.by_field.items())
            },
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def parse_record(text: str) -> Record | None:
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def evaluate_documents(checkpoint: Checkpoint, documents: list[dict[str, Any]], verbose: bool) -> Result:
    result = Result()
    for document in documents:
        schema = load_schema(document["kind"])
        found = parse_record(checkpoint.answer(extraction_messages(schema, document["text"]), schema))
        result.add(document["kind"], found, document["record"])
        if verbose:
            wanted = document["record"]
            wrong = [name for name, score in score_record(found, wanted).items() if score < 1]
            print(
                document["kind"],
                {name: ((found or {}).get(name), wanted[name]) for name in wrong},
                flush=True,
            )
    return result


def evaluate_chat(
    checkpoint: Checkpoint, questions: list[dict[str, Any]], verbose: bool
) -> tuple[float, float]:
    """Share of the questions whose answer holds every required fact, and of those that are not garbled besides.

    A fact is a list of alternatives. Where the answer is a learned sentence (`own_words` is not set) it must
    be one of them to the letter; elsewhere it must have no word three times in a row.
    """
    learned, num_right, num_clean = learned_replies(), 0, 0
    for question in questions:
        reply = checkpoint.answer(question["messages"])
        right = all(
            any(option.casefold() in reply.casefold() for option in fact) for fact in question["facts"]
        )
        right = right and not any(word.casefold() in reply.casefold() for word in question.get("never", ()))
        clean = right and (reply in learned if not question.get("own_words") else not STUTTER.search(reply))
        num_right += right
        num_clean += clean
        if verbose and not clean:
            print(question["messages"][-1]["content"], "->", reply, flush=True)
    return num_right / len(questions), num_clean / len(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint on the hand-written sets.")
    parser.add_argument("--model", type=Path, default=HERE.parent)
    parser.add_argument("--documents", type=Path, default=HERE / "handwritten.jsonl")
    parser.add_argument("--questions", type=Path, default=HERE / "chat_questions.jsonl")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print what was wrong")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = Checkpoint(args.model)
    result = evaluate_documents(checkpoint, read_lines(args.documents), args.verbose)
    print(json.dumps(result.summary(), indent=1))
    right, clean = evaluate_chat(checkpoint, read_lines(args.questions), args.verbose)
    print(f"chat: facts {right:.3f}, and not garbled {clean:.3f}")


if __name__ == "__main__":
    main()
