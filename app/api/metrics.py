"""EngineStats as Prometheus metrics: vLLM's names with the prefix `troupe:`, or `vllm:` for its Grafana boards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import Engine, EngineStats, list_metrics

LABELS = ("model_name", "engine")
Values = Mapping[Any, float]  # by a tuple of labels
STATES = ("starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level

# name, ReplicaStats field, help; one value per replica
REPLICA_GAUGES = (
    ("replica_requests", "num_requests", "Requests sent to the replica and not finished."),
    ("replica_requests_running", "num_running", "Requests in the replica's running batch."),
    ("replica_kv_cache_usage_perc", "kv_usage", "Share of the replica's KV blocks in use; 1 is all of them."),
    ("replica_restarts", "num_restarts", "Restarts of the replica's process."),
)


class EngineCollector(Collector):
    """Reads a snapshot of the engine whenever Prometheus asks."""

    def __init__(self, engine: Engine, prefix: str) -> None:
        self.engine = engine
        self.prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family of one snapshot."""
        stats, state, depth = self.engine.stats(), self.engine.state, self.engine.sleep_level
        replicas = self.engine.replica_stats()
        for field, kind, name, text in list_metrics():
            values: Values = {("0",): getattr(stats, field)}
            if len(replicas) > 1 and all(hasattr(each, field) for each in replicas.values()):
                values = {(str(index),): getattr(each, field) for index, each in replicas.items()}
            yield self._make(GaugeMetricFamily if kind == "gauge" else CounterMetricFamily, name, text, values)
        yield self._cache_config()
        yield self._lora()
        finished = {(reason,): count for reason, count in stats.finished.items()}
        yield self._counter("request_success", "Finished requests by reason.", finished, "finished_reason")
        states = {(name,): state == name for name in STATES}
        yield self._gauge("engine_state", "1 for the engine's state.", states, "state")
        sleeps = {(name,): depth == level for level, name in enumerate(SLEEP_STATES)}
        yield self._gauge("engine_sleep_state", "1 for how deep the engine sleeps.", sleeps, "sleep_state")
        yield from self._drafts(stats)
        yield from self._replicas()
        yield from self._histograms(stats)

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._make(GaugeMetricFamily, name, text, {("0", *key): each for key, each in values.items()}, *labels)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._make(CounterMetricFamily, name, text, {("0", *key): each for key, each in values.items()}, *labels)

    def _make(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, values: Values, *labels: str
    ) -> Metric:
        """Return a family of values by replica and further labels."""
        family = kind(self.prefix + name, text, labels=(*LABELS, *labels))
        for key, value in values.items():
            family.add_metric((self.engine.model_name, *key), float(value))
        return family

    def _cache_config(self) -> Metric:
        config = self.engine.config
        values = {
            "block_size": config.block_size, "cache_dtype": config.kv_cache_dtype,
            "num_gpu_blocks": self.engine.stats().num_blocks, "gpu_memory_utilization": config.memory_share,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        text = "Settings of the KV cache, as labels."
        return self._gauge("cache_config_info", text, {tuple(map(str, values.values())): 1}, *values)

    def _lora(self) -> Metric:
        names = ",".join(self.engine.adapters.list_used())
        text = "Adapters of the requests that have not ended, as a label; the value is the time of day."
        values = {(str(self.engine.config.max_loras), names): time.time()}
        return self._gauge("lora_requests_info", text, values, "max_lora", "running_lora_adapters")

    def _replicas(self) -> Iterator[Metric]:
        """Yield one value per replica, whose number is the label `engine`."""
        replicas = self.engine.describe_replicas()
        rows = [("replica_ready", "1 if the replica accepts requests.", [r.state == "ready" for r in replicas])]
        rows += [(name, text, [getattr(r, field) for r in replicas]) for name, field, text in REPLICA_GAUGES]
        for name, text, values in rows if replicas else ():
            keys = [(str(replica.index),) for replica in replicas]
            yield self._make(GaugeMetricFamily, name, text, dict(zip(keys, values, strict=True)))

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the counters of speculative decoding, by source of the drafts."""
        drafts = {(name,): each.num_drafts for name, each in stats.drafts.items()}
        tokens = {(name,): each.num_draft_tokens for name, each in stats.drafts.items()}
        accepted = {(name,): sum(each.accepted_per_position) for name, each in stats.drafts.items()}
        positions = {
            (name, str(position)): count
            for name, each in stats.drafts.items()
            for position, count in enumerate(each.accepted_per_position)
        }
        kind = "spec_decode_num_"
        yield self._counter(f"{kind}drafts", "Verified drafts.", drafts, "source")
        yield self._counter(f"{kind}draft_tokens", "Tokens of verified drafts.", tokens, "source")
        yield self._counter(f"{kind}accepted_tokens", "Accepted draft tokens.", accepted, "source")
        text = "Accepted draft tokens by position in the draft."
        yield self._counter(f"{kind}accepted_tokens_per_pos", text, positions, "source", "position")

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        for name, histogram in stats.histograms.items():
            family = HistogramMetricFamily(self.prefix + name, histogram.help or name, labels=LABELS)
            # Prometheus counts every value in all buckets above it, too
            bounds = (*map(str, histogram.buckets), "+Inf")
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric((self.engine.model_name, "0"), buckets, histogram.sum)
            yield family


class PoolCollector(Collector):
    """The metrics of several engines; the label model_name says whose they are."""

    def __init__(self, engines: Sequence[Engine], prefix: str) -> None:
        self.collectors = [EngineCollector(engine, prefix) for engine in engines]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family once, with the samples of all engines."""
        families: dict[str, Metric] = {}
        for collector in self.collectors:
            for family in collector.collect():
                if (known := families.get(family.name)) is None:
                    families[family.name] = family
                else:
                    known.samples += family.samples
        yield from families.values()


def make_registry(engines: Sequence[Engine], prefix: str = "troupe:") -> CollectorRegistry:
    """Return a separate registry, so that two servers in one process do not conflict."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolCollector(engines, prefix))
    return registry
