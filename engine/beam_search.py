"""Beam search over an engine: each step asks for the likeliest next tokens of every beam, as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.input.input_processor import Prompt
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Settings of a beam search.

    Raises:
        InvalidRequest: a value is outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # without effect: beams are ranked by the model's distribution
    length_penalty: float = 1.0  # scores are divided by the number of tokens to this power
    include_stop_str_in_output: bool = False  # the end token stays in the text

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name}={value!r} must be an integer from 1", name)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. The tokens and the text begin with the prompt."""

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None

    def compute_score(self, length_penalty: float) -> float:
        """Return the log-probability, made comparable between beams of different lengths."""
        num_tokens = len(self.tokens) - (self.finish_reason == "stop")
        return self.cum_logprob / float(num_tokens**length_penalty)


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best beams of a prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


async def search_beams(engine: Engine, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
    """Return the `beam_width` best continuations of a prompt.

    Raises:
        InvalidRequest: as for `Engine.generate`, or `beam_width` needs more than max_logprobs.
    """
    tokenizer, width = engine.tokenizer, params.beam_width
    eos = () if tokenizer is None or params.ignore_eos else tokenizer.eos_token_ids
    step = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * width, ignore_eos=True, output_kind="final")

    def rank(beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: -beam.compute_score(params.length_penalty))[:width]

    beams = [BeamSearchSequence([])]
    ended: list[BeamSearchSequence] = []
    for _ in range(params.max_tokens):
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(_extend(engine, prompt, beam, step, eos)) for beam in beams]
        found = [beam for job in jobs for beam in job.result()]
        ended += [beam for beam in found if beam.finish_reason is not None]
        if not (beams := rank([beam for beam in found if beam.finish_reason is None])):
            break
    best = rank(ended + beams)
    for beam in best:
        beam.finish_reason = beam.finish_reason or "length"
        if tokenizer is not None:
            is_cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
            beam.text = tokenizer.decode(beam.tokens[: len(beam.tokens) - is_cut])
    return BeamSearchOutput(best)


async def _extend(
    engine: Engine, prompt: Prompt, beam: BeamSearchSequence, step: SamplingParams, eos: Collection[int]
) -> list[BeamSearchSequence]:
    (output,) = [each async for each in engine.generate(beam.tokens or prompt, step)]
    tokens = beam.tokens or output.prompt_token_ids
    (choice,) = output.outputs
    if choice.logprobs is None or choice.error is not None:
        raise InvalidRequest(f"the beam ended without a token: {choice.error}", "prompt")
    return [
        BeamSearchSequence(
            [*tokens, token_id],
            beam.cum_logprob + entry.logprob,
            finish_reason="stop" if token_id in eos else None,
        )
        for token_id, entry in choice.logprobs[0].items()
    ]
