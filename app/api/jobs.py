"""/v1/jobs: progress and results of work in the background, its end, another try of failed rows, and its removal."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import ApiError, BadRequest
from app.api.responses.store import make_page
from app.store import Connection, Item, jobs, objects

Json = dict[str, Any]
Limit = Annotated[int, Query(ge=1, le=1000)]

router = APIRouter(route_class=JsonRoute)


async def add_job(context: ApiContext, owner: str, kind: str, body: Json, rows: Iterable[str]) -> Item:
    """Add a job, and let the work on it begin.

    Raises StoreFull: there is no room.
    """
    job_id = f"{'batch' if kind == 'batch' else 'job'}_{secrets.token_hex(16)}"
    job = await context.store.run(jobs.add_job, owner, job_id, {"kind": kind, **body}, rows)
    context.jobs.wake()
    return job


@router.get("/v1/jobs")
async def list_jobs(request: Request, context: Context, limit: Limit = 20, after: str | None = None) -> Json:
    """List the jobs, the latest changed first."""
    return await list_objects(context, request.state.info.owner, "job", limit, after, describe)


@router.get("/v1/jobs/{job_id}")
async def retrieve_job(job_id: str, request: Request, context: Context, after: int = 0, limit: Limit = 100) -> Json:
    """Return the progress of a job, and the rows that ended after the first `after`, as they ended."""

    def read(db: Connection) -> Json:
        job = find_object(db, request.state.info.owner, "job", job_id)
        rows = jobs.read_ended(db, job.number, after, limit)
        shown = [{"row": row.number, "state": row.state, "result": json.loads(row.result)} for row in rows]
        return describe(db, job) | {"rows": shown, "next": rows[-1].ended if rows else after}

    return await context.store.run(read)


@router.post("/v1/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, request: Request, context: Context) -> Json:
    """End the work on a job; rows that have ended stay."""
    return await cancel(context, request.state.info.owner, job_id)


@router.post("/v1/jobs/{job_id}/retry")
async def retry_job(job_id: str, request: Request, context: Context) -> Json:
    """Work on the rows that failed, and on those that a cancelled job left."""

    def retry(db: Connection) -> Json:
        job = find_object(db, request.state.info.owner, "job", job_id)
        if job.body["status"] in jobs.UNFINISHED:
            raise BadRequest(f"this job is {job.body['status']}: wait for its end, or cancel it", "job_id")
        jobs.retry_failed(db, job.number)
        return describe(db, find_object(db, request.state.info.owner, "job", job_id))

    described = await context.store.run(retry)
    context.jobs.wake()
    return described


@router.delete("/v1/jobs/{job_id}")
async def delete_job(job_id: str, request: Request, context: Context) -> Json:
    """End a job and delete it with its rows and their results."""
    owner = request.state.info.owner
    job = await context.store.run(find_object, owner, "job", job_id)
    await context.jobs.stop(job.number)
    await context.store.run(objects.delete, owner, "job", job_id)
    return {"id": job_id, "object": "job", "deleted": True}


async def cancel(context: ApiContext, owner: str, job_id: str) -> Json:
    """End the work on a job."""

    def end(db: Connection) -> Item:
        job = find_object(db, owner, "job", job_id)
        if job.body["status"] not in jobs.UNFINISHED:
            message = f"the job {job_id[:80]!r} is {job.body['status']}: only one that has not ended can be cancelled"
            raise BadRequest(message, "job_id")
        jobs.end_job(db, job.number, "cancelled")
        return job

    job = await context.store.run(end)
    await context.jobs.stop(job.number)
    return await context.store.run(lambda db: describe(db, find_object(db, owner, "job", job_id)))


def describe(db: Connection, job: Item) -> Json:
    """Return a job as the API shows it."""
    body = job.body
    return {
        "id": job.id, "object": "job", "kind": body["kind"], "status": body["status"], "model": body.get("model"),
        "created_at": int(job.created), "started_at": to_seconds(body.get("started")),
        "ended_at": to_seconds(body.get("ended")) if body["status"] not in jobs.UNFINISHED else None,
        "error": body.get("error"), "counts": jobs.count(db, job.number),
    }


def find_object(db: Connection, owner: str, kind: str, item_id: str) -> Item:
    """Return an object of the store.

    Raises ApiError: 404, there is no such object.
    """
    item = objects.get(db, owner, kind, item_id)
    if item is None:
        raise ApiError(404, f"there is no {kind} {item_id[:80]!r}", None, f"{kind}_not_found")
    return item


async def list_objects(
    context: ApiContext, owner: str, kind: str, limit: int, after: str | None,
    describe: Callable[[Connection, Item], Json], text: str = "", oldest_first: bool = False,
) -> Json:
    """Return a page of the owner's objects of a kind whose JSON contains a text, the latest changed first."""
    if not owner and not context.config.is_loopback:
        message = f"a {kind} is found by its id only: this server has no API keys, so it cannot tell whose it is"
        raise ApiError(403, message, code="list_not_allowed")

    def read(db: Connection) -> Json:
        if after is not None and objects.get(db, owner, kind, after) is None:
            raise BadRequest(f"after={after[:80]!r} must be the id of a {kind}", "after")
        found = objects.find(db, owner, kind, text=text, after=after, limit=limit + 1, oldest_first=oldest_first)
        return make_page([describe(db, item) for item in found[:limit]], len(found) > limit)

    return await context.store.run(read)


def to_seconds(moment: float | None) -> int | None:
    """Return a stored time as the API shows it."""
    return None if moment is None else int(moment)
