"""Admin routes. They exist only if an admin key is set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from app import __version__
from app.api.call import list_request_ids
from app.api.context import ApiContext, JsonRoute, context_of
from app.api.errors import ApiError, BadRequest, scrub
from app.api.gate import find_key, read_keys
from app.api.model_pool import Pool
from app.api.models import describe_model
from app.api.protocol import Fields
from engine import EngineDead


class Sleeping(BaseModel):
    """Reply of the sleep routes."""

    is_sleeping: bool


class AdminBody(Fields):
    """The body of an admin route, which has no unknown field."""

    CONSTRAINTS = None


class AbortBody(AdminBody):
    """POST /abort_requests. The ids are those of the replies."""

    request_ids: Annotated[list[str], Field(min_length=1, max_length=1024)]


class LoadAdapterBody(AdminBody):
    """POST /v1/load_lora_adapter, under vLLM's names."""

    lora_name: str
    lora_path: str
    # allows an adapter of this name to exist; its running requests finish with the old one
    load_inplace: bool = False


class UnloadAdapterBody(AdminBody):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


def require_admin(request: Request, context: Annotated[ApiContext, Depends(context_of)]) -> ApiContext:
    """Accept requests with the admin key and only the query parameters of the route."""
    key = context.config.admin_key
    if key is None:
        raise ApiError(
            404, "admin routes are off; the server was started without an admin key", code="route_not_found"
        )
    if not any(find_key(given, (key.encode(),)) for given in read_keys(dict(request.headers.raw))):
        raise ApiError(401, "this route needs the admin key", code="invalid_api_key")
    _check_query(request)
    return context


def _check_query(request: Request) -> None:
    known = [param.alias for param in request.scope["route"].dependant.query_params]
    wrong = next((name for name in request.query_params if name not in known), None)
    if wrong is not None:
        hint = f"known are {', '.join(known)}" if known else "this route has none"
        raise BadRequest(f"{wrong[:80]} is not a known query parameter; {hint}", wrong[:80], "unknown_field")


router = APIRouter(route_class=JsonRoute)
Json = dict[str, Any]
Context = Annotated[ApiContext, Depends(require_admin)]


@router.get("/server_info")
async def show_server(context: Context) -> Json:
    """Show the resolved settings and the ops that steps use now, without keys. Also answers during a sleep.

    `config` is what was set, with every "auto" filled in before the first step: attention_backend and num_threads there
    are torch's. Where `runtime` names native ops, these attend, on threads of their own.
    """
    if context.engine.state != "sleeping":
        context.require_ready()
    hidden = {"api_key", "admin_key"}
    settings = {name: value for name, value in asdict(context.config).items() if name not in hidden}
    return {
        "version": __version__, "model": context.engine.model_name, "state": context.engine.state,
        "config": {"engine": asdict(context.engine.resolved), "app": settings},
        "runtime": context.engine.describe_runtime(),
        "timeline": [{"phase": phase, "seconds": round(s, 3)} for phase, s in context.engine.timeline],
    }


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(context: Context) -> Json:
    """Forget all cached prefixes; false while requests own blocks."""
    context.require_ready()
    return {"is_reset": await context.engine.reset_prefix_cache()}


@router.post("/sleep")
async def sleep(
    context: Context, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["wait", "abort"] = "wait"
) -> Sleeping:
    """Free the KV cache (level 1), or the weights as well (level 2). Answers when the engine sleeps.

    New requests get a 503. Running requests finish first, or end with finish_reason abort if mode is abort.
    Returns false if a wake-up arrived before they had finished.
    """
    return Sleeping(is_sleeping=await context.engine.sleep(level, drain=mode == "wait"))


@router.post("/wake_up")
async def wake_up(context: Context, tags: str | None = None) -> Sleeping:
    """End a sleep, or cancel one that still waits. Answers when the engine accepts requests."""
    if tags is not None:
        raise BadRequest("tags is not supported: weights and cache wake up together", "tags", "unsupported_field")
    try:
        await context.engine.wake_up()
    except EngineDead as error:
        raise ApiError(500, scrub(str(error)), code="wake_up_failed") from error
    return Sleeping(is_sleeping=False)


@router.get("/is_sleeping")
async def is_sleeping(context: Context) -> Sleeping:
    """Return whether the engine sleeps; false until a sleep has completed."""
    return Sleeping(is_sleeping=context.engine.state == "sleeping")


@router.get("/replicas")
async def list_replicas(context: Context) -> Json:
    """List state, load and prefix cache of each replica; empty if the model runs in the server's process."""
    return describe_replicas(context)


def describe_replicas(context: ApiContext) -> Json:
    return {"replicas": [asdict(each) for each in context.engine.describe_replicas()]}


@router.post("/replicas/{index}/drain")
async def drain_replica(context: Context, index: int) -> Json:
    """Move a replica's requests to the others, where they continue, and give it no new ones."""
    await context.engine.drain_replica(index)
    return describe_replicas(context)


@router.post("/replicas/{index}/undrain")
async def undrain_replica(context: Context, index: int) -> Json:
    """Give new requests to a drained replica again."""
    await context.engine.undrain_replica(index)
    return describe_replicas(context)


@router.post("/replicas/{index}/restart")
async def restart_replica(context: Context, index: int) -> Json:
    """Drain a replica and start its process anew; answers when it is ready. No request is lost."""
    await context.engine.restart_replica(index)
    return describe_replicas(context)


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterBody, context: Context) -> Json:
    """Load an adapter from a folder within --lora-root, and serve it as a model of that name."""
    context.require_ready()
    if body.lora_name in context.served_names:
        raise BadRequest(f"lora_name={body.lora_name!r} is a name of the model", "lora_name")
    roots = context.engine.config.lora_root
    await context.engine.adapters.load(body.lora_name, body.lora_path, body.load_inplace, roots)
    return describe_model(context, body.lora_name)


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterBody, context: Context) -> Json:
    """Unload an adapter. Its name is free at once; answers when its last request has ended."""
    await context.engine.adapters.unload(body.lora_name)
    return {"id": body.lora_name, "object": "model", "deleted": True}


@router.post("/abort_requests")
async def abort_requests(body: AbortBody, context: Context, pool: Pool) -> Json:
    """End requests; their clients get finish_reason abort. Unknown ids are ignored."""
    aborted: list[str] = []
    unknown: list[str] = []
    for reply_id in body.request_ids:
        request_ids = list_request_ids(reply_id)
        (unknown if context.open_requests.isdisjoint(request_ids) else aborted).append(reply_id)
        for request_id in request_ids:
            await pool.abort(request_id)
    return {"aborted": aborted, "unknown": unknown}
