"""/v1/files and /v1/batches, as OpenAI's clients use them. A batch is a job, and its results are two files."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import secrets
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import Response, StreamingResponse

from app.api.batch import ROUTES, check_lines
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import FOR_ANTHROPIC, ApiError, BadRequest
from app.api.fields import warn
from app.api.jobs import add_job, cancel, find_object, list_objects, to_seconds
from app.api.model_pool import Pool
from app.api.protocol import Fields
from app.store import Connection, Item, jobs, objects

Json = dict[str, Any]
MAX_NAME_CHARS = 200
ROWS_AT_ONCE = 500
Limit = Annotated[int, Query(ge=1, le=10_000)]
# status of a job -> status of a batch
STATUSES = {"queued": "validating", "running": "in_progress"}

router = APIRouter(route_class=JsonRoute)


Purpose = Literal["batch", "assistants", "fine-tune", "vision", "user_data", "evals"]  # all are kept alike


class BatchRequest(Fields):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = None


@router.post("/v1/files")
async def upload_file(
    request: Request, context: Context, file: UploadFile, purpose: Annotated[Purpose | None, Form()] = None
) -> Json:
    """Keep a file."""
    if purpose is None and not FOR_ANTHROPIC.get():
        raise BadRequest("purpose is required", "purpose", "missing_field")
    for field in (await request.form()).keys() - {"file", "purpose"}:
        warn(f"{field[:MAX_NAME_CHARS]} is not known here and was left out")
    describe = choose_format()
    name = PurePath(file.filename or "file").name[-MAX_NAME_CHARS:]
    file_id = f"file-{secrets.token_hex(16)}"
    owner, data = request.state.info.owner, await file.read()

    def keep(db: Connection) -> Json:
        body = {"filename": name, "purpose": purpose or "user_data", "bytes": len(data)}
        objects.put(db, owner, "file", file_id, body, data=data)
        return describe(db, find_object(db, owner, "file", file_id))

    return await context.store.run(keep)


@router.get("/v1/files")
async def list_files(
    request: Request, context: Context, limit: Limit = 10_000, after: str | None = None,
    order: Literal["asc", "desc"] = "desc", after_id: str | None = None,
) -> Json:
    """List the files, the latest first; after_id is Anthropic's name of after."""
    owner, is_asc = request.state.info.owner, order == "asc"
    return await list_objects(
        context, owner, "file", limit, after or after_id, choose_format(), oldest_first=is_asc
    )


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, request: Request, context: Context) -> Json:
    """Return the name and the size of a file."""
    describe = choose_format()
    return await context.store.run(
        lambda db: describe(db, find_object(db, request.state.info.owner, "file", file_id))
    )


@router.get("/v1/files/{file_id}/content", response_model=None)
async def read_file(file_id: str, request: Request, context: Context) -> Response:
    """Return the content of a file."""
    owner = request.state.info.owner
    file = await context.store.run(find_object, owner, "file", file_id)
    if "job" in file.body:
        return StreamingResponse(_read_rows(context, file), media_type="application/octet-stream")
    data = await context.store.run(objects.get_data, owner, "file", file_id)
    return Response(data, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request, context: Context) -> Json:
    """Delete a file; of a batch's output, its results."""

    def remove(db: Connection) -> None:
        file = find_object(db, request.state.info.owner, "file", file_id)
        if "job" in file.body:
            jobs.forget_results(db, file.body["job"], file.body["state"])
        objects.delete(db, request.state.info.owner, "file", file_id)

    await context.store.run(remove)
    if FOR_ANTHROPIC.get():
        return {"id": file_id, "type": "file_deleted"}
    return {"id": file_id, "object": "file", "deleted": True}


