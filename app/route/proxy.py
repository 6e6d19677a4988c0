"""Proxy: the ASGI app that passes requests to workers.

    client ──▶ Gate (keys, origins, size) ──▶ Proxy ──TextRouter──▶ worker 0, worker 1, ...

A worker that fails before the first byte of its answer is left out for this request, and another one gets it. Answers
of 4xx are the client's, and are passed on. After the first byte nothing is repeated: the client gets an error event, or
a cut connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from app.api.errors import CLOSING, RETRY_AFTER_S, ApiError
from app.api.gate import read_body
from app.api.sse import frame, wait_for_disconnect
from app.concurrency import cancel_all
from app.route.workers import Worker, merge_models
from engine import TextRouter

logger = logging.getLogger("troupe.route")

MAX_TRIES = 3  # a request that crashes servers must not crash them all
FAILURES = (500, 502, 503, 504)  # statuses for which another worker is tried
# Parts of a request in the order in which they usually appear in the prompt.
PROMPT_FIELDS = ("tools", "schema", "system", "instructions", "messages", "prompt", "input", "query", "text")
PASSED_PATHS = ("/v1/", "/v2/", "/api/", "/rerank", "/score", "/tokenize", "/detokenize", "/version")
# Headers of a single connection, or set again.
OWN_HEADERS = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade", "host",
    "transfer-encoding", "content-length", "accept-encoding", "x-request-id", "date", "server", "x-troupe-client",
))
# what one worker stores: responses, files, batches, jobs
STORED_PATH = re.compile(r"/v1/(?:responses|files|batches|jobs)/([^/]+)")
CREATING = ("/v1/responses", "/v1/files", "/v1/batches", "/v1/extract")
NOT_STORED = re.compile(rb'"(?:response|file)_not_found"')
STORED_ID = re.compile(rb'"id": ?"((?:resp_|file-|batch_|job_)[^"]{1,300})"')
MAX_HOLDERS = 100_000  # of a worker's latest responses; of an older one every worker is asked
Headers = list[tuple[bytes, bytes]]


class WorkerFailed(Exception):
    """A worker gave no answer; `response` is its 5xx answer if there was one."""

    def __init__(self, message: str, response: Response | None = None) -> None:
        super().__init__(message)
        self.response = response


class StoredElsewhere(Exception):
    """A worker does not hold the stored response that a request names; `answer` is its 404."""

    def __init__(self, answer: Response) -> None:
        super().__init__("no such response")
        self.answer = answer


class RouteMetrics:
    """Counters of the router, by worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)

        def make(kind: type[Any], name: str, text: str, *labels: str) -> Any:
            return kind(f"troupe:router_{name}", text, ["worker", *labels], registry=self.registry)

        self.requests = make(Counter, "requests", "Answers by status.", "status")
        self.failures = make(Counter, "worker_failures", "Tries without an answer.")
        self.lost = make(Counter, "streams_lost", "Answers that broke off after they began.")
        self.running = make(Gauge, "requests_running", "Requests in the worker.")
        self.ready = make(Gauge, "worker_ready", "1 if the worker is ready.")


