"""Measures how many drafted tokens the model accepts, the slow and obvious way: no cache, one prompt after another.

`python -m assets.demo_model.recipe.companions.acceptance`; greedy and without a grammar, so a drafted token is
accepted when it is the one that the model itself writes. Each row gives the share of proposals accepted at each place
of a draft, and how many tokens one step of the model yields (accepted ones and its own).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from ..evaluation.evaluate import read_lines
from ..prompt import Message, extraction_messages, render_chat
from ..training.examples import Encoder
from ..training.model import Decoder
from ..writing.schemas import load_schema
from .eagle import EagleLayer
from .frozen import FOLDER, load_decoder, open_encoder

# (prompt and answer so far, number of tokens wanted) -> drafted token ids
Drafter = Callable[[list[int], int], list[int]]
END_OF_TURN, MAX_TOKENS = 2, 160


def best_tokens(model: Decoder, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.embed_tokens.weight).float().argmax(-1)


@torch.inference_mode()
def answer(model: Decoder, prompt_ids: list[int]) -> list[int]:
    """The greedy continuation, computed from the start for every token."""
    ids = list(prompt_ids)
    while len(ids) - len(prompt_ids) < MAX_TOKENS and ids[-1] != END_OF_TURN:
        ids.append(int(best_tokens(model, model(torch.tensor([ids]))[0, -1])))
    return ids[len(prompt_ids) :]


def draft_with_model(draft: Decoder) -> Drafter:
    """A smaller model continues the text."""

    def propose(ids: list[int], count: int) -> list[int]:
        longer = list(ids)
        for _ in range(count):
            longer.append(int(best_tokens(draft, draft(torch.tensor([longer]))[0, -1])))
        return longer[len(ids) :]

    return propose


def draft_with_lookup(longest: int = 4) -> Drafter:
    """Return the tokens that followed the longest earlier match of the last tokens, the latest of equals."""

    def propose(ids: list[int], count: int) -> list[int]:
        for size in range(longest, 0, -1):
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start : start + size] == ids[-size:]:
                    return ids[start + size : start + size + count]
        return []

    return propose


def draft_with_eagle(base: Decoder, eagle: EagleLayer) -> Drafter:
    """The layer goes on from the model's hidden states with its own."""

    def propose(ids: list[int], count: int) -> list[int]:
        longer, hidden = list(ids), base(torch.tensor([ids[:-1]])).float()
        for _ in range(count):
            found = eagle(hidden, torch.tensor([longer[1:]]))[:, -1:]
            hidden = torch.cat((hidden, found), 1)
            longer.append(int(best_tokens(base, found[0, -1].type_as(base.embed_tokens.weight))))
        return longer[len(ids) :]

    return propose


@torch.inference_mode()
def count_accepted(
    prompt_ids: list[int], output_ids: list[int], propose: Drafter, count: int
) -> tuple[list[int], list[int]]:
    """(accepted, proposed) at each place of a draft, over the whole answer; one step for each pair of lists' heads."""
    accepted, proposed = [0] * count, [0] * count
    done = 1  # the first token comes from the prefill
    while done < len(output_ids):
        guess = propose(prompt_ids + output_ids[:done], count)
        for place, token in enumerate(guess):
            if done >= len(output_ids):
                break
            proposed[place] += 1
            if token != output_ids[done]:
                break
            accepted[place] += 1
            done += 1
        done += 1  # the model's own token
    return accepted, proposed


def load_drafters(base: Decoder, folder: Path) -> dict[str, Drafter]:
    """Those whose files are there, and prompt lookup, which needs none."""
    drafters: dict[str, Drafter] = {"lookup": draft_with_lookup()}
    if (folder / "draft" / "model.safetensors").exists():
        drafters["draft"] = draft_with_model(load_decoder(folder / "draft").to(base.embed_tokens.weight.dtype))
    if (folder / "eagle" / "model.safetensors").exists():
        eagle, weights = EagleLayer(base), load_file(folder / "eagle" / "model.safetensors")
        names = {name: weight.float() for name, weight in weights.items()}
        eagle.load_state_dict({name.replace("layers.0.", "layer."): weight for name, weight in names.items()})
        drafters["eagle"] = draft_with_eagle(base, eagle)
    return drafters


def read_prompts(encoder: Encoder, num_documents: int, num_questions: int) -> dict[str, list[list[int]]]:
    """Token ids of extraction prompts (one of every kind in turn) and of chat questions."""
    lines = read_lines(Path(__file__).parents[1] / "evaluation" / "generated.jsonl")
    questions = read_lines(Path(__file__).parents[1] / "evaluation" / "chat_questions.jsonl")
    documents = lines[:: max(1, len(lines) // num_documents)][:num_documents]
    asked: dict[str, list[list[Message]]] = {
        "extraction": [extraction_messages(load_schema(line["kind"]), line["text"]) for line in documents],
        "chat": [line["messages"] for line in questions[:num_questions]],
    }

    def encode(messages: list[Message]) -> list[int]:
        return list(encoder.tokenizer.encode(render_chat(messages, add_generation_prompt=True)).ids)

    return {name: [encode(messages) for messages in dialogues] for name, dialogues in asked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure acceptance rates of the drafters.")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--drafters", type=Path, default=FOLDER, help="folder with draft and eagle")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--count", type=int, default=3, help="tokens a draft")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base, encoder = load_decoder(args.model), open_encoder(args.model)
    drafters = load_drafters(base, args.drafters)
    for task, prompts in read_prompts(encoder, args.documents, args.questions).items():
        outputs = [answer(base, prompt) for prompt in prompts]
        for name, propose in drafters.items():
            accepted, proposed = [0] * args.count, [0] * args.count
            for prompt, output in zip(prompts, outputs, strict=True):
                more = count_accepted(prompt, output, propose, args.count)
                accepted = [a + b for a, b in zip(accepted, more[0], strict=True)]
                proposed = [a + b for a, b in zip(proposed, more[1], strict=True)]
            num_tokens = sum(len(output) - 1 for output in outputs)
            figures = {
                "task": task,
                "drafter": name,
                "accepted": [round(a / max(1, b), 3) for a, b in zip(accepted, proposed, strict=True)],
                "tokens_per_step": round(num_tokens / max(1, num_tokens - sum(accepted)), 3),
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