@router.post("/v1/batches")
async def create_batch(body: BatchRequest, request: Request, context: Context, pool: Pool) -> Json:
    """Begin to answer the rows of a file."""
    owner = request.state.info.owner
    if body.endpoint not in ROUTES:
        raise BadRequest(f"endpoint={body.endpoint[:80]!r} must be one of {', '.join(ROUTES)}", "endpoint")
    data = await context.store.run(objects.get_data, owner, "file", body.input_file_id)
    if data is None:
        message = f"there is no file {body.input_file_id[:80]!r} that can be a batch's input"
        raise BadRequest(message, "input_file_id", "file_not_found")
    checked = await asyncio.to_thread(lambda: list(check_lines(data.splitlines(), "line ", body.endpoint)))
    rows = [each for each in checked if isinstance(each, dict)]
    problems = [each for each in checked if isinstance(each, str)]
    if problems or not rows:
        shown = "; ".join(problems[:5]) or "it has no rows"
        raise BadRequest(f"this file cannot be used: {shown}", "input_file_id", "invalid_file")
    models = {json.dumps(row["body"].get("model")) for row in rows if isinstance(row.get("body"), dict)}
    named = json.loads(models.pop()) if len(models) == 1 else None
    # A batch for one of this server's models waits for it after a restart; any other name fails in its rows.
    more = {"model": named} if named in [*context.model_names, *await pool.list_entries()] else {}
    asked = body.model_dump(include={"input_file_id", "endpoint", "completion_window", "metadata"})
    job = await add_job(context, owner, "batch", {**asked, **more, "owner": owner}, map(json.dumps, rows))
    return await context.store.run(describe_batch, job)


@router.get("/v1/batches")
async def list_batches(
    request: Request, context: Context, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> Json:
    """List the batches, the latest first."""
    owner = request.state.info.owner
    return await list_objects(context, owner, "job", limit, after, describe_batch, text='"kind":"batch"')


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, request: Request, context: Context) -> Json:
    """Return the progress of a batch, and the files of its results."""
    return await context.store.run(lambda db: describe_batch(db, _find_batch(db, request.state.info.owner, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request, context: Context) -> Json:
    """End the work on a batch; what is done is in its output file."""
    owner = request.state.info.owner
    await context.store.run(_find_batch, owner, batch_id)
    await cancel(context, owner, batch_id)
    return await retrieve_batch(batch_id, request, context)


def describe_file(db: Connection, file: Item) -> Json:
    """Return a file as OpenAI's API shows it."""
    body = file.body
    size = jobs.count_result_bytes(db, body["job"], body["state"]) if "job" in body else body["bytes"]
    return {
        "id": file.id, "object": "file", "bytes": size, "created_at": int(file.created),
        "filename": body["filename"], "purpose": body["purpose"], "status": "processed", "expires_at": None,
    }


def describe_to_anthropic(db: Connection, file: Item) -> Json:
    """Return a file as Anthropic's API shows it."""
    shown, created = describe_file(db, file), datetime.fromtimestamp(file.created, UTC)
    return {
        "id": file.id, "type": "file", "filename": shown["filename"], "size_bytes": shown["bytes"],
        "mime_type": mimetypes.guess_type(shown["filename"])[0] or "application/octet-stream",
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"), "downloadable": True,
    }


def choose_format() -> Callable[[Connection, Item], Json]:
    """Return what describes a file to the client of this request."""
    return describe_to_anthropic if FOR_ANTHROPIC.get() else describe_file


def describe_batch(db: Connection, job: Item) -> Json:
    """Return a batch as OpenAI's API shows it."""
    body, counts = job.body, jobs.count(db, job.number)
    status, ended = body["status"], body.get("ended")
    files = {part.body["state"]: part.id for part in objects.find_parts(db, job, "file")}
    return {
        "id": job.id, "object": "batch", "endpoint": body["endpoint"], "model": body.get("model"), "errors": None,
        "input_file_id": body["input_file_id"], "completion_window": body["completion_window"],
        "status": STATUSES.get(status, status),
        "output_file_id": files.get("done"), "error_file_id": files.get("failed"),
        "created_at": int(job.created), "in_progress_at": to_seconds(body.get("started")), "expires_at": None,
        "finalizing_at": None, "failed_at": None, "expired_at": None, "cancelling_at": None,
        "completed_at": to_seconds(ended) if status == "completed" else None,
        "cancelled_at": to_seconds(ended) if status == "cancelled" else None,
        "request_counts": {"total": sum(counts.values()), "completed": counts["done"], "failed": counts["failed"]},
        "metadata": body["metadata"],
    }


async def _read_rows(context: ApiContext, file: Item) -> AsyncIterator[bytes]:
    """Yield the lines of a batch's output or errors."""
    after = 0
    while rows := await context.store.run(jobs.read_ended, file.body["job"], after, ROWS_AT_ONCE):
        yield "".join(f"{row.result}\n" for row in rows if row.state == file.body["state"] and row.result).encode()
        after = rows[-1].ended


def _find_batch(db: Connection, owner: str, batch_id: str) -> Item:
    job = objects.get(db, owner, "job", batch_id)
    if job is None or job.body["kind"] != "batch":
        raise ApiError(404, f"there is no batch {batch_id[:80]!r}", None, "batch_not_found")
    return job
