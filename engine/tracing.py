"""OpenTelemetry spans: one for each request, sent to the collector at `otlp_traces_endpoint`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

_EXPORTERS = {
    "http": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


class Tracer:
    """Reports the requests that have ended."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("troupe.engine")

    def report(self, output: RequestOutput, params: SamplingParams, counts: Sequence[int]) -> None:
        """Send the span of a request, with vLLM's names, as a part of the trace of the caller's context."""
        times, end, now = output.metrics, time.time_ns(), time.monotonic()
        values = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.cached_tokens": output.num_cached_tokens,
            "gen_ai.usage.completion_tokens": sum(counts),
            "gen_ai.usage.num_sequences": len(counts),
            "gen_ai.latency.time_in_queue": times.queue_time,
            "gen_ai.latency.time_to_first_token": times.ttft,
            "gen_ai.latency.e2e": now - times.arrival_time,
            "gen_ai.latency.time_in_model_prefill": _subtract(times.first_token_time, times.first_scheduled_time),
            "gen_ai.latency.time_in_model_decode": _subtract(times.last_token_time, times.first_token_time),
            "gen_ai.latency.time_in_model_inference": _subtract(times.last_token_time, times.first_scheduled_time),
        }
        found = {name: value for name, value in values.items() if value is not None}
        start = end - int((now - times.arrival_time) * 1e9)
        self._tracer.start_span("llm_request", attributes=found, start_time=start).end(end)

    def close(self) -> None:
        """Send the spans that are left. The SDK allows to call it twice."""
        self._provider.shutdown()


def make_tracer(config: EngineConfig) -> Tracer | None:
    """Return a tracer for the configured collector; None without one."""
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    kind = "http" if endpoint.rstrip("/").endswith("/v1/traces") else "grpc"
    try:
        sdk, exporting, resources = (
            importlib.import_module(f"opentelemetry.sdk.{name}") for name in ("trace", "trace.export", "resources")
        )
        exporter = importlib.import_module(_EXPORTERS[kind]).OTLPSpanExporter(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-{kind}: "
            f"pip install them ({error})"
        ) from error
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "troupe"}))
    provider.add_span_processor(exporting.BatchSpanProcessor(exporter))
    return Tracer(provider, config.model_name)


def _subtract(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start
