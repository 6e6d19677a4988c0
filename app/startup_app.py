"""StartupApp: the ASGI app that uvicorn runs. It answers requests itself until the app is ready for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from huggingface_hub.constants import HF_HUB_CACHE
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from app.api.errors import API_PREFIXES, HEALTH_PATHS, RETRY_AFTER_S, ApiError
from engine import Engine

# 503 keeps a load balancer away; a browser shows the page all the same and looks again.
PLAIN = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="2"><meta name="viewport" content="width=device-width">
<title>Troupe</title><style>:root{color-scheme:light dark}
body{font:16px system-ui,sans-serif;display:grid;place-items:center;height:90vh}
</style></head><body><main><h1>Troupe</h1><p>The server is {{state}}.</p></main></body></html>"""


PAGE = (Path(__file__).resolve().parents[1] / "assets" / "loading.html").read_text(encoding="utf-8")
INDEX = "model.safetensors.index.json"  # lists the files that the engine downloads


class Loading:
    """The progress of one start, read from the engine and the hub's cache at every request."""

    def __init__(self, engine: Engine, cache: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.cache = Path(HF_HUB_CACHE) if cache is None else cache
        self.clock = clock
        self.begun = clock()

    def describe(self) -> dict[str, Any]:
        """The step (tokenizer, weights, page), seconds so far, and bytes of a download with their total if known."""
        done = {name for name, _ in self.engine.timeline}
        step = "page" if self.engine.state == "ready" else "weights" if "tokenizer" in done else "tokenizer"
        found: dict[str, Any] = {"step": step, "seconds": round(self.clock() - self.begun, 1)}
        if self._is_on_hub():
            num_bytes, total = self._count_bytes()
            found |= {"downloaded_bytes": num_bytes, "total_bytes": total}
        return found

    def draw(self) -> str:
        """The page; its script asks for `describe` once a second and opens the app when it is there."""
        name = escape(self.engine.model_name)
        progress = json.dumps(self.describe()).replace("<", "\\u003c")
        return PAGE.replace("{{model}}", name).replace("{{progress}}", progress)

    def _is_on_hub(self) -> bool:
        model = self.engine.config.model
        return model.partition("@")[0].count("/") == 1 and not Path(model).exists()

    def _count_bytes(self) -> tuple[int, int | None]:
        """Bytes of this model in the cache, unfinished files too, and those of its weights, once its index is here."""
        folder = self.cache / f"models--{self.engine.config.model.partition('@')[0].replace('/', '--')}"
        sizes = [_size(path) for path in folder.glob("blobs/*")]
        total = None
        for index in folder.glob(f"snapshots/*/{INDEX}"):
            try:
                total = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it is being written
        return sum(sizes), total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it was just renamed


def _is_routed(app: FastAPI, scope: Scope) -> bool:
    """Whether the API has a route for the request; a mounted page does not count."""
    return any(isinstance(route, Route) and route.matches(scope)[0] != Match.NONE for route in app.routes)


class StartupApp:
    """Forwards requests to the app between `open` and `close`, and answers them itself before and after.

    Between `open` and `open_page` it forwards those that the app has a route for.

    Args:
        is_private: hide what is being loaded, because the server has API keys and they cannot be checked yet.
    """

    def __init__(self, engine: Engine, is_private: bool = False) -> None:
        self.is_private = is_private
        self.loading = Loading(engine)
        self.is_draining = False
        self._app: FastAPI | None = None
        self._has_page = False

    def open(self, app: FastAPI) -> None:
        """Let requests of the API through to the app."""
        self._app = app

    def open_page(self) -> None:
        """Let all requests through."""
        self._has_page = True

    def close(self) -> None:
        """Let nothing through any more."""
        self._app = None
        self.is_draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = None if self.is_draining else self._app
        if app is not None and (self._has_page or _is_routed(app, scope)):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        state = "closing" if self.is_draining else "starting"
        if path in HEALTH_PATHS:
            # a restart would not make the start or the end come sooner
            is_ok = path == "/livez"
            return JSONResponse({"status": "ok" if is_ok else state, "state": state}, 200 if is_ok else 503)
        tells_progress = not self.is_draining and not self.is_private
        if path == "/loading" and tells_progress:
            return JSONResponse(self.loading.describe())
        if path.startswith(API_PREFIXES):
            message = f"the server is {state}; try again later"
            return ApiError(503, message, code="engine_not_ready", retry_after_s=RETRY_AFTER_S).answer(path)
        page = self.loading.draw() if tells_progress else PLAIN.replace("{{state}}", state)
        return HTMLResponse(page, 503, {"Retry-After": "2"})
