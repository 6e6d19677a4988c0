"""ApiContext: what every route needs, made once and kept on the FastAPI app."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from app import __version__
from app.api.documents import DocumentReader
from app.api.errors import RETRY_AFTER_S, ApiError
from app.api.responses.store import ResponseStore
from app.config import AppConfig
from app.extraction.reading import read_apart
from app.job_runner import JobRunner
from app.json_text import parse_json
from app.store import Store
from app.template_facts import TemplateFacts, read_template
from engine import Embedder, Engine, LoRARequest, ModelReport, read_sampling_defaults

ASLEEP = ("falling_asleep", "sleeping", "waking_up")
MAX_BYTES_ON_LOOP = 2**14  # larger bodies are parsed in a thread: 50 kB with 64 tools take 3 ms
ADVICE = {
    "falling_asleep": "it finishes the requests it has and takes no new ones",
    "sleeping": "its administrator can wake it up",
    "dead": "its administrator must restart the server",
}


@dataclass(frozen=True)
class ApiContext:
    """The engine, the app's settings and what is derived from both.

    Attributes:
        open_requests: ids of the engine's requests that a reply of this API waits for.
        store: what survives a restart; in memory if none is given.
    """

    engine: Engine
    config: AppConfig
    created: int = field(default_factory=lambda: int(time.time()))
    open_requests: set[str] = field(default_factory=set, compare=False)
    store: Store = field(default_factory=Store, compare=False)

    @cached_property
    def system_fingerprint(self) -> str:
        """Equal fingerprints and equal seeds give equal texts."""
        config = self.engine.config
        parts = (__version__, config.model, config.dtype, config.device, config.load_format, config.seed)
        return "troupe-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model, the first of which replies carry unless the request has another."""
        names = (self.engine.model_name, *self.engine.config.served_names[1:])
        aliases = self.config.read_aliases().items()
        return names + tuple(
            name for name, model in aliases if model in (*names, self.engine.config.model) and name not in names
        )

    @cached_property
    def responses(self) -> ResponseStore:
        """What POST /v1/responses made."""
        return ResponseStore(self.store)

    @cached_property
    def jobs(self) -> JobRunner:
        """Works on the jobs of the store."""
        return JobRunner(self.store, self.engine)

    @cached_property
    def embedder(self) -> Embedder:
        """Makes embeddings and scores with the engine."""
        return Embedder(self.engine)

    @cached_property
    def documents(self) -> DocumentReader:
        """Reads the files in messages."""
        return DocumentReader(self.store)

    @cached_property
    def template(self) -> TemplateFacts:
        """What the model's chat template supports."""
        return read_template(self.engine.tokenizer, self.config.tool_call_parser)

    @cached_property
    def report(self) -> ModelReport:
        """What is known about the model, once the engine has started."""
        return self.engine.describe_model()

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling fields of requests that do not have them."""
        config = self.engine.config
        return read_sampling_defaults(config.model, config.generation_config)

    def warm_up(self) -> None:
        """Compute what requests need, once the engine has started."""
        _ = (self.template, self.sampling_defaults, self.report)

    def check_model(self, name: str | None) -> str:
        """Return the name of the requested model or adapter."""
        if name is not None and name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            message = f"the model {name[:200]!r} does not exist; this server has {served}"
            raise ApiError(404, message, "model", "model_not_found")
        return name or self.served_names[0]

    @property
    def model_names(self) -> list[str]:
        return [*self.served_names, *(ref.name for ref in self.engine.adapters.refs)]

    def select_adapter(self, name: str) -> LoRARequest | None:
        """Return the adapter of a name from `check_model`; None for the base model."""
        return None if name in self.served_names else LoRARequest(name)

    def require_ready(self) -> None:
        """Reject the request if the engine cannot accept any."""
        state = self.engine.state
        if state != "ready":
            code = "engine_sleeping" if state in ASLEEP else "engine_not_ready"
            message = f"the engine is {state.replace('_', ' ')}; {ADVICE.get(state, 'try again later')}"
            raise ApiError(503, message, code=code, retry_after_s=RETRY_AFTER_S)


class JsonRequest(Request):
    """A request whose JSON body is parsed once, a large one in a thread."""

    async def json(self) -> Any:
        """Return the value of the body.

        Raises RefusedJson: as `parse_json`.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            is_large = len(body) > MAX_BYTES_ON_LOOP
            self._json = await read_apart("", parse_json, body) if is_large else parse_json(body)
        return self._json


class JsonRoute(APIRoute):
    """A route that parses its body before FastAPI does, which would hide the errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler of the route, which finds the value of the body."""
        handler, has_body = super().get_route_handler(), self.body_field is not None

        async def handle(given: Request) -> Response:
            request = JsonRequest(given.scope, given.receive)
            # A body that no route waits for may never come.
            if has_body and await request.body() and "json" in request.headers.get("content-type", "").lower():
                await request.json()
            return await handler(request)

        return handle


def context_of(request: Request) -> ApiContext:
    """The dependency by which a route gets its context: that of the model which the request names."""
    context = getattr(request.state, "context", request.app.state.context)
    assert isinstance(context, ApiContext)
    return context


Context = Annotated[ApiContext, Depends(context_of)]
