"""GET /v1/models, and the routes for monitoring: health, probes, version, metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from app import __version__
from app.api.context import ASLEEP, ApiContext, Context, JsonRoute
from app.api.errors import scrub

router = APIRouter(route_class=JsonRoute)
AnthropicVersion = Annotated[str | None, Header()]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/v1/models")
async def list_models(context: Context, anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
    """List the model under each of its names, and its adapters, in OpenAI's or Anthropic's format."""
    names = context.model_names
    if anthropic_version is None:
        return {"object": "list", "data": [describe_model(context, name) for name in names]}
    data = [describe_to_anthropic(context, name) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, context: Context, anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
    """Return one model by name."""
    context.check_model(model)
    return describe_model(context, model) if anthropic_version is None else describe_to_anthropic(context, model)


def describe_to_anthropic(context: ApiContext, name: str) -> dict[str, Any]:
    """Anthropic's model object."""
    created_at = datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created_at}


def describe_model(context: ApiContext, name: str) -> dict[str, Any]:
    """OpenAI's model object with vLLM's max_model_len; the parent of an adapter is the model."""
    base, adapter = context.served_names[0], context.engine.adapters.find(name)
    return {
        "id": name, "object": "model", "created": context.created, "owned_by": "troupe",
        "root": base if adapter is None else adapter.path, "parent": None if adapter is None else base,
        "max_model_len": context.engine.resolved.max_model_len,
    }


def describe_health(context: ApiContext, is_ok: bool) -> JSONResponse:
    """Return 200 or 503 with the engine's state, and the cause after a crash."""
    state = context.engine.state
    cause = None if state == "ready" else context.engine.error
    error = {} if cause is None else {"error": scrub(cause)}
    return JSONResponse({"status": "ok" if is_ok else state, "state": state, **error}, 200 if is_ok else 503)


@router.get("/health")
@router.get("/ping")
async def check_health(context: Context) -> JSONResponse:
    """200 while the engine is alive, asleep or not, as of vLLM; 503 while it starts or restarts, or is dead."""
    return describe_health(context, context.engine.state in ("ready", *ASLEEP))


@router.get("/livez")
async def check_liveness(context: Context) -> JSONResponse:
    """503 when only a restart of the server helps, else 200: the liveness probe of Kubernetes."""
    return describe_health(context, context.engine.state not in ("dead", "closed"))


@router.get("/readyz")
async def check_readiness(context: Context) -> JSONResponse:
    """200 when the engine takes requests, else 503: the readiness probe of Kubernetes."""
    return describe_health(context, context.engine.state == "ready")


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(context: Context, prefix: Literal["troupe", "vllm"] = "troupe") -> Response:
    """The engine's counters in Prometheus' text format; with prefix=vllm the boards made for vLLM show them."""
    return Response(context.render_metrics(prefix), media_type=METRICS_TYPE)
