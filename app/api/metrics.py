"""EngineStats as Prometheus metrics: vLLM's names with the prefix `troupe:`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import Engine, EngineStats

PREFIX = "troupe:"
LABELS = ("model_name", "engine")
STATES = (
    "starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed",
)  # fmt: skip
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level

# name, EngineStats field, help
GAUGES = (
    ("num_requests_running", "num_running", "Requests in the running batch."),
    ("num_requests_waiting", "num_waiting", "Requests that wait to be scheduled."),
    (
        "num_requests_waiting_for_grammar",
        "num_waiting_for_grammar",
        "Requests that wait for a grammar to compile.",
    ),
    ("kv_cache_usage_perc", "kv_usage", "Share of the KV blocks in use; 1 is all of them."),
    ("kv_cache_blocks", "num_blocks", "KV cache blocks."),
    ("kv_cache_free_blocks", "num_free_blocks", "KV cache blocks no request owns."),
    ("kv_cache_cached_blocks", "num_cached_blocks", "KV cache blocks that a prefix can be found in."),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("kv_offload_loads", "kv_offload_loads", "Tokens of these hits copied back from host memory."),
    ("num_preemptions", "num_preemptions", "Times a running request lost its blocks."),
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("admission_rejections", "num_rejected", "Requests refused because the queue was full."),
    ("engine_restarts", "num_restarts", "Restarts after a crash."),
    ("requests_resumed", "num_resumed", "Requests that another replica continued."),
    (
        "requests_resumed_inexact",
        "num_resumed_inexact",
        "Requests that a replica with other weights, dtype or kernels continued.",
    ),
)
# name, ReplicaStats field, help; one value per replica
REPLICA_GAUGES = (
    ("replica_requests", "num_requests", "Requests sent to the replica and not finished."),
    ("replica_requests_running", "num_running", "Requests in the replica's running batch."),
    ("replica_kv_cache_usage_perc", "kv_usage", "Share of the replica's KV blocks in use; 1 is all of them."),
    ("replica_restarts", "num_restarts", "Restarts of the replica's process."),
)
HISTOGRAM_HELP = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "step_gap_seconds": (
        "From the end of a step behind which no other was queued to the start of the next, while there was work: "
        "how long the device waited. Steps that follow each other without such a gap are not counted."
    ),
    "event_loop_lag_seconds": "How late the event loop wakes up.",
    "grammar_compile_seconds": "Compiling one grammar.",
    "grammar_mask_seconds": "Filling the masks of one step.",
}


class EngineCollector(Collector):
    """Reads a snapshot of the engine whenever Prometheus asks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family of one snapshot."""
        stats = self.engine.stats()
        labels = (self.engine.model_name, "0")
        yield from self._plain(stats, labels)
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Finished requests by reason.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in stats.finished.items():
            finished.add_metric((*labels, reason), count)
        yield finished
        state = GaugeMetricFamily(
            PREFIX + "engine_state", "1 for the engine's state.", labels=(*LABELS, "state")
        )
        for name in STATES:
            state.add_metric((*labels, name), float(self.engine.state == name))
        yield state
        sleep = GaugeMetricFamily(
            PREFIX + "engine_sleep_state",
            "1 for how deep the engine sleeps.",
            labels=(*LABELS, "sleep_state"),
        )
        for level, name in enumerate(SLEEP_STATES):
            sleep.add_metric((*labels, name), float(self.engine.sleep_level == level))
        yield sleep
        yield from self._drafts(stats, labels)
        yield from self._replicas()
        yield from self._histograms(stats, labels)

    def _replicas(self) -> Iterator[Metric]:
        replicas = self.engine.describe_replicas()
        if not replicas:
            return
        is_ready = GaugeMetricFamily(
            PREFIX + "replica_ready", "1 if the replica accepts requests.", labels=LABELS
        )
        for each in replicas:
            is_ready.add_metric((self.engine.model_name, str(each.index)), float(each.state == "ready"))
        yield is_ready
        for name, field, text in REPLICA_GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            for each in replicas:
                gauge.add_metric((self.engine.model_name, str(each.index)), getattr(each, field))
            yield gauge

    def _drafts(self, stats: EngineStats, labels: tuple[str, str]) -> Iterator[Metric]:
        """Yield the counters of speculative decoding, by source of the drafts."""
        by_source = (*LABELS, "source")
        drafts = CounterMetricFamily(PREFIX + "spec_decode_num_drafts", "Verified drafts.", labels=by_source)
        tokens = CounterMetricFamily(
            PREFIX + "spec_decode_num_draft_tokens", "Tokens of verified drafts.", labels=by_source
        )
        accepted = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens", "Accepted draft tokens.", labels=by_source
        )
        positions = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            labels=(*by_source, "position"),
        )
        for source, counts in stats.drafts.items():
            drafts.add_metric((*labels, source), counts.num_drafts)
            tokens.add_metric((*labels, source), counts.num_draft_tokens)
            accepted.add_metric((*labels, source), sum(counts.accepted_per_position))
            for position, count in enumerate(counts.accepted_per_position):
                positions.add_metric((*labels, source, str(position)), count)
        yield from (drafts, tokens, accepted, positions)

    def _plain(self, stats: EngineStats, labels: tuple[str, str]) -> Iterator[Metric]:
        for name, field, text in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        for name, field, text in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric(labels, getattr(stats, field))
            yield counter

    def _histograms(self, stats: EngineStats, labels: tuple[str, str]) -> Iterator[Metric]:
        for name, histogram in stats.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAM_HELP.get(name, name), labels=LABELS)
            # Prometheus counts every value in all buckets above it, too
            total = 0
            buckets = []
            for bound, count in zip((*map(str, histogram.buckets), "+Inf"), histogram.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(labels, buckets, histogram.sum)
            yield family


def make_registry(engine: Engine) -> CollectorRegistry:
    """Return a separate registry, so that two servers in one process do not conflict."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return the text for Prometheus."""
    return generate_latest(registry)
