"""POST /v1/extract: texts, images, files or rows in, checked records with confidence, evidence and flags out.

The body is JSON, or multipart/form-data with a file and the same fields as text. One text is answered with one JSON
object, or with server-sent events if `stream` is true. Several rows are answered as JSONL, a line for each record in
the order of the rows, with the progress so far.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import math
import time
from base64 import b64decode
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from starlette.datastructures import UploadFile

from app.api.call import usage
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest, to_api_error
from app.api.fields import ANSWER
from app.api.gate import RequestInfo
from app.api.jobs import add_job, describe
from app.api.protocol import Fields
from app.api.sse import STREAMED, Emit, EventStream, JsonLines, Result, frame, unless_gone
from app.extraction import (
    Example,
    ExtractionResult,
    Extractor,
    Limits,
    PartialExtraction,
    Schema,
    Source,
    extract_records,
)
from app.extraction.batch import extract_source
from app.extraction.cases import find_schemas
from app.extraction.chunks import stream_whole
from app.extraction.pdf import MAX_IMAGES, read_picture
from app.extraction.reading import read_apart
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import (
    LIMITS,
    PAGE_BREAK,
    TABLE_TYPES,
    TEXT_COLUMN,
    Row,
    UnreadableSource,
    decode,
    dump_source,
    make_table,
    parse_rows,
    spell,
)
from app.json_text import parse_json
from grammar import GrammarError

router = APIRouter(route_class=JsonRoute)
MAX_ROWS = 10_000
MAX_PARTS = 32  # of a form
MAX_NAME_CHARS = 200  # of a file
MAX_EXAMPLES = 32
PARTIAL_INTERVAL_S = 0.05
# Parts of a form that hold JSON rather than text.
JSON_PARTS = ("examples", "images", "options", "rows", "stream")


class ExampleFields(Fields):
    """A text with its correct record."""

    PLACE = ("examples",)

    text: str
    record: Any


class ExtractOptions(Fields):
    """Options of an extraction.

    Attributes:
        verbatim: free strings must be parts of the text; dates and numbers must appear in it.
        bounds: open strings and lists get a length.
    """

    PLACE = ("options",)
    CONSTRAINTS = None

    verbatim: bool = False
    bounds: bool = True
    property_order: Literal["schema", "any"] = "schema"


class ExtractRequest(Fields):
    """POST /v1/extract. Give text or images or both, or rows, or a file in a form."""

    # The options, and their names in other places.
    CONSTRAINTS = ANSWER | {
        **dict.fromkeys(("verbatim", "ground", "grounded"), ()), **dict.fromkeys(("bounds", "limits"), (True,)),
        "property_order": ("schema",),
    }

    model: str | None = None
    schema_: dict[str, Any] | str = Field(alias="schema", description="a JSON Schema, or the name of a ready-made one")
    text: str | None = None
    images: Annotated[list[str], Field(min_length=1, max_length=MAX_IMAGES)] | None = Field(
        default=None, description="data: URLs of the document's pages; Tesseract reads them if the model sees no images"
    )
    rows: Annotated[list[dict[str, Any] | str], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)] | None = None
    column: str | None = Field(default=None, description="column of the rows that holds the texts")
    instructions: str = ""
    examples: Annotated[list[ExampleFields], Field(max_length=MAX_EXAMPLES)] = Field(default_factory=list)
    options: ExtractOptions = Field(default_factory=ExtractOptions)
    stream: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def check_source(self) -> Self:
        """Refuse two sources."""
        for name in ("text", "images"):
            if getattr(self, name) is not None and self.rows is not None:
                raise BadRequest(f"give either {name} or rows", name)
        return self


REQUEST = ExtractRequest.model_json_schema(ref_template="#/components/schemas/{model}")
DEFINITIONS = REQUEST.pop("$defs")  # they belong to the components of the document
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": REQUEST},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {
                        "file": {
                            "type": "string", "format": "binary", "description": "text, PDF, image, CSV or JSONL"
                        },
                        **{name: {"type": "string"} for name in ("schema", "text", "column", "instructions")},
                        **{name: {"type": "string", "description": "JSON"} for name in JSON_PARTS},
                    },
                }
            },
        },
    }
}


async def naming_schema(work: Awaitable[Result]) -> Result:
    """Await some work, and blame the field `schema` for a grammar that cannot be made."""
    try:
        return await work
    except GrammarError as error:
        raise to_api_error(error, "schema") from error


@router.post("/v1/extract", openapi_extra=BODY, response_model=None, responses=STREAMED)
async def extract(request: Request, context: Context, background: bool = False) -> Response:
    """Extract a record, with the confidence and the evidence of each value, the values to check, and the checks."""
    body, sources, is_table = await read_request(request, context.engine.sees_images)
    info: RequestInfo = request.state.info
    model = info.model = context.check_model(body.model)
    context.require_ready()
    schema = read_schema(body.schema_)
    if background:
        return await extract_later(context, body, schema, model, sources, info.owner)
    extractor = make_extractor(context, body, model)
    if is_table:
        return JsonLines(
            lambda emit: naming_schema(send_rows(emit, extractor, schema, sources, body.cache_salt, info)), b"",
            lambda error: json.dumps(error.body).encode() + b"\n", keep_alive_s=math.inf,
        )
    source = sources[0]
    if source.error is not None:
        raise BadRequest(source.error, "file", "unreadable_file")
    if source.is_empty:
        raise BadRequest("text is empty: there is nothing to extract", "text")
    if body.stream:
        return EventStream(
            lambda emit: naming_schema(send_parts(emit, extractor, schema, source, body.cache_salt, info))
        )
    work = extract_source(extractor, schema, source, cache_salt=body.cache_salt, raises=True)
    done = await unless_gone(request.receive, naming_schema(work))
    return JSONResponse(show(extractor, *done, info))


async def extract_later(
    context: ApiContext, body: ExtractRequest, schema: Schema, model: str, sources: Sequence[Source], owner: str
) -> Response:
    """Make a job of the documents, for /v1/jobs."""
    # A schema that cannot be used is the fault of the request, not of each row.
    await naming_schema(asyncio.to_thread(SchemaChecker().check, json.dumps(schema)))
    if body.stream:
        raise BadRequest("stream is not possible with background=true; /v1/jobs/ID has the rows as they end", "stream")
    asked = body.model_dump(by_alias=True, exclude={"text", "images", "rows", "column", "stream"})
    request = {**asked, "model": model, "schema": schema}
    job = await add_job(context, owner, "extract", {"model": model, "request": request}, map(dump_source, sources))
    return JSONResponse(await context.store.run(describe, job), 202)


async def send_rows(
    emit: Emit, extractor: Extractor, schema: Schema, sources: Sequence[Source], salt: str | None, info: RequestInfo
) -> None:
    """Send one line per row, in order."""
    num_done = 0
    async with aclosing(extract_records(extractor, schema, sources, cache_salt=salt)) as records:
        async for record, result in records:
            num_done += 1
            progress = {"num_done": num_done, "num_rows": len(sources)}
            line = show(extractor, record, result, info) | {"progress": progress}
            await emit(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


async def send_parts(
    emit: Emit, extractor: Extractor, schema: Schema, source: Source, salt: str | None, info: RequestInfo
) -> None:
    """Send the record while it grows, then the result."""
    sent = 0.0
    reader = replace(extractor, images=source.images)
    parts = stream_whole(reader, schema, source.text, source=source.name, cache_salt=salt)
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, ExtractionResult):
                await emit(frame(show(extractor, source.complete(part.to_json()), part, info)))
            elif not isinstance(part, PartialExtraction):
                counts = {"num_done": part.num_done, "num_parts": part.num_parts}
                await emit(frame({"object": "extraction.progress", **counts}))
            elif time.monotonic() - sent >= PARTIAL_INTERVAL_S:
                sent = time.monotonic()
                await emit(frame({"object": "extraction.partial", "record": part.record}))


def show(
    extractor: Extractor, record: dict[str, Any], result: ExtractionResult | None, info: RequestInfo
) -> dict[str, Any]:
    """Return the reply for one record, and note its tokens; a document that failed has no usage."""
    reply = {"object": "extraction", "model": extractor.model_name, **record}
    if result is not None:
        info.count(*result.usage)
        info.finish_reasons.append(result.finish_reason)
        reply["usage"] = usage(*result.usage)
    return reply


def make_extractor(context: ApiContext, body: ExtractRequest, model: str) -> Extractor:
    """Return the extractor for a request."""
    options = body.options
    return Extractor(
        context.engine, Limits() if options.bounds else None, ground=options.verbatim,
        property_order=options.property_order, instructions=body.instructions,
        examples=tuple(Example(each.text, each.record) for each in body.examples),
        lora_request=context.select_adapter(model),
    )


def read_schema(given: dict[str, Any] | str) -> Schema:
    """Return a schema given by value, or a built-in one by name."""
    if isinstance(given, dict):
        return given
    known = find_schemas()
    if given not in known:
        message = f"schema={given[:80]!r} is none of {', '.join(known)}; give a JSON Schema or one of these names"
        raise BadRequest(message, "schema")
    schema: Schema = json.loads(known[given].read_text(encoding="utf-8"))
    return schema


async def read_request(request: Request, sees_images: bool) -> tuple[ExtractRequest, list[Source], bool]:
    """Return the fields of a JSON body or a form, the documents to read, and whether they are rows of a table."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        body = await request.json()
        kind = ".png" if isinstance(body, dict) and body.get("images") else ""
        return await read_apart(kind, read_fields, body, None, sees_images)
    async with request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=2**25) as form:
        parts: dict[str, str | bytes] = {}
        file_name = "file.txt"
        for name, value in form.multi_items():
            if name in parts:
                raise BadRequest(f"the form has the part {name[:80]!r} twice", name[:80], "invalid_value")
            if isinstance(value, UploadFile):
                parts[name] = await value.read()
                if name == "file":
                    file_name = PurePath(value.filename or "").name[-MAX_NAME_CHARS:] or file_name
            else:
                parts[name] = value
    file = parts.pop("file", None)
    upload = None if file is None else (file_name, file.encode() if isinstance(file, str) else file)
    return await read_apart(file_name, read_form, parts, upload, sees_images)


