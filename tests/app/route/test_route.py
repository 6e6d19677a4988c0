"""`route`: one address in front of several OpenAI-compatible servers, which are played by small ones here."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.config import AppConfig, RouteConfig, UsageError
from app.listening import bind
from app.route import server as route_server
from app.route.proxy import read_prompt
from app.route.server import run_router

Answer = Callable[[web.Request], Any]


class FakeServer:
    """An OpenAI server whose next answers a test decides."""

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.health = 200
        self.seen: list[web.Request] = []
        self.answer: Answer = lambda request: web.json_response({"by": self.url if self.model == "m" else self.model})
        app = web.Application()
        app.router.add_get("/health", self._tell_health)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_route("*", "/{path:(v1|v2|api|tokenize).*}", self._handle)
        self.server = TestServer(app)

    async def _tell_health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.seen.append(request)
        found = self.answer(request)
        response: web.StreamResponse = await found if asyncio.iscoroutine(found) else found
        return response

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


class Routed:
    """A router over fake servers, and a client of it."""

    def __init__(self, servers: list[FakeServer], client: aiohttp.ClientSession) -> None:
        self.servers = servers
        self.client = client

    async def ask(self, text: str = "hello", **more: Any) -> tuple[int, Any]:
        headers = more.pop("headers", None)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]} | more
        async with self.client.post("/v1/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(path) as response:
            return response.status, await response.text()

    async def wait_until_ready(self, count: int) -> None:
        async with asyncio.timeout(30):
            while (await self.get("/health"))[1].count('"ready"') != count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def routed(
    *servers: FakeServer, policy: str = "prefix_aware", num_ready: int | None = None, **more: Any
) -> AsyncIterator[Routed]:
    config = {name: more.pop(name) for name in ("worker_api_key",) if name in more}
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.server)
        listener = stack.enter_context(bind(AppConfig(port=0)))
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(route_server, "HEALTH_INTERVAL_S", 0.05)
        settings = RouteConfig(
            tuple(server.url + "/v1" for server in servers),
            policy,
            **config,  # type: ignore[arg-type]
        )
        app_config = AppConfig(**more)
        await stack.enter_async_context(run_router(settings, app_config, listener, asyncio.Event()))
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = await stack.enter_async_context(aiohttp.ClientSession(base))
        found = Routed(list(servers), client)
        await found.wait_until_ready(len(servers) if num_ready is None else num_ready)
        yield found


async def test_prompts_with_one_prefix_go_to_one_server_and_others_spread() -> None:
    async with routed(FakeServer(), FakeServer(), FakeServer()) as route:
        homes: dict[int, set[str]] = {topic: set() for topic in range(12)}
        for topic, number in itertools.product(homes, range(3)):
            homes[topic].add((await route.ask(f"{topic} " * 400 + str(number)))[1]["by"])
        assert all(len(found) == 1 for found in homes.values())
        assert len(set().union(*homes.values())) == 3


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    return response


async def test_a_stream_is_passed_on_chunk_by_chunk() -> None:
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    server = FakeServer()
    server.answer = stream
    async with (routed(server) as route, route.client.post("/v1/completions", json={"prompt": "a"}) as response):
        assert await response.content.readany() == b"data: 1\n\n"
        go_on.set()
        assert await response.content.read() == b"data: [DONE]\n\n"
        assert response.headers["x-request-id"] == server.seen[0].headers["x-request-id"]


@pytest.mark.parametrize("status", [500, 503, None])
async def test_a_server_that_fails_before_its_first_byte_is_left_out_for_the_request(status: int | None) -> None:
    async def fail(request: web.Request) -> web.Response:
        if status is None:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({}, status=status or 200)

    bad, good = FakeServer(), FakeServer()
    bad.answer = fail
    async with routed(bad, good, policy="round_robin") as route:
        assert [(await route.ask())[0] for _ in range(4)] == [200] * 4
        assert bad.seen and len(good.seen) == 4
        metrics = (await route.get("/metrics"))[1]
        assert f'troupe:router_worker_failures_total{{worker="{bad.url}"}} {len(bad.seen)}.0' in metrics


async def test_a_4xx_is_the_clients_and_no_other_server_is_asked() -> None:
    server, other = FakeServer(), FakeServer()
    server.answer = other.answer = lambda _: web.json_response({"error": {"message": "no"}}, status=400)
    async with routed(server, other) as route:
        assert await route.ask() == (400, {"error": {"message": "no"}})
        assert len(server.seen) + len(other.seen) == 1


@pytest.mark.parametrize(
    ("path", "prefix", "field"),
    [("/v1/responses", "resp_", "previous_response_id"), ("/v1/files", "file-", "input_file_id")],
)
@pytest.mark.parametrize("knows_holder", [True, False])
async def test_what_one_server_stores_is_found_there(knows_holder: bool, path: str, prefix: str, field: str) -> None:
    """Also by a router that has started since: it asks one server after the other."""
    stored: dict[str, FakeServer] = {}
    servers = [FakeServer() for _ in range(4)]

    def answer_for(server: FakeServer) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else {}
            last = body.get(field) or request.path.removeprefix(path).strip("/")
            if last and stored.get(last) is not server:
                missing = {"message": "no such response", "code": "file_not_found"}
                return web.json_response({"error": missing}, status=400 if request.method == "POST" else 404)
            stored[found := f"{prefix}{len(stored)}"] = server
            return web.json_response({"id": found})

        return answer

    for server in servers:
        server.answer = answer_for(server)
    async with routed(*servers) as route:
        for number in range(8):
            async with route.client.post(path, json={"input": f"{number} " * 99}) as reply:
                first = (await reply.json())["id"]
            if not knows_holder:
                stored[f"{prefix}of_old_{number}"] = stored.pop(first)
                first = f"{prefix}of_old_{number}"
            before = sum(len(server.seen) for server in servers)
            body = {"input": "so?", field: first}
            assert read_prompt(json.dumps(body).encode())[4] == first
            async with route.client.post(path, json=body) as reply:
                assert reply.status == 200
            assert (await route.get(f"{path}/{first}"))[0] == 200
            if knows_holder:
                assert sum(len(server.seen) for server in servers) == before + 2
        assert (await route.get(f"{path}/none"))[0] == 404


async def test_the_last_failure_is_reported_when_no_server_answers() -> None:
    servers = [FakeServer() for _ in range(5)]
    for server in servers:
        server.answer = lambda _: web.json_response({"full": 1}, status=503, headers={"Retry-After": "7"})
    async with routed(*servers) as route:
        assert await route.ask() == (503, {"full": 1})
        assert sum(len(server.seen) for server in servers) == 3


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    server = FakeServer()
    server.answer = stream
    async with (routed(server) as route, route.client.post("/v1/completions", json={"prompt": "a"}) as response):
        text = (await response.read()).decode()
        assert text.startswith("data: 1\n\n") and '"code":"worker_lost"' in text
        assert 'router_streams_lost_total{worker="' in (await route.get("/metrics"))[1]


async def test_a_client_that_leaves_ends_the_request_at_the_server() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    server = FakeServer()
    server.answer = hang
    async with routed(server) as route:
        task = asyncio.create_task(route.ask())
        await begun.wait()
        task.cancel()
        await asyncio.wait_for(ended.wait(), 10)


async def test_health_follows_the_servers_and_models_are_merged() -> None:
    one, two = FakeServer("a"), FakeServer("b")
    two.health = 503
    async with routed(one, two, num_ready=1) as route:
        assert [each["id"] for each in json.loads((await route.get("/v1/models"))[1])["data"]] == ["a"]
        two.health = 200
        await route.wait_until_ready(2)
        assert [each["id"] for each in json.loads((await route.get("/v1/models"))[1])["data"]] == ["a", "b"]
        assert (await route.ask(model="b"))[1] == {"by": "b"}
        one.health = two.health = 500
        await route.wait_until_ready(0)
        status, body = await route.ask()
        assert (status, body["error"]["code"]) == (503, "no_worker")
        assert (await route.get("/health"))[0] == 503
        assert (await route.get("/livez"))[0] == 200


async def test_a_session_keeps_its_server() -> None:
    async with routed(*(FakeServer() for _ in range(4)), policy="round_robin") as route:
        for number in range(8):
            await route.ask(f"{number} " * 50, headers={"x-session-id": "s1"})
            await route.ask(f"{number} " * 50, prompt_cache_key="s2")
        counts = [len(server.seen) for server in route.servers]
        assert sum(counts) == 16 and sorted(counts)[:2] == [0, 0]


async def test_keys_of_clients_end_at_a_router_with_keys_of_its_own() -> None:
    server = FakeServer()
    async with routed(server, api_key=("client-key",), worker_api_key="worker-key") as route:
        assert (await route.ask())[0] == 401
        assert (await route.ask(headers={"Authorization": "Bearer client-key"}))[0] == 200
        assert server.seen[-1].headers["Authorization"] == "Bearer worker-key"
    server = FakeServer()
    async with routed(server) as route:
        await route.ask(headers={"Authorization": "Bearer theirs"})
        assert server.seen[-1].headers["Authorization"] == "Bearer theirs"


async def test_the_routes_of_all_apis_are_passed_on_and_those_of_the_operator_are_not() -> None:
    async with routed(FakeServer()) as route:
        for path in ("/v1/messages", "/v2/rerank", "/api/chat", "/tokenize"):
            async with route.client.post(path, json={"model": "m"}) as response:
                assert response.status == 200, path
        assert (await route.get("/server_info"))[0] == 404


@pytest.mark.parametrize(
    ("urls", "message"),
    [((), "needs --worker-urls"), (("localhost:8000",), "http://"), (("http://a", "http://a/v1"), "twice")],
)
def test_bad_worker_urls_are_refused(urls: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RouteConfig(urls)
