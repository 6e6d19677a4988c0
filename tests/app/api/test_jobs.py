"""/v1/jobs, /v1/files and /v1/batches: work in the background, also after a restart, each row exactly once."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from app.api.context import ApiContext
from app.api.job_kinds import make_answer
from app.config import AppConfig
from app.store import Limits, Store
from tests.app.api.harness import Server, limit_pages, run_server
from tests.fakes import FakeEngine
from tests.waiting import wait_until

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@asynccontextmanager
async def working(
    engine: Any = None, store: Store | None = None, is_idle: bool = False, **settings: Any
) -> AsyncIterator[Server]:
    """A server that works on its jobs."""
    store, config = store or Store(), AppConfig(**settings)
    engine = engine or FakeEngine()
    async with run_server(engine, config, store) as server:
        context: ApiContext = server.context
        work = asyncio.create_task(context.jobs.run(partial(make_answer, server.pool)))
        try:
            yield server
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def make_rows(count: int, url: str = "/v1/chat/completions", **more: Any) -> list[Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **more}
    return [{"custom_id": f"c{number}", "method": "POST", "url": url, "body": body} for number in range(count)]


def to_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def begin(client: openai.AsyncOpenAI, content: bytes) -> Any:
    file = await client.files.create(file=content, purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def wait_for(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def is_over() -> bool:
        return (await client.batches.retrieve(batch_id)).status not in ("validating", "in_progress")

    await wait_until(is_over)
    return await client.batches.retrieve(batch_id)


async def test_the_official_client_runs_a_batch_from_upload_to_removal() -> None:
    async with working() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        rows = [*make_rows(20), {**make_rows(1, max_tokens=-1)[0], "custom_id": "bad"}]
        file = await client.files.create(file=("in.jsonl", to_lines(rows)), purpose="batch")
        assert (file.filename, file.purpose, file.bytes) == ("in.jsonl", "batch", len(to_lines(rows)))
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        batch = await wait_for(client, batch.id)
        counts = batch.request_counts
        assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (21, 20, 1)
        lines = (await client.files.content(batch.output_file_id)).text.splitlines()
        answers = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, lines)}
        assert len(lines) == 20 and answers["c7"]["choices"][0]["message"]["content"].startswith("You s")
        (error,) = map(json.loads, (await client.files.content(batch.error_file_id)).text.splitlines())
        assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
        assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
        assert {each.id async for each in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
        output = await client.files.retrieve(batch.output_file_id)
        assert output.bytes == len("\n".join([*lines, ""]).encode())
        assert (await client.files.delete(output.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(output.id)
        with pytest.raises(openai.BadRequestError, match="completed"):
            await client.batches.cancel(batch.id)
        assert (await server.ask(f"/v1/jobs/{batch.id}", "DELETE"))[0] == 200
        reply = await client.files.with_raw_response.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert "expires_after" in reply.headers["x-troupe-warning"]
        later = reply.parse()
        assert [each.id async for each in client.files.list()] == [later.id, file.id]
        assert [each.id async for each in client.files.list(order="asc", limit=1)] == [file.id, later.id]


async def test_what_a_list_or_a_batch_cannot_honour_is_refused_by_name() -> None:
    async with working() as server:
        for path in ("/v1/files?after=nix", "/v1/batches?after=nix", "/v1/jobs?after=nix"):
            status, reply = await server.get(path)
            assert (status, reply["error"]["param"]) == (400, "after") and "'nix'" in reply["error"]["message"]
        status, reply = await server.get("/v1/files?order=foo")
        assert (status, reply["error"]["message"]) == (400, "order='foo' must be 'asc' or 'desc'")
        asked = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "1h"}
        status, reply = await server.post("/v1/batches", asked)
        assert status == 400 and "24h" in reply["error"]["message"] and "'1h'" in reply["error"]["message"]
        status, reply = await server.post("/v1/batches", asked | {"completion_window": "24h"})
        assert status == 400 and reply["error"]["message"].startswith("there is no file 'x'")


async def test_rows_that_no_request_could_be_fail_alone_and_once() -> None:
    """Half a surrogate pair is legal in JSON, and cannot be written as UTF-8."""
    async with working() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        (row,) = make_rows(1)
        bodies = ["c", [1], None, {**row["body"], "model": "\ud800"}]
        rows = [row, row | {"custom_id": "\ud800"}]
        rows += [row | {"custom_id": f"bad{at}", "body": body} for at, body in enumerate(bodies)]
        batch = await wait_for(client, (await begin(client, to_lines(rows))).id)
        lines = (await client.files.content(batch.output_file_id)).text.splitlines()
        assert {json.loads(line)["custom_id"] for line in lines} == {"c0", "\ud800"}
        errors = [json.loads(line) for line in (await client.files.content(batch.error_file_id)).text.splitlines()]
        assert {each["custom_id"]: each["response"]["status_code"] for each in errors} == (
            {"bad0": 400, "bad1": 400, "bad2": 400, "bad3": 400}
        )


async def test_a_batch_for_a_model_that_is_not_here_ends() -> None:
    async with working() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        (row,) = make_rows(1)
        for model in ("another", 5, ["a"]):
            lines = to_lines([row | {"body": {**row["body"], "model": model}}])
            batch = await wait_for(client, (await begin(client, lines)).id)
            assert batch.request_counts is not None and batch.request_counts.failed == 1


async def test_a_job_whose_work_fails_ends_with_the_reason() -> None:
    async with working() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        server.pool.first.jobs._answer_rows = None  # type: ignore[assignment]
        batch = await begin(client, to_lines(make_rows(2)))
        assert (await wait_for(client, batch.id)).status == "cancelled"
        assert (await server.get(f"/v1/jobs/{batch.id}"))[1]["error"] == "internal error: TypeError"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no rows"),
        (b'{"custom_id": "a"}\n[]\n', "line 1 has the url 'None'"),
        (b"\n" + to_lines([*make_rows(1), *make_rows(1)]), "line 3 has the custom_id 'c0' of an earlier line"),
        (to_lines(make_rows(1, "/v1/completions")), "endpoint /v1/chat/completions"),
    ],
)
async def test_a_file_that_is_no_batch_is_refused_with_its_lines(content: bytes, words: str) -> None:
    async with working() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError, match=words):
            await begin(client, content or b"\n")


async def test_an_extraction_in_the_background_gives_its_rows_as_they_end() -> None:
    async with working(FakeEngine(record='{"name": "Ada"}')) as server:
        body = {"schema": SCHEMA, "rows": [{"text": f"Ada {number}", "id": str(number)} for number in range(30)]}
        status, job = await server.post("/v1/extract?background=true", body)
        assert (status, job["object"], job["counts"]["waiting"]) == (202, "job", 30)
        rows: list[Any] = []
        after = 0
        while job["status"] in ("queued", "running") or job["rows"]:
            _, job = await server.get(f"/v1/jobs/{job['id']}?after={after}&limit=7")
            after = job["next"]
            rows += job["rows"]
        assert sorted(row["row"] for row in rows) == list(range(30)) and job["counts"]["done"] == 30
        first = min(rows, key=lambda row: row["row"])["result"]
        assert (first["record"], first["row"]) == ({"name": "Ada"}, {"id": "0"}) and first["evidence"]
        assert [each["id"] for each in (await server.get("/v1/jobs"))[1]["data"]] == [job["id"]]
        status, refused = await server.post("/v1/extract?background=true", {"schema": {"type": 5}, "text": "x"})
        assert (status, refused["error"]["code"]) == (400, "invalid_grammar")


async def test_failed_rows_are_tried_again_and_the_others_are_not() -> None:
    engine = FakeEngine(record='{"name": 5}')
    async with working(engine) as server:
        _, job = await server.post("/v1/extract?background=true", {"schema": SCHEMA, "rows": ["a", "", "b"]})
        place = f"/v1/jobs/{job['id']}"
        await wait_until_ended(server, place)
        counts = (await server.get(place))[1]["counts"]
        engine.record = '{"name": "Ada"}'
        status, job = await server.post(f"{place}/retry", {})
        assert status == 200 and job["counts"]["waiting"] == counts["failed"] > 0
        await wait_until_ended(server, place)
        _, job = await server.get(place)
        assert sorted(row["row"] for row in job["rows"]) == [0, 1, 2]


async def wait_until_ended(server: Server, place: str) -> None:
    async def is_over() -> bool:
        return (await server.get(place))[1]["status"] not in ("queued", "running")

    await wait_until(is_over)


async def wait_for_rows(server: Server, place: str, num_rows: int) -> None:
    async def are_there() -> bool:
        return len((await server.get(f"{place}?limit=1000"))[1]["rows"]) >= num_rows

    await wait_until(are_there)


async def test_a_job_goes_on_after_a_restart_with_each_row_once(tmp_path: Path) -> None:
    store, place = Store(tmp_path), ""
    for number in range(5):
        async with working(FakeEngine(step_s=0.001), store) as server:
            if not place:
                body = {"schema": SCHEMA, "rows": [f"row {row}" for row in range(100)]}
                _, job = await server.post("/v1/extract?background=true", body)
                place = f"/v1/jobs/{job['id']}"
            if number < 4:
                seen = len((await server.get(f"{place}?limit=1000"))[1]["rows"])
                await wait_for_rows(server, place, min(seen + 10, 100))
            else:
                await wait_until_ended(server, place)
                _, job = await server.get(f"{place}?limit=1000")
        store.close()
        store = Store(tmp_path)
    assert sorted(row["row"] for row in job["rows"]) == list(range(100)) and job["status"] == "completed"
    store.close()


async def test_a_cancelled_job_keeps_what_is_done_and_a_deleted_one_leaves_nothing() -> None:
    store = Store()
    async with working(FakeEngine(step_s=0.01, reply=lambda prompt: "x" * 500), store) as server:
        _, job = await server.post("/v1/extract?background=true", {"schema": SCHEMA, "rows": ["a"] * 50})
        place = f"/v1/jobs/{job['id']}"
        await wait_until(lambda: len(server.engine.requests) >= 16)
        status, job = await server.post(f"{place}/cancel", {})
        assert (status, job["status"], job["counts"]["running"]) == (200, "cancelled", 0)
        num_asked = len(server.engine.requests)
        assert (await server.post(f"{place}/cancel", {}))[0] == 400
        assert (await server.post(f"{place}/retry", {}))[1]["status"] == "queued"
        await wait_until(lambda: len(server.engine.requests) > num_asked)
        assert (await server.ask(place, "DELETE"))[0] == 200 and (await server.get(place))[0] == 404
    left = await store.run(lambda db: db.execute("SELECT job FROM rows UNION ALL SELECT id FROM objects").fetchall())
    assert left == []


async def test_jobs_and_files_are_seen_with_their_key_only() -> None:
    async with working(api_key=("a", "b")) as server:
        mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        _, job = await server.post("/v1/extract?background=true", {"schema": SCHEMA, "text": "x"}, headers=mine)
        for path in (f"/v1/jobs/{job['id']}", f"/v1/batches/{job['id']}"):
            assert (await server.get(path, headers=other))[0] == 404
        assert (await server.ask(f"/v1/jobs/{job['id']}", "DELETE", headers=other))[0] == 404
        assert (await server.get("/v1/jobs", headers=other))[1]["data"] == []
        assert (await server.get(f"/v1/jobs/{job['id']}", headers=mine))[0] == 200


async def test_nobody_can_list_the_files_of_others_where_no_key_tells_them_apart() -> None:
    async with working(host="0.0.0.0") as server:
        _, job = await server.post("/v1/extract?background=true", {"schema": SCHEMA, "text": "x"})
        for path in ("/v1/jobs", "/v1/files", "/v1/batches"):
            assert (await server.get(path))[0] == 403
        assert (await server.get(f"/v1/jobs/{job['id']}"))[0] == 200


async def test_a_job_without_room_ends_and_says_why() -> None:
    store = Store(limits=Limits(max_bytes=40_000))
    async with working(FakeEngine(record='{"name": "Ada"}'), store) as server:
        _, job = await server.post("/v1/extract?background=true", {"schema": SCHEMA, "rows": ["a" * 780] * 10})
        await wait_until_ended(server, f"/v1/jobs/{job['id']}")
        _, job = await server.get(f"/v1/jobs/{job['id']}")
        assert job["status"] == "cancelled" and "10,000 bytes" in job["error"] and job["counts"]["done"] > 0


async def test_a_job_waits_while_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.job_runner.LOOK_S", 0.01)
    store = Store()
    body = {"schema": SCHEMA, "rows": ["a" * 200] * 60}
    async with run_server(FakeEngine(record='{"name": "Ada"}'), AppConfig(), store) as server:
        _, job = await server.post("/v1/extract?background=true", body)
        await store.run(limit_pages, 1)
        status, refusal = await server.post("/v1/extract?background=true", body)
        assert status == 507 and refusal["error"]["message"] == "the disk of the data folder (--data-dir) is full"
        work = asyncio.create_task(server.context.jobs.run(partial(make_answer, server.pool)))
        await wait_until(lambda: f"the job {job['id']} waits: the disk" in caplog.text)
        await store.run(limit_pages, 10_000)
        await wait_until_ended(server, f"/v1/jobs/{job['id']}")
        _, job = await server.get(f"/v1/jobs/{job['id']}")
        assert (job["status"], job["counts"]["done"]) == ("completed", 60)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