def read_form(
    parts: Mapping[str, str | bytes], upload: tuple[str, bytes] | None, sees_images: bool
) -> tuple[ExtractRequest, list[Source], bool]:
    """Return the same for a form's parts."""
    return read_fields({name: _read_part(name, part) for name, part in parts.items()}, upload, sees_images)


def read_fields(
    body: Any, upload: tuple[str, bytes] | None, sees_images: bool
) -> tuple[ExtractRequest, list[Source], bool]:
    """Return the same for the value of a body, or of a form's parts and its file, which has a name."""
    fields = ExtractRequest.read(body)
    is_inline = fields.text is not None or fields.images is not None
    if sum((upload is not None, is_inline, fields.rows is not None)) != 1:
        raise BadRequest("give one of text or images, rows, and a file in a form", "text")
    if is_inline:
        images = tuple(fields.images or ())
        if images and not sees_images:
            return fields, [recognise_images(fields.text or "", images)], False
        return fields, [Source("", fields.text or "", images=images)], False
    if upload is not None:
        try:
            rows = parse_rows(upload[1], upload[0], LIMITS, with_images=sees_images)
        except UnreadableSource as error:
            raise BadRequest(str(error), "file", "unreadable_file") from error
        is_table = PurePath(upload[0]).suffix.lower() in TABLE_TYPES
        return fields, pick_sources(rows, fields.column), is_table
    rows = [
        Row(
            f"row {number}",
            {TEXT_COLUMN: row}
            if isinstance(row, str)
            else {name: spell(cell) for name, cell in row.items()},
        )
        for number, row in enumerate(fields.rows or (), 1)
    ]
    return fields, pick_sources(rows, fields.column), True


