"""Builders for the sampler's tests: requests, a sampler that holds them, and the reference's view of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.worker.sampling.sampler import SampledTokens, Sampler
from engine.worker.sampling.state import SamplingState
from kernels import torch as torch_ops
from tests.kernels import sampling_reference

EOS = 0
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Case:
    """A request as the sampler sees it."""

    params: SamplingParams
    seed: int = 0
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    mask: np.ndarray | None = field(default=None, compare=False)  # [V] bool

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def make_sampler(cases: Sequence[Case], vocab_size: int, rows: Sequence[int] | None = None) -> Sampler:
    """A sampler whose state holds the cases, in rows 0.. or the given ones."""
    rows = range(len(cases)) if rows is None else rows
    state = SamplingState(max(rows, default=0) + 1, vocab_size, torch.device("cpu"))
    for row, case in zip(rows, cases, strict=True):
        add_case(state, row, case)
    return Sampler(state, torch_ops.make_ops())


def add_case(state: SamplingState, row: int, case: Case) -> None:
    history = case.prompt, case.output
    state.add(row, case.params, case.seed, *history, eos_token_ids=[EOS], bad_word_ids=case.bad_words)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def pack_mask(mask: np.ndarray) -> np.ndarray:
    """[V] bool to [ceil(V/32)] int32."""
    bits = np.zeros(-(-len(mask) // 32) * 32, np.uint8)
    bits[: len(mask)] = mask
    return np.packbits(bits, bitorder="little").view(np.int32)


def sample(
    sampler: Sampler, logits: Tensor, cases: Sequence[Case], rows: Sequence[int] | None = None
) -> SampledTokens:
    """Sample the next token of each case; cases with masks are sampled apart, as a step's gated rows are."""
    at = np.arange(len(cases)) if rows is None else np.array(rows, np.int64)
    positions = np.array([case.position for case in cases], np.int64)
    has_mask = np.array([case.mask is not None for case in cases])
    token_ids, logprobs = torch.empty(len(cases), dtype=torch.int64), []
    for places in (np.flatnonzero(~has_mask), np.flatnonzero(has_mask)):
        masks = [pack_mask(mask) for place in places.tolist() if (mask := cases[place].mask) is not None]
        # A copy of its own: sampling overwrites it.
        part_logits = logits[torch.from_numpy(places)]
        bitmask = np.stack(masks) if masks else None
        part = sampler.sample(part_logits, at[places], positions[places], bitmask)
        token_ids[torch.from_numpy(places)] = part.token_ids
        logprobs += [found.move(places) for found in part.logprobs]
    return SampledTokens(token_ids, logprobs)


def read_logprobs(sampled: SampledTokens) -> dict[int, TokenLogprobs]:
    """By place in the batch."""
    return {place: entry for part in sampled.logprobs for place, entry in part.to_lists(part.packed.numpy()).items()}


def sample_alone(case: Case, logits: Tensor) -> int:
    """The case's next token in a batch of its own."""
    sampler = make_sampler([case], len(logits))
    return int(sample(sampler, logits[None], [case]).token_ids[0])


def edit_reference(case: Case, logits: Tensor) -> np.ndarray:
    """The logits that the reference hands to the temperature."""
    params = case.params
    return sampling_reference.edit_logits(
        logits.numpy(),
        case.prompt,
        case.output,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=case.bad_words,
        end_ids=[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])],
        min_tokens=params.min_tokens,
        mask=case.mask,
    )


def rank_reference(case: Case, logits: Tensor) -> list[tuple[float, int]]:
    """(score, token id) of every token the reference may draw, its draw first; empty when it has none."""
    edited, params = edit_reference(case, logits), case.params
    if edited.max() == -np.inf:
        return []
    if params.is_greedy:
        return [(float(edited.max()), int(edited.argmax()))]
    return sampling_reference.rank_draws(
        edited, case.seed, case.position, params.temperature, params.top_k, params.top_p, params.min_p
    )
