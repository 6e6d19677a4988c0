"""Logs a line about load and speed every 10 s, while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine.metrics import EngineStats

logger = logging.getLogger("troupe.engine")

INTERVAL_S = 10.0


async def log_stats(read_stats: Callable[[], EngineStats]) -> None:
    """Log a line every interval in which there was work; never returns."""
    before, then = read_stats(), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        stats, now = read_stats(), time.monotonic()
        if stats.num_unfinished or stats.num_steps > before.num_steps:
            logger.info("%s", describe_load(before, stats, now - then))
        before, then = stats, now


def describe_load(before: EngineStats, stats: EngineStats, elapsed_s: float) -> str:
    """Return the line: tokens per second since `before`, and the load now."""

    def rate(name: str) -> float:
        return (getattr(stats, name) - getattr(before, name)) / elapsed_s

    num_queried = stats.prefix_cache_queries - before.prefix_cache_queries
    hits = (stats.prefix_cache_hits - before.prefix_cache_hits) / num_queried if num_queried else 0.0
    return (
        f"prompt {rate('prompt_tokens'):.1f} tokens/s, output {rate('generation_tokens'):.1f} tokens/s, "
        f"running {stats.num_running}, waiting {stats.num_waiting + stats.num_waiting_for_grammar}, "
        f"KV cache {stats.kv_usage:.1%}, prefix cache hits {hits:.1%}"
    )
