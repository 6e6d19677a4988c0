"""ApiContext: what every route needs, made once and kept on the FastAPI app."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property

from fastapi import Request
from prometheus_client import CollectorRegistry

from app import __version__
from app.api import metrics
from app.api.errors import ApiError
from app.config import AppConfig
from engine import Engine


@dataclass(frozen=True)
class ApiContext:
    """The engine, the app's settings and what is derived from both."""

    engine: Engine
    config: AppConfig
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def system_fingerprint(self) -> str:
        """Equal fingerprints and equal seeds give equal texts."""
        config = self.engine.config
        parts = (__version__, config.model, config.dtype, config.device, config.load_format, config.seed)
        return "troupe-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @cached_property
    def _registry(self) -> CollectorRegistry:
        return metrics.make_registry(self.engine)

    def render_metrics(self) -> bytes:
        """The engine's counters as Prometheus reads them."""
        return metrics.render(self._registry)

    def check_model(self, name: str | None) -> str:
        """Return the served name.

        Raises:
            ApiError: 404 when another model is asked for.
        """
        served = self.engine.model_name
        if name is not None and name != served:
            message = f"the model {name[:200]!r} does not exist; this server has {served!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return served

    def require_ready(self) -> None:
        """Refuse at the door what the engine could not take.

        Raises:
            ApiError: 503 while the engine starts or restarts, and when it is gone.
        """
        state = self.engine.state
        if state != "ready":
            raise ApiError(
                503, f"the engine is {state}; try again later", code="engine_not_ready", retry_after_s=2
            )


def context_of(request: Request) -> ApiContext:
    """The dependency by which a route gets its context."""
    context = request.app.state.context
    assert isinstance(context, ApiContext)
    return context
