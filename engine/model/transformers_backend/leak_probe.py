"""Leak probe: whether a model's code computes requests that share a step as it computes each alone.

A tiny random model of the same structure runs two requests twice:

    transformers alone     each request by itself, its own attention, no cache
    the paged backend      both in one row: chunks of prefill, decode, and positions beyond every window

States that run from one request into the next, masks and positions made by counting tokens of the row, and windows that
reach attention only through a mask, all change logits. Argmax may hide that, so logits are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.kv_cache_spec import group_layers
from engine.model.attn_metadata import AttnMetadata
from engine.model.transformers_backend.model import Skeleton, TransformersModel, make_model
from engine.model.transformers_backend.paged_interface import UnsupportedModel
from engine.model.transformers_backend.tiny_config import VOCAB_SIZE, shrink_config

TOLERANCE = 1e-5  # largest difference, relative to the largest logit where that exceeds 1
_LENGTHS = (25, 17)  # tokens of the two requests; the longest window of a tiny model is 8
# Tokens of each request in each step: a prefill, a chunk beside a decode, then decodes.
_STEPS = ((11, 9), (9, 1), (1, 3), (1, 1), (1, 1), (1, 1), (1, 1))
_BLOCK_SIZE = 4
# Errors of a model's code that does not fit the tiny sizes, or the meta device.
_FAILURES = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)


def probe(config: PreTrainedConfig) -> None:
    """Compare the paged backend with transformers on a tiny model of this config."""
    try:
        difference, place = compare(shrink_config(config))
    except UnsupportedModel:
        raise
    except (*_FAILURES, StrictDataclassError) as error:
        raise UnsupportedModel(f"a tiny model of it could not be run: {error}") from error
    if not difference <= TOLERANCE:
        raise UnsupportedModel(
            f"its code mixes up requests that share a step: logits differ by {difference:.1e} ({place}) from those of "
            f"transformers for each request alone, and at most {TOLERANCE:.0e} is rounding"
        )


@torch.random.fork_rng(devices=[])
def compare(config: PreTrainedConfig) -> tuple[float, str]:
    """Return the largest difference of logits between both ways, and where it occurs."""
    torch.manual_seed(0)
    reference = make_model(config, "eager")
    randomise(reference)
    ours = make_model(config)
    ours.load_state_dict(reference.state_dict())
    model = TransformersModel(ours, Skeleton(config), config=None)
    model.pack()
    return compare_models(reference, model)


@torch.inference_mode()
def compare_models(reference: PreTrainedModel, model: TransformersModel) -> tuple[float, str]:
    """As `compare`, for two models of the same weights with a vocabulary of at least 128."""
    requests = [torch.randint(1, VOCAB_SIZE, (length,)) for length in _LENGTHS]
    expected = [_run_alone(reference, ids) for ids in requests]
    worst, place = 0.0, ""
    for what, request, positions, logits in _run_together(model, requests):
        wanted = expected[request][positions]
        gap = float((logits - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        if not gap <= worst:  # a NaN is the worst
            worst, place = gap, f"{what}, token {positions.start}"
    return worst, place


def randomise(model: nn.Module) -> None:
    """Draw every parameter so that no part of the model is close to doing nothing."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)


def _run_alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _run_together(
    model: TransformersModel, requests: list[Tensor]
) -> Iterator[tuple[str, int, slice, Tensor]]:
    """Yield what was computed, the request, its positions and their logits, step by step."""
    blocks = -(-max(_LENGTHS) // _BLOCK_SIZE)
    caches, num_groups = [], len(group_layers(model.kv_specs()))
    for spec in model.kv_specs():
        shape = (1 + 2 * blocks, _BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
        caches.append((torch.full(shape, torch.nan), torch.full(shape, torch.nan)))
    # Blocks of the two requests alternate.
    tables = torch.arange(1, 1 + 2 * blocks, dtype=torch.int32).view(blocks, 2).t().contiguous()
    done = [0, 0]
    for counts in _STEPS:
        spans = [range(start, start + count) for start, count in zip(done, counts, strict=True)]
        positions = torch.tensor([position for span in spans for position in span])
        slots = [
            int(tables[request, position // _BLOCK_SIZE]) * _BLOCK_SIZE + position % _BLOCK_SIZE
            for request, span in enumerate(spans)
            for position in span
        ]
        done = [span.stop for span in spans]
        metadata = AttnMetadata(
            slot_mapping=torch.tensor(slots).expand(num_groups, -1),
            block_tables=tables.expand(num_groups, -1, -1),
            query_start_loc=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(done, dtype=torch.int32),
            query_lens_list=list(counts),
            seq_lens_list=list(done),
        )
        ids = torch.cat([requests[request][span.start : span.stop] for request, span in enumerate(spans)])
        logits = model.compute_logits(model(ids, positions, caches, metadata))
        for request, (span, part) in enumerate(zip(spans, logits.split(counts), strict=True)):
            what = "prefill" if span.start == 0 else "decode" if len(span) == 1 else "chunk"
            yield what, request, slice(span.start, span.stop), part
