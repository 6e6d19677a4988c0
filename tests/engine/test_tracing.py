"""Spans of requests, by the SDK of OpenTelemetry with an exporter in memory."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine import ConfigError, EngineConfig, RequestMetrics, RequestOutput, SamplingParams
from engine.tracing import Tracer, make_tracer


def test_a_request_becomes_a_span_of_the_callers_trace() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    output = RequestOutput("req-1", None, [1, 2, 3], [], True, 2, metrics=RequestMetrics(1.0, 2.0, 4.0, 7.0))
    tracer = Tracer(provider, "demo")
    with provider.get_tracer("test").start_as_current_span("http") as parent:
        tracer.report(output, SamplingParams(n=2, max_tokens=None), [4, 2])
    span = exporter.get_finished_spans()[0]
    assert span.name == "llm_request" and span.parent == parent.get_span_context()
    assert span.end_time is not None and span.start_time is not None and span.end_time > span.start_time
    assert dict(span.attributes or {}).items() >= {
        "gen_ai.response.model": "demo", "gen_ai.request.id": "req-1", "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.cached_tokens": 2, "gen_ai.usage.completion_tokens": 6,
        "gen_ai.latency.time_in_queue": 1.0, "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_model_decode": 3.0,
    }.items()  # fmt: skip
    assert "gen_ai.request.max_tokens" not in (span.attributes or {})
    tracer.close()
    tracer.report(output, SamplingParams(), [1])
    assert trace.get_current_span() is trace.INVALID_SPAN and len(exporter.get_finished_spans()) == 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc"):
        make_tracer(EngineConfig(otlp_traces_endpoint="http://localhost:4317"))
