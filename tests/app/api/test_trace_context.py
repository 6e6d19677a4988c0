"""The header `traceparent` of a request makes its spans a part of the caller's trace."""

from typing import Any

from opentelemetry import trace

from app.api.trace_context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_request_runs_in_the_trace_of_its_caller() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(trace.get_current_span().get_span_context())

    middleware = TraceContext(app)
    for headers in ([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())], []):
        await middleware({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert (format(seen[0].trace_id, "032x"), format(seen[0].span_id, "016x")) == (TRACE, SPAN)
    assert not seen[1].is_valid and not trace.get_current_span().get_span_context().is_valid
