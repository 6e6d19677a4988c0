"""Requests of every kind side by side, and what each of their completions was."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine import Engine, RequestOutput, SamplingParams
from engine.core.request import Request
from grammar import GrammarSpec

NUM_REQUESTS = 26  # one of each kind
# Few blocks and seats, so that requests wait, are preempted and give way to more urgent ones.
TIGHT: dict[str, Any] = {
    "num_blocks": 50, "max_num_seqs": 16, "max_model_len": 400, "max_num_batched_tokens": 256,
    "max_num_waiting": 1000, "scheduling_policy": "priority",
}
# Enough blocks for all that run at a time.
ROOMY: dict[str, Any] = {"max_model_len": 400, "max_num_waiting": 1000}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


class MixedRequest(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    priority: int


# Its completions run before all others and side by side, and need 64 blocks: of TIGHT's 50, some are always preempted.
CROWD = MixedRequest(list(range(5, 12)), SamplingParams(n=16, seed=1000, max_tokens=45, ignore_eos=True), priority=-1)


class Completion(NamedTuple):
    """What must not depend on what else the engine does."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[tuple[int, float]] | None  # of the sampled tokens


def make_mixed_requests(seed: int = 0, vocab_size: int = 400, num_requests: int = NUM_REQUESTS) -> list[MixedRequest]:
    """Requests of every kind in turn, and the crowd; half have a grammar, and every second repeats its prompt."""
    chance = random.Random(seed)
    shared = [[chance.randrange(5, vocab_size) for _ in range(60)] for _ in range(3)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8, "top_k": 30},
        {"min_p": 0.02},
        {"n": 2},
        {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 0},
        {"stop": ("a", "th", "qz")},
        {"stop": ("e",), "include_stop_str_in_output": True, "min_tokens": 4},
        {"stop_token_ids": tuple(range(40, 60)), "min_tokens": 3},
        {"bad_words": ("a", "the", " in")},
        {"logit_bias": {70: 4.0, 71: 3.5, 72: -100.0}},
        {"allowed_token_ids": tuple(range(60, 110))},
        {"grammar": GrammarSpec.json_schema(SCHEMA)},
        {"grammar": GrammarSpec.json_schema(SCHEMA), "temperature": 0.0, "logprobs": 1},
        {"grammar": GrammarSpec.json_schema(SCHEMA), "n": 2, "repetition_penalty": 1.2},
        {"grammar": GrammarSpec.regex(r"[a-f]{3}(-[0-9]{2,4}){1,3}")},
        {"grammar": GrammarSpec.choice(["alpha", "beta", "alphabet"]), "temperature": 0.0},
        {"grammar": GrammarSpec.json_schema(SCHEMA), "temperature": 1.2, "logprobs": 0},
        {"grammar": GrammarSpec.json_schema(SCHEMA), "temperature": 0.7, "top_k": 20, "stop": ("blue",)},
        {"grammar": GrammarSpec.json_schema(SCHEMA), "frequency_penalty": 0.5, "temperature": 0.7},
        {"grammar": GrammarSpec.regex(r"(ab|cd){2,9}e"), "n": 2, "temperature": 1.2, "logprobs": 1},
        {"temperature": 0.7, "logprobs": 1, "presence_penalty": 0.4},
        {"temperature": 1.2, "stop": ("in", "on"), "n": 2},
    ]
    requests = []
    for number in range(num_requests):
        prompt = [chance.randrange(5, vocab_size) for _ in range(chance.choice([1, 7, 16, 33, 90, 170]))]
        if number % 2:
            prompt = prompt + prompt[-12:] + prompt[:30]
        if number % 3 == 0:
            prompt = shared[number % 9 // 3] + prompt
        kind = kinds[number % len(kinds)]
        max_tokens = 90 if "grammar" in kind else chance.choice([1, 12, 40, 70])
        settings = {"seed": number, "max_tokens": max(max_tokens, kind.get("min_tokens", 0)), **kind}
        requests.append(MixedRequest(prompt, SamplingParams(**settings), chance.choice([0, 0, 1, 5])))
    return [*requests, CROWD]


async def run_mixed(
    engine: Engine,
    requests: Sequence[MixedRequest],
    generated: Sequence[list[list[int]] | None] | None = None,
) -> list[list[Completion]]:
    """All at once; of each request its completions.

    Args:
        generated: of each request, the tokens that its completions have produced before; None for a new one.
    """

    async def run(number: int, request: MixedRequest) -> list[Completion]:
        more: dict[str, Any] = {}
        if generated is not None and generated[number] is not None:
            more["generated_token_ids"] = generated[number]
        stream = engine.generate(request.prompt, request.params, str(number), priority=request.priority, **more)
        outputs = [output async for output in stream]
        return [summarise(outputs[-1], index) for index in range(request.params.n)]

    return await asyncio.gather(*(run(number, request) for number, request in enumerate(requests)))


def summarise(output: RequestOutput, index: int) -> Completion:
    found = output.outputs[index]
    logprobs = None
    if found.logprobs is not None:
        logprobs = [(entry.token.token_id, round(entry.token.logprob, 4)) for entry in found.logprobs]
    return Completion(found.token_ids, found.text, found.finish_reason, found.stop_reason, logprobs)


class Oracle:
    """Knows how requests go on, and says so rightly, wrongly, or rightly for two tokens only."""

    name = "oracle"

    def __init__(self, answers: list[list[Completion]]) -> None:
        self.answers = answers
        self.chance = random.Random(5)
        self.num_drafted = 0

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        number = int(request.request_id)
        index = 0 if request.seed == number else 1  # the seed of each request is its number
        done = request.num_output_tokens
        right = self.answers[number][index].token_ids[done : done + 5]
        wrong = [self.chance.randrange(5, 400) for _ in range(4)]
        drafts = self.chance.choice([right, wrong, right[:2] + wrong, []])[:limit]
        self.num_drafted += len(drafts)
        return drafts

    def forget(self, request: Request) -> None:
        """Nothing is kept."""
