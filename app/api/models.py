"""GET /v1/models, and the routes for monitoring: health, probes, version, metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest

from app import __version__
from app.api.context import ASLEEP, ApiContext, Context, JsonRoute
from app.api.errors import scrub
from app.api.metrics import make_registry
from app.api.model_pool import ModelPool, Pool
from engine import CatalogueEntry

router = APIRouter(route_class=JsonRoute)
AnthropicVersion = Annotated[str | None, Header()]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/v1/models")
async def list_models(context: Context, pool: Pool, anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
    """List the models under each of their names, and adapters, in OpenAI's or Anthropic's format."""
    entries = await pool.list_entries()
    names = [*context.model_names, *entries]
    if anthropic_version is None:
        further = [describe_entry(pool, each) for each in entries.values()]
        return {"object": "list", "data": [describe_model(context, name) for name in context.model_names] + further}
    data = [describe_to_anthropic(context, name) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(
    model: str, context: Context, pool: Pool, anthropic_version: AnthropicVersion = None
) -> dict[str, Any]:
    """Return one model by name."""
    entry = await pool.find(model)
    if entry is None:
        context.check_model(model)
    if anthropic_version is not None:
        return describe_to_anthropic(context, model)
    return describe_model(context, model) if entry is None else describe_entry(pool, entry)


def describe_to_anthropic(context: ApiContext, name: str) -> dict[str, Any]:
    """Anthropic's model object."""
    created_at = datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    length = context.engine.resolved.max_model_len
    return {
        "type": "model", "id": name, "display_name": name, "created_at": created_at, "lifecycle": "active",
        "max_input_tokens": length, "max_tokens": length,
    }


def describe_model(context: ApiContext, name: str) -> dict[str, Any]:
    """OpenAI's model object with vLLM's max_model_len; the parent of an adapter is the model."""
    base, adapter = context.served_names[0], context.engine.adapters.find(name)
    return {
        "id": name, "object": "model", "created": context.created, "owned_by": "troupe",
        "root": base if adapter is None else adapter.path, "parent": None if adapter is None else base,
        "max_model_len": context.engine.resolved.max_model_len, "state": context.engine.state,
        "modalities": ["text", "image"] if context.engine.sees_images else ["text"],
    }


def describe_entry(pool: ModelPool, entry: CatalogueEntry) -> dict[str, Any]:
    """The same for a further model, which may not be loaded."""
    context, is_loading = pool.find_loaded(entry), entry.model in pool.slots
    if context is not None:
        return describe_model(context, entry.name) | {"root": context.served_names[0]}
    state = "loading" if is_loading else "broken" if entry.problem else "unloaded"
    return {
        "id": entry.name, "object": "model", "created": pool.first.created, "owned_by": "troupe", "root": entry.name,
        "parent": None, "max_model_len": entry.context_length, "state": state, "modalities": list(entry.modalities),
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
async def show_metrics(pool: Pool, prefix: Literal["troupe", "vllm"] = "troupe") -> Response:
    """The engines' counters in Prometheus' text format; with prefix=vllm the boards made for vLLM show them."""
    engines = [context.engine for context in pool.contexts]
    return Response(generate_latest(make_registry(engines, f"{prefix}:")), media_type=METRICS_TYPE)
