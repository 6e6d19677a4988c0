"""The OpenAPI document: the errors of every route, and the parts that FastAPI cannot derive."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from app.api.extract import DEFINITIONS


class ErrorFields(BaseModel):
    """The error object; the last three fields describe a refused grammar."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    keyword: str | None = Field(None, description="the keyword that is not supported")
    pointer: str | None = Field(None, description="its place, a JSON pointer")
    reason: str | None = None


class ErrorReply(BaseModel):
    """The body of every error; on /v1/messages it also has `type`, which is "error"."""

    error: ErrorFields


# "default" keeps FastAPI from listing its 422, which is never sent.
TEXTS: dict[int | str, str] = {
    400: "The request is not valid; the message names the field, its value and the allowed range.",
    401: "A key is needed, or the one that came is wrong.",
    403: "A page of another site sent the request, or it names a Host that is not this server's.",
    404: "The model or route does not exist.", 413: "The body is larger than the server takes.",
    415: "The body has a Content-Encoding other than gzip or deflate.",
    429: "This key has reached its limit of open requests; Retry-After says when to try again.",
    500: "The engine failed with this request in it.",
    503: "The queue is full, the engine is not ready, or the server is closing; see Retry-After.",
    504: "The request's own deadline has passed.", "default": "Another error.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text} for status, text in TEXTS.items()
}


def make_openapi(app: FastAPI) -> dict[str, Any]:
    """Return the document of GET /openapi.json; built once and stored on the app."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document["components"]
        components["schemas"] |= DEFINITIONS
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        app.openapi_schema = document
    return app.openapi_schema
