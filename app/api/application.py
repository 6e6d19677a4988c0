"""make_api: the FastAPI app with every route of the API; the page is mounted behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from app import __version__
from app.api import admin, chat, completions, embeddings, extract, files, jobs, model_routes, models, tokens
from app.api.anthropic import routes as anthropic
from app.api.context import ApiContext
from app.api.errors import ApiError, add_error_handlers
from app.api.gate import Gate
from app.api.model_pool import ModelPool, Role
from app.api.model_switch import ModelSwitch
from app.api.ollama import routes as ollama
from app.api.openapi import ERRORS, make_openapi
from app.api.origins import AllowedOrigins
from app.api.responses import routes as responses
from app.api.trace_context import TraceContext
from app.config import AppConfig
from engine import CatalogueEntry

# OpenAI endpoint that no model here supports -> the missing feature
MISSING = {
    "/v1/moderations": "it has no moderation model",
    "/v1/audio": "it has no model for speech",
    "/v1/images": "it has no model for images",
}
ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def make_api(context: ApiContext, roles: Mapping[Role, CatalogueEntry] = MappingProxyType({})) -> FastAPI:
    """Build the app around an engine, and around those of the models that have a role."""
    # no documentation page: FastAPI's loads its scripts from another host
    app = FastAPI(title="Troupe", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    app.state.context = context
    pool = app.state.pool = ModelPool(context)
    for role, entry in roles.items():
        pool.keep(role, entry)
    known = [route for route in app.routes if isinstance(route, Route)]
    routers = (
        admin, anthropic, chat, completions, embeddings, extract, files, jobs, model_routes, models, ollama, responses,
        tokens,
    )
    for module in routers:
        app.include_router(module.router)
        known += [route for route in module.router.routes if isinstance(route, Route)]
    refusal = Refusal(known)
    # Without these handlers the page's own 404 would answer, in a format that API clients do not read.
    for path in (*sorted({route.path for route in known}), "/v1{path:path}"):
        app.router.routes.append(Route(path, refusal, include_in_schema=False))
    app.router.default = refusal

    # FastAPI documents this assignment as the way to change the description
    app.openapi = lambda: make_openapi(app)  # type: ignore[method-assign]
    add_error_handlers(app)
    config = context.config
    if pool.serves_several:
        app.add_middleware(ModelSwitch, pool=pool)
    app.add_middleware(
        Gate,
        keys=accepted_keys(config),
        max_body_bytes=config.max_body_bytes,
        max_requests_per_key=config.max_requests_per_key,
        origins=AllowedOrigins(
            (config.host, *config.allowed_host),
            checks_host=config.is_loopback and not config.api_key,
            shared=config.allowed_origin,
        ),
        # with several models the switch asks the one that is meant
        check_room=(lambda: None) if pool.serves_several else context.engine.check_capacity,
    )
    if context.engine.config.otlp_traces_endpoint is not None:
        app.add_middleware(TraceContext)
    return app


class Refusal:
    """Answers requests that match no route, for every method. A class, because Starlette limits functions to GET."""

    def __init__(self, known: Sequence[Route]) -> None:
        self.known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/" and scope["method"] == "GET":  # clients look whether a server is there
            await JSONResponse({"name": "Troupe", "version": __version__})(scope, receive, send)
            return
        error = no_route(Request(scope), self.known)
        await error.answer(scope["path"])(scope, receive, send)


def accepted_keys(config: AppConfig) -> tuple[str, ...]:
    """Return the keys that the gate accepts; the admin key alone protects only its own routes."""
    admin = () if config.admin_key is None else (config.admin_key,)
    return (*config.api_key, *admin) if config.api_key else ()


def no_route(request: Request, known: Sequence[Route]) -> ApiError:
    """Return a 404, or a 405 if the path exists for another method."""
    path = request.url.path[:200]
    allowed = ", ".join(
        "GET, HEAD" if method == "GET" else method
        for method in ALL_METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in known)
    )
    if allowed:
        message = f"{request.method} is not allowed on {path}; it takes {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    # suggest the base URL with or without /v1
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        if any(route.matches({**request.scope, "path": other})[0] is not Match.NONE for route in known):
            message = f"there is no route {path}; use {other}: check the client's base URL"
            return ApiError(404, message, code="route_not_found")
    missing = next((text for start, text in MISSING.items() if f"{path}/".startswith(f"{start}/")), None)
    reason = "" if missing is None else f": this server generates text; {missing}"
    return ApiError(404, f"there is no route {path} for {request.method}{reason}", code="route_not_found")