class Proxy:
    """Passes requests to workers.

    Args:
        session: without a limit of connections and without decompression.
        forwards_keys: pass the client's keys on; otherwise the session brings the workers' key.
    """

    def __init__(
        self, workers: Sequence[Worker], router: TextRouter, session: aiohttp.ClientSession, forwards_keys: bool
    ) -> None:
        self.metrics = RouteMetrics()
        self._is_closing = False
        self._open: set[asyncio.Future[None]] = set()
        self._workers = workers
        self._router = router
        self._session = session
        self._forwards_keys = forwards_keys
        self._holders: OrderedDict[str, Worker] = OrderedDict()  # stored id -> the worker that has it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        own = self._answer(scope["method"], path)
        if own is not None:
            await own(scope, receive, send)
            return
        if not path.startswith(PASSED_PATHS):
            raise ApiError(404, f"the router has no {path}; it passes on {', '.join(PASSED_PATHS)}", code="not_found")
        if self._is_closing:
            raise ApiError(503, "the router is closing; try again later", None, CLOSING, RETRY_AFTER_S)
        body = await read_body(receive)
        work = asyncio.ensure_future(self._route(scope, body, send))
        left = asyncio.ensure_future(wait_for_disconnect(receive))
        self._open.add(work)
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._open.discard(work)
            await cancel_all((work, left))

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and return when the running ones have ended or the time is over."""
        self._is_closing = True
        if self._open:
            await asyncio.wait(self._open, timeout=grace_s)

    def _answer(self, method: str, path: str) -> Response | None:
        """Return the answer of a route of the router itself."""
        is_ready = not self._is_closing and any(worker.is_ready for worker in self._workers)
        if path == "/livez":
            return JSONResponse({"status": "ok"})
        if path in ("/health", "/readyz", "/ping"):
            states = {worker.url: "ready" if worker.is_ready else worker.error for worker in self._workers}
            status = "ok" if is_ready else "no worker is ready"
            return JSONResponse({"status": status, "workers": states}, 200 if is_ready else 503)
        if path == "/metrics":
            for worker in self._workers:
                self.metrics.ready.labels(worker.url).set(worker.is_ready)
            return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")
        if path == "/v1/models" and method == "GET" and is_ready:
            return JSONResponse({"object": "list", "data": merge_models(self._workers)})
        return None

    async def _route(self, scope: Scope, body: bytes, send: Send) -> None:
        """Try workers until one answers.

        Raises ApiError: none did.
        """
        prompt, model, salt, session, stored_id = read_prompt(body)
        if (named := STORED_PATH.match(scope["path"])) is not None:
            stored_id = named[1]
        holder = self._holders.get(stored_id or "")
        given = dict(scope["headers"]).get(b"x-session-id")
        session = session if given is None else given.decode("latin-1")
        ready = [worker for worker in self._workers if worker.is_ready]
        if not ready:
            raise ApiError(503, "no worker is ready; /health gives the reasons", None, "no_worker", RETRY_AFTER_S)
        # A model that no worker lists goes to any: its 404 names the models that it has.
        candidates = [worker for worker in ready if worker.serves(model)] or ready
        problems: list[str] = []
        failure: WorkerFailed | StoredElsewhere | None = None
        while candidates and len(problems) < MAX_TRIES:
            preferred = [holder] if holder is not None and holder in candidates else candidates
            ticket = self._router.choose_text(prompt, [worker.index for worker in preferred], salt, session)
            worker = self._workers[ticket.replica]
            running = self.metrics.running.labels(worker.url)
            running.inc()
            try:
                note = partial(self._router.note_first_token, ticket)
                await self._pass(scope, body, send, worker, note, stored_id is not None)
                return
            except StoredElsewhere as error:
                failure = error
                candidates.remove(worker)
            except WorkerFailed as error:
                failure = error
                problems.append(f"worker {worker.index}: {error}")
                self.metrics.failures.labels(worker.url).inc()
                logger.warning("%s failed: %s", worker.url, error)
                worker.wants_probe.set()
                candidates.remove(worker)
            finally:
                self._router.end(ticket)
                running.dec()
        assert failure is not None
        answer = failure.answer if isinstance(failure, StoredElsewhere) else failure.response
        if answer is not None:
            await answer(scope, _no_body, send)
            return
        raise ApiError(503, f"no worker answered; {'; '.join(problems)}", None, "no_worker", RETRY_AFTER_S)

    async def _pass(
        self, scope: Scope, body: bytes, send: Send, worker: Worker, note_first_byte: Callable[[], None],
        names_stored: bool,
    ) -> None:
        """Send the request to a worker and its answer to the client, as it comes.

        Args:
            names_stored: whether the request names what one worker stores.

        Raises:
            WorkerFailed: the answer has not begun, so that another worker may be tried.
            StoredElsewhere: the worker does not hold the response.
        """
        url = URL(worker.url + scope["raw_path"].decode("latin-1"), encoded=True)
        query = scope["query_string"].decode("latin-1")
        url = url.with_query(query) if query else url
        headers = self._make_headers(scope)
        try:
            async with self._session.request(
                scope["method"], url, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                status, given = response.status, list(response.raw_headers)
                if status in FAILURES:
                    content = await response.read()
                    raise WorkerFailed(f"status {status}", _make_response(status, given, content))
                chunk = await response.content.readany()
                if status in (400, 404) and names_stored and (status == 404 or NOT_STORED.search(chunk)):
                    raise StoredElsewhere(_make_response(status, given, chunk + await response.read()))
                note_first_byte()
                if scope["path"] in CREATING and (found := STORED_ID.search(chunk)) is not None:
                    self._note_holder(found[1].decode(), worker)
                self.metrics.requests.labels(worker.url, status).inc()
                start = {"type": "http.response.start", "status": status, "headers": _pass_on(given)}
                await send(start)
                try:
                    while chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        chunk = await response.content.readany()
                except (aiohttp.ClientError, TimeoutError) as error:
                    await self._break_off(worker, error, response.content_type, send)
                    return
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerFailed(type(error).__name__) from error

    def _note_holder(self, stored_id: str, worker: Worker) -> None:
        self._holders[stored_id] = worker
        if len(self._holders) > MAX_HOLDERS:
            self._holders.popitem(last=False)

    async def _break_off(self, worker: Worker, error: Exception, content_type: str, send: Send) -> None:
        """End an answer that has begun. A stream gets an error event; other answers stay incomplete."""
        self.metrics.lost.labels(worker.url).inc()
        worker.wants_probe.set()
        logger.warning("%s broke off an answer: %r", worker.url, error)
        if content_type == "text/event-stream":
            message = "the worker ended before the answer was complete; send the request again"
            event = frame(ApiError(502, message, code="worker_lost").body)
            await send({"type": "http.response.body", "body": b"\n\n" + event})

    def _make_headers(self, scope: Scope) -> CIMultiDict[str]:
        dropped = OWN_HEADERS if self._forwards_keys else OWN_HEADERS | {"authorization", "x-api-key"}
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = CIMultiDict((name, value) for name, value in pairs if name not in dropped)
        info = scope["state"]["info"]
        headers["x-request-id"] = info.request_id
        if info.owner and not self._forwards_keys:
            headers["x-troupe-client"] = info.owner
        headers["accept-encoding"] = "identity"
        return headers


def read_prompt(body: bytes) -> tuple[bytes, object, str | None, str | None, str | None]:
    """Return the prompt as bytes, the model, the salt, the session and the response or file that a JSON request names.

    Other bodies, such as forms, count as the prompt themselves. The worker reports errors in a body.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body, None, None, None, None
    if not isinstance(found, dict):
        return body, None, None, None, None
    parts = [found[name] for name in PROMPT_FIELDS if found.get(name)]
    prompt = "".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
    names = ("cache_salt", "prompt_cache_key", "previous_response_id", "input_file_id")
    salt, key, last, file = (found[name] if isinstance(found.get(name), str) else None for name in names)
    return prompt.encode("utf-8", "surrogatepass"), found.get("model"), salt, key or salt, last or file


async def _no_body() -> Message:
    return {"type": "http.request"}


def _make_response(status: int, headers: Sequence[tuple[bytes, bytes]], content: bytes) -> Response:
    response = Response(content, status)
    response.raw_headers += [pair for pair in _pass_on(headers) if pair[0].lower() != b"content-length"]
    return response


def _pass_on(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return the worker's headers for the client. Content-Length stays, so that clients notice a truncated answer."""
    dropped = OWN_HEADERS - {"content-length"}
    return [(name, value) for name, value in headers if name.decode("latin-1").lower() not in dropped]
