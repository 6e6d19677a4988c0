"""make_openapi: the OpenAPI description of the API, including the errors that FastAPI does not know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.api.errors import HEALTH_PATHS
from app.api.extract import DEFINITIONS

Json = dict[str, Any]

ERRORS = {
    "400": "The request is not valid; the message names the field, its value and the allowed range.",
    "401": "A key is needed, or the one that came is wrong.",
    "403": "A page of another site sent the request, or it names a Host that is not this server's.",
    "404": "The model or route does not exist.",
    "413": "The body is larger than the server takes.",
    "429": "This key has reached its limit of open requests; Retry-After says when to try again.",
    "500": "The engine failed with this request in it.",
    "503": (
        "The queue is full, the engine is starting, restarting or asleep, or the server is closing; "
        "Retry-After says when to try again."
    ),
    "504": "The request's own deadline has passed.",
}
OF_WATCHING = ("401", "403", "404", "500", "503")  # errors of a GET route
ERROR_SCHEMA: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error", "description": "on /v1/messages"},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "keyword": {"type": "string", "description": "of a grammar: what is not supported"},
                "pointer": {"type": ["string", "null"], "description": "of a grammar: where, a JSON pointer"},
                "reason": {"type": "string", "description": "of a grammar: what is wrong, in words"},
            },
        },
    },
}
STREAMING = (
    "/completion",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/extract",
    "/v1/messages",
    "/v1/responses",
)


def make_openapi(app: FastAPI) -> Json:
    """Return the document of GET /openapi.json; built once and stored on the app."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas |= {"Error": ERROR_SCHEMA, **DEFINITIONS}
        for name in ("HTTPValidationError", "ValidationError"):  # schema of that reply, which is never sent
            schemas.pop(name, None)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                _complete(path, method, operation["responses"])
        app.openapi_schema = document
    return app.openapi_schema


def _complete(path: str, method: str, responses: Json) -> None:
    """Add the error replies of one operation."""
    responses.pop(
        "422", None
    )  # FastAPI's status for wrong fields; ours is 400, also on a GET with parameters
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in ERRORS if method == "post" else OF_WATCHING:
        responses[status] = {"description": ERRORS[status], "content": error}
    if path in STREAMING:
        responses["200"].setdefault("content", {"application/json": {}})["text/event-stream"] = {}
    elif path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path in HEALTH_PATHS:
        responses["503"] = {
            **responses["200"],
            "description": "The engine is not alive (/health, /ping, /livez), or does not take requests (/readyz).",
        }
