"""Batches of similar length from an endless stream of fresh examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from .examples import Encoder, Example, sample_example

CHUNK = 1024  # examples sorted by length together
TOKENS_PER_BATCH = 3072  # padding included


@dataclass(frozen=True, slots=True)
class Stage:
    """The mix of examples until a given share of the run."""

    until: float
    max_length: int
    long_share: float  # share of long documents
    full_share: float  # share of fixed-kind prompts that hold the complete schema
    num_branches: int  # at most so many documents behind one schema


# Short prompts teach copying at the lowest cost; the real prompts and the long ones come when there is
# something to refine. Several documents share a complete schema: it is computed once for all of them.
# Long ones stay in from then on: with 3 % of them a run that was taken up again forgot how to read them.
STAGES = (Stage(0.36, 220, 0.0, 0.0, 1), Stage(0.84, 1400, 0.1, 0.55, 4), Stage(2.0, 1900, 0.2, 0.6, 4))


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded tokens, places and branches [B, T] and the flat positions whose next token counts."""

    token_ids: Tensor
    places: Tensor
    branches: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    num_tokens: int


def make_batch(examples: list[Example]) -> Batch:
    longest = -(-max(len(example.token_ids) for example in examples) // 16) * 16
    tokens, places, branches = np.zeros((3, len(examples), longest), np.int64)
    weights = np.zeros((len(examples), longest + 1), np.float32)
    for row, example in enumerate(examples):
        tokens[row, : len(example.token_ids)] = example.token_ids
        places[row, : len(example.token_ids)] = example.places
        branches[row, : len(example.token_ids)] = example.branches
        weights[row, : len(example.weights)] = example.weights
    ahead = torch.from_numpy(weights[:, 1:].copy()).reshape(-1)
    ids = torch.from_numpy(tokens)
    positions = ahead.nonzero()[:, 0]
    targets = ids.roll(-1, 1).reshape(-1)[positions]
    num_tokens = sum(len(example.token_ids) for example in examples)
    where = torch.from_numpy(places), torch.from_numpy(branches)
    return Batch(ids, *where, positions, targets, ahead[positions], num_tokens)


def group_by_length(examples: list[Example], tokens_per_batch: int = TOKENS_PER_BATCH) -> list[list[Example]]:
    """Groups that stay under the token budget once padded."""
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda example: len(example.token_ids)):
        padded = -(-len(example.token_ids) // 16) * 16
        if groups[-1] and padded * (len(groups[-1]) + 1) > tokens_per_batch:
            groups.append([])
        groups[-1].append(example)
    return groups


def find_stage(progress: float) -> Stage:
    return next(stage for stage in STAGES if progress < stage.until)


def sample_chunk(encoder: Encoder, rng: Random, progress: float) -> list[Example]:
    """Fresh examples for a point of the run: short ones first, some long ones at the end."""
    stage = find_stage(progress)
    examples: list[Example] = []
    while len(examples) < CHUNK:
        example = sample_example(encoder, rng, stage.long_share, stage.full_share, stage.num_branches)
        if len(example.token_ids) <= stage.max_length:
            examples.append(example)
    return examples


def stream_batches(encoder: Encoder, seed: int, progress: Callable[[], float]) -> Iterator[Batch]:
    """Endless batches; `progress` says which share of the run is over."""
    rng = Random(seed)
    while True:
        stage = find_stage(progress())
        groups = group_by_length(sample_chunk(encoder, rng, progress()))
        rng.shuffle(groups)
        for group in groups:
            yield make_batch(group)
            if progress() >= stage.until:
                break
