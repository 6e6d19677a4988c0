"""Routes of the operator that load, end and fetch models, and Ollama's /api/pull, which fetches, too."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from app.api.admin import AdminBody, require_admin
from app.api.context import Context, JsonRoute
from app.api.errors import ApiError, BadRequest, scrub
from app.api.model_pool import ModelPool, Pool
from app.api.models import describe_entry, describe_model
from app.api.ollama.request import Pull
from app.api.ollama.writer import make_line
from app.api.sse import Emit, JsonLines, drop
from engine import ConfigError

router = APIRouter(route_class=JsonRoute)
Json = dict[str, Any]
REPORT_S = 0.5  # between two lines about the progress of a fetch


class ModelBody(AdminBody):
    """The model that a route is about."""

    model: str


@router.post("/models/load", dependencies=[Depends(require_admin)])
async def load_model(body: ModelBody, context: Context, pool: Pool) -> Json:
    """Load a model, or wake it up. Answers when it takes requests."""
    entry = await pool.find(body.model)
    async with pool.hold(entry):
        if entry is not None:
            return describe_entry(pool, entry)
        return describe_model(context, context.check_model(body.model))


@router.post("/models/unload", dependencies=[Depends(require_admin)])
async def unload_model(body: ModelBody, context: Context, pool: Pool) -> Json:
    """End a model when its requests have ended; `unloaded` is false if it was not loaded."""
    entry = await pool.find(body.model)
    if entry is None or entry.model in pool.kept:
        if entry is None:
            context.check_model(body.model)
        raise BadRequest(f"model={body.model!r} stays for as long as the server runs", "model")
    return {"id": entry.name, "object": "model", "unloaded": await pool.unload(entry)}


@router.post("/models/fetch", dependencies=[Depends(require_admin)])
async def fetch_model(body: ModelBody, pool: Pool) -> Json:
    """Fetch a model as `troupe models fetch` does. Answers when it is here."""
    return describe_entry(pool, await fetch(pool, body.model, []))


@router.post("/api/pull")
async def pull_model(body: Pull, request: Request, context: Context, pool: Pool) -> Response:
    """Ollama's route: fetch a model, with lines of progress. What is not here yet needs the admin key."""
    name = (body.model or body.name or "").removesuffix(":latest")
    if not name:
        raise BadRequest("model is required", "model", "missing_field")
    if name not in context.model_names:
        found = pool.catalogue.find(name) if pool.serves_several else None
        if found is None or not found.is_here:
            require_admin(request, context)

    async def produce(emit: Emit) -> None:
        await emit(make_line({"status": "pulling manifest"}))
        if name not in context.model_names:
            progress: list[tuple[int, int]] = []
            work = asyncio.ensure_future(fetch(pool, name, progress))
            while not (await asyncio.wait([work], timeout=REPORT_S))[0]:
                for done, total in progress[-1:]:
                    line = {"status": f"pulling {name}", "digest": name, "total": total, "completed": done}
                    await emit(make_line(line))
            await work
        await emit(make_line({"status": "success"}))

    if body.stream:
        return JsonLines(produce, b"", frame_error=lambda error: make_line(error.ollama_body))
    await produce(drop)
    return JSONResponse({"status": "success"})


async def fetch(pool: ModelPool, name: str, progress: list[tuple[int, int]]) -> Any:
    """Fetch a model in a thread; the pairs of bytes here and of the whole are appended to `progress`."""
    try:
        return await asyncio.to_thread(pool.catalogue.fetch, name, lambda *pair: progress.append(pair))
    except ConfigError as error:
        raise ApiError(502, scrub(str(error)), "model", "model_fetch_failed") from error
