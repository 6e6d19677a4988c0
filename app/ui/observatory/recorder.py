"""Recorder: samples the engine ten times a second while a page polls, and keeps the last half minute.

page ──poll, once a second──▶ Recorder ──snapshot, only while polled──▶ engine
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from engine import Engine, EngineSnapshot, EngineStats, ReplicaStats, RequestView

SAMPLE_INTERVAL_S = 0.1
# Seconds without a poll after which recording stops.
PATIENCE_S = 3.0
WINDOW_S = 30.0
MAX_LANES = 24
MAX_CELLS = 1536
MAX_OWNERS = 12  # colours of the map; further owners reuse them

FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3


@dataclass(slots=True)
class Lane:
    """One request's phases: [phase, start, end] in seconds of the recorder's clock."""

    number: int
    segments: list[list[Any]] = field(default_factory=list)
    is_open: bool = True
    tip: str = ""
    hue: int | None = None  # colour of the outline, by adapter; None for the base model

    def extend(self, phase: str, now: float, since: float) -> None:
        """Record that the request was in this phase until now."""
        if self.segments and self.segments[-1][0] == phase:
            self.segments[-1][2] = now
        else:
            start = self.segments[-1][2] if self.segments else since
            self.segments.append([phase, start, now])


class Recorder:
    """Lanes of one engine, shared by every page that watches it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.clock = clock
        self.lanes: dict[int, Lane] = {}  # by handle
        self.num_lanes = 0
        self._polled = 0.0
        self._task: asyncio.Task[None] | None = None

    async def poll(self) -> dict[str, Any]:
        """Return everything that a page draws, as small JSON; keeps the recorder running for some seconds."""
        self._polled = self.clock()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._watch())
        snapshot = await self.engine.snapshot()
        self.sample(snapshot)
        now = self.clock()
        lanes = sorted(self.lanes.values(), key=lambda lane: lane.number)[-MAX_LANES:]
        return {
            "now": round(now, 3), "state": self.engine.state, "runs_on": describe_device(self.engine),
            "lanes": [_draw_lane(lane, now) for lane in lanes],
            "blocks": self._map_blocks(snapshot) if snapshot is not None else None,
            "limits": _limits(snapshot), "stats": describe_stats(self.engine.stats()),
            "replicas": [_draw_replica(each) for each in self.engine.describe_replicas()],
        }

    async def close(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while self.clock() - self._polled < PATIENCE_S:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self.sample(await self.engine.snapshot(with_blocks=False))

    def sample(self, snapshot: EngineSnapshot | None) -> None:
        """Take one sample."""
        now = self.clock()
        views = snapshot.requests if snapshot is not None else ()
        alive = set()
        for view in views:
            alive.add(view.handle)
            lane = self.lanes.get(view.handle)
            if lane is None:
                self.num_lanes += 1
                lane = self.lanes[view.handle] = Lane(self.num_lanes)
            # Its phases before the first sample are unknown, except its arrival.
            phase = "grammar" if view.phase == "decode" and view.has_grammar else view.phase
            lane.extend(phase, now, now - min(view.age_s, SAMPLE_INTERVAL_S))
            lane.tip = _describe(view)
            lane.hue = crc32(view.adapter.encode()) % 360 if view.adapter else None
        for handle, lane in list(self.lanes.items()):
            lane.is_open = handle in alive
            if not lane.is_open and lane.segments[-1][2] < now - WINDOW_S:
                del self.lanes[handle]

    def _map_blocks(self, snapshot: EngineSnapshot) -> dict[str, Any]:
        """Return the blocks up to the highest one in use, as runs of [kind, count]."""
        cells: dict[int, int] = dict.fromkeys(snapshot.cached_block_ids, CACHED)
        owned: set[int] = set()
        for view in snapshot.requests:
            colour = FIRST_OWNER + self.lanes[view.handle].number % MAX_OWNERS
            for block_id in view.block_ids:
                cells[block_id] = SHARED if block_id in owned else colour
                owned.add(block_id)
        top = max(cells, default=0)
        group = max(1, -(-top // MAX_CELLS))
        runs: list[list[int]] = []
        for start in range(1, top + 1, group):
            kind = max(cells.get(block_id, FREE) for block_id in range(start, min(start + group, top + 1)))
            if runs and runs[-1][0] == kind:
                runs[-1][1] += 1
            else:
                runs.append([kind, 1])
        return {
            "runs": runs, "group": group, "num_blocks": snapshot.num_blocks - 1, "num_owned": len(owned),
            "num_cached": len(snapshot.cached_block_ids), "block_size": snapshot.block_size,
        }


def _describe(view: RequestView) -> str:
    grammar = ", under a grammar" if view.has_grammar else ""
    adapter = f"{view.adapter}: " if view.adapter else ""
    preempted = f", preempted {view.num_preemptions}×" if view.num_preemptions else ""
    return (
        f"{adapter}prompt {view.num_prompt_tokens:,} ({view.num_cached_tokens:,} cached), "
        f"{view.num_output_tokens:,} written, computed {view.num_computed_tokens:,}{grammar}{preempted}"
    )


def _draw_lane(lane: Lane, now: float) -> dict[str, Any]:
    shown = [[phase, round(start - now, 3), round(end - now, 3)] for phase, start, end in lane.segments]
    return {"number": lane.number, "open": lane.is_open, "tip": lane.tip, "segments": shown, "hue": lane.hue}


def _draw_replica(replica: ReplicaStats) -> dict[str, Any]:
    hit_share = replica.num_hit_tokens / max(1, replica.num_queried_tokens)
    return {
        "state": replica.state, "requests": replica.num_requests, "running": replica.num_running,
        "kv_usage": replica.kv_usage, "hit_share": hit_share, "restarts": replica.num_restarts,
    }


def _limits(snapshot: EngineSnapshot | None) -> dict[str, int]:
    if snapshot is None:
        return {}
    return {"max_num_seqs": snapshot.max_num_seqs, "max_num_batched_tokens": snapshot.max_num_batched_tokens}


HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds",
    "lag": "event_loop_lag_seconds", "gap": "step_gap_seconds",
}


def describe_stats(stats: EngineStats) -> dict[str, Any]:
    """Return the counters and histograms that the page turns into rates and bars."""
    histograms = {}
    for name, full in HISTOGRAMS.items():
        histogram = stats.histograms.get(full)
        if histogram is not None:
            histograms[name] = {
                "buckets": histogram.buckets, "counts": histogram.counts, "sum": histogram.sum,
                "count": histogram.count,
            }
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "compiling": stats.num_waiting_for_grammar,
        "kv_usage": stats.kv_usage,
        "steps": stats.num_steps,
        "step_tokens": stats.num_step_tokens,
        "generated": stats.generation_tokens,
        "queried": stats.prefix_cache_queries,
        "hit": stats.prefix_cache_hits,
        # Tokens that the full groups had, and a group with a window, or the states, had not.
        "unused": [stats.prefix_cache_windowless, stats.prefix_cache_stateless],
        "tiers": [stats.kv_offload_loads, stats.kv_received_tokens, stats.kv_saved_tokens, stats.num_prefills],
        "preemptions": stats.num_preemptions,
        "rejected": stats.num_rejected,
        "restarts": stats.num_restarts,
        "resumed": stats.num_resumed,
        # Source -> verified drafts, drafted tokens, accepted tokens.
        "drafts": {
            name: (each.num_drafts, each.num_draft_tokens, sum(each.accepted_per_position))
            for name, each in stats.drafts.items()
        },
        "histograms": histograms,
    }


def describe_device(engine: Engine) -> list[str]:
    """Return the device, and the dtype with the kernels that the self-check replaced by slower ones."""
    if engine.state in ("new", "starting"):
        return ["", ""]
    replaced = str(engine.describe_runtime().get("replaced_kernels", ""))
    weights = f"computes in {engine.resolved.worker.dtype}"
    return [engine.resolved.worker.device, f"{weights}; replaced: {replaced}" if replaced else weights]
