"""The least time that a work can take on a GPU, from what was measured of its memory and its products.

A prefill computes; a decode step reads all weights and every running request's keys and values, and writes and
reads the logits. All requests start together and leave when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.bench.shapes import Footprint, Json
from app.bench.workload import Job

LOGIT_BYTES = 8  # a float32 written and read


def compute_ceiling(
    config: Json, jobs: Sequence[Job], bytes_per_s: float, flops_per_s: float, value_bytes: int = 2
) -> float:
    """Output tokens a second that no engine can exceed.

    Args:
        config: the model's config.json.
        value_bytes: of a weight and of an element of the cache.
    """
    footprint = Footprint.from_config(config)
    vocab_weights = config["vocab_size"] * config["hidden_size"]
    seconds = 0.0
    for job in jobs:
        length = len(job.prompt_token_ids)
        attended = 2 * footprint.num_layers * footprint.attention_width * length**2
        products = 2 * (footprint.num_weights - vocab_weights) * length + 2 * vocab_weights
        seconds += (products + attended) / flops_per_s
    for step in range(1, max(job.max_tokens for job in jobs)):
        contexts = [len(job.prompt_token_ids) + step for job in jobs if job.max_tokens > step]
        size = footprint.step_bytes(1, sum(contexts), value_bytes, value_bytes)
        size += len(contexts) * config["vocab_size"] * LOGIT_BYTES
        flops = 2 * footprint.num_weights * len(contexts)
        seconds += max(size / bytes_per_s, flops / flops_per_s)
    return sum(job.max_tokens for job in jobs) / seconds
