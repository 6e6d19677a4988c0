"""TraceContext: lets requests run in the OpenTelemetry trace that their header `traceparent` names."""

from __future__ import annotations

import importlib

from starlette.types import ASGIApp, Receive, Scope, Send


class TraceContext:
    """ASGI middleware; spans that begin during a request are parts of the caller's trace."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # By name: opentelemetry is an optional package.
        self._context, self._propagate = (
            importlib.import_module(f"opentelemetry.{name}") for name in ("context", "propagate")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        token = self._context.attach(self._propagate.extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            self._context.detach(token)