def recognise_images(text: str, urls: Sequence[str]) -> Source:
    """Return the text that Tesseract reads in data: URLs, behind the text given with them, as pages of a document."""
    pages, boxes, starts, notes = [text] * bool(text), [], [], []
    for number, url in enumerate(urls):
        name = f"images[{number}]"
        try:
            head, _, data = url.partition(",")
            if not head.startswith("data:") or not head.endswith(";base64"):
                raise UnreadableSource(f"{name} is not a data: URL in base64")
            page, words = read_picture(b64decode(data, validate=True), name)
        except binascii.Error as error:
            raise BadRequest(f"{name} is not base64: {error}", "images") from error
        except UnreadableSource as error:
            raise BadRequest(str(error), "images", "unreadable_file") from error
        starts.append(sum(map(len, pages)) + len(pages) * len(PAGE_BREAK))
        pages.append(page)
        boxes.append(words)
        notes.append(f"{name}: text read by OCR")
    joined = PAGE_BREAK.join(pages)
    return Source("", joined, page_starts=tuple(starts), notes=tuple(notes), boxes=tuple(boxes))


def pick_sources(rows: Sequence[Row], column: str | None) -> list[Source]:
    """Return the texts of the rows, from a named column or the one that most likely contains them."""
    table = make_table(rows)
    if column is not None and column not in table.columns:
        known = ", ".join(table.columns)[:200]
        raise BadRequest(f"column={column[:80]!r} is none of {known}", "column")
    return table.list_sources(column)


def _read_part(name: str, part: str | bytes) -> Any:
    """Return the value of a form part: JSON for parts with JSON values, and for a schema that is not a name.

    A part that was sent as a file means the same as its text.
    """
    try:
        value = part if isinstance(part, str) else decode(part, name)
    except UnreadableSource as error:
        hint = "; images are a JSON list of data: URLs, and the part `file` takes one image" if name == "images" else ""
        raise BadRequest(f"{error}{hint}", name) from error
    is_json = name in JSON_PARTS or (name == "schema" and value.lstrip().startswith("{"))
    return parse_json(value.encode(), (name,)) if is_json else value
