"""Embeddings, rerank and score over HTTP, with OpenAI's client and a tiny model."""

import asyncio
import base64
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from app.config import AppConfig
from engine import Embedder, Engine, EngineConfig
from tests.app.api.harness import Server, run_server
from tests.engine.embedding_folders import make_embedding_folder, make_reranker_folder
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS: dict[str, Any] = {"num_blocks": 200, "num_threads": 1, "served_model_name": "tiny"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("embedding")
    make_embedding_folder(folder, matryoshka_dimensions=[8])
    async with (Engine(EngineConfig(str(folder), **SETTINGS)) as engine, run_server(engine, AppConfig()) as one):
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reranker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("reranker") / "Qwen3-Reranker-tiny"
    folder.mkdir()
    make_reranker_folder(folder)
    async with (Engine(EngineConfig(str(folder), **SETTINGS)) as engine, run_server(engine, AppConfig()) as one):
        yield one


async def test_openais_client_gets_vectors(server: Server) -> None:
    """It asks for base64 unless told otherwise, and decodes it. Texts beside it may change the last bit."""
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        reply = await client.embeddings.create(model="tiny", input=["hello world", "quick fox"])
        plain = await client.embeddings.create(model="tiny", input="hello world", encoding_format="float")
        short = await client.embeddings.create(model="tiny", input="hello world", dimensions=8)
    assert [each.index for each in reply.data] == [0, 1]
    assert reply.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert np.linalg.norm(plain.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert len(short.data[0].embedding) == 8
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > plain.usage.prompt_tokens


async def test_inputs_may_be_texts_or_token_ids(server: Server) -> None:
    assert server.engine.tokenizer is not None
    ids = server.engine.tokenizer.encode("hello world")
    vectors = []
    for given in ("hello world", ids, [ids], ["hello world"]):
        status, reply = await server.post("/v1/embeddings", {"input": given})
        assert status == 200, reply
        vectors.append(reply["data"][0]["embedding"])
    assert all(vector == pytest.approx(vectors[0], abs=1e-6) for vector in vectors)
    _, reply = await server.post("/v1/embeddings", {"input": ids, "encoding_format": "base64"})
    found = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    assert found.tolist() == pytest.approx(vectors[0])


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"input": []}, "input", "input has 0 entries; 1 to 2048"),
        ({"input": ["a", ""]}, "input", r"input\[1\] is empty"),
        ({"input": [1, "a"]}, "input", "input must be a text"),
        ({"input": ["a", [5, 10**6]]}, "input", r"input\[1\]: .*outside the vocabulary"),
        ({"input": "a", "dimensions": 9}, "dimensions", "must be one of 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "pooling": "mean"}, "pooling", "pooling"),
        ({"input": ["a", [5] * 4000]}, "input", r"input\[1\] has 4000 tokens"),
        ({"input": "a", "body": "b"}, "body", "body is not a field of this route"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1"),
        ({"input": "a", "dimensions": 1.5}, "dimensions", "must be an integer"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
)
async def test_a_wrong_request_is_refused_by_field(
    server: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    status, reply = await server.post("/v1/embeddings", body)
    assert status == (404 if param == "model" else 400)
    assert reply["error"]["param"] == param
    assert re.search(reason, reply["error"]["message"])


async def test_a_model_without_pooling_files_says_which_are_missing(reranker: Server) -> None:
    status, reply = await reranker.post("/v1/embeddings", {"input": "hello"})
    assert (status, reply["error"]["param"]) == (400, "model")
    assert "the checkpoint has no modules.json" in reply["error"]["message"]
    assert str(Path(reranker.engine.config.model).parent) not in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("/rerank", {"documents": ["a"]}, "query", "query is required"),
        ("/rerank", {"query": ["x"], "documents": ["a"]}, "query", "must be a text"),
        ("/rerank", {"query": "x", "documents": ["hello", "hello " * 3000]}, "documents", r"documents\[1\] has"),
        ("/rerank", {"query": "x", "documents": [{"text": 5}]}, "documents", r"^documents\[0\]\.text=5 must be a text"),
        ("/rerank", {"query": "x", "documents": [{"a": "x"}]}, "documents", r"^documents\[0\]\.text is required"),
        ("/rerank", {"query": "x", "documents": [5]}, "documents", r"^documents\[0\]=5 must be a text or an object"),
        ("/score", {"query": "x", "documents": ["a"]}, "query", "use queries"),
        ("/score", {"text_1": "x", "text_2": ["hello", "hello " * 3000]}, "text_2", r"text_2\[1\] has"),
    ],
)
async def test_an_error_names_the_field_and_the_element(
    server: Server, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    status, reply = await server.post(path, body)
    assert (status, reply["error"]["param"]) == (400, param)
    assert re.search(reason, reply["error"]["message"]), reply


async def test_an_input_may_fill_the_models_context(server: Server) -> None:
    limit = server.engine.resolved.max_model_len
    status, reply = await server.post("/v1/embeddings", {"input": [[5] * limit, [5] * (limit - 1)]})
    assert (status, reply["usage"]["prompt_tokens"]) == (200, 2 * limit - 1)


NEUTRAL = {"truncate_prompt_tokens": None, "priority": 0, "user": "u", "normalize": True, "add_special_tokens": True}


async def test_fields_that_request_nothing_pass_and_others_are_named(server: Server) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        status, headers, _ = await server.ask(path, "POST", json=body | NEUTRAL)
        assert (status, headers.get("x-troupe-warning")) == (200, None)
        _, headers, _ = await server.ask(path, "POST", json=body | {"some_new_field": 1})
        assert "some_new_field" in headers["x-troupe-warning"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_back_best_first(reranker: Server, path: str) -> None:
    documents = ["the lazy dog", "hello again", "café"]
    asked = {"query": "hello", "documents": [*documents[:2], {"text": documents[2]}], "top_n": 2.0}
    status, reply = await reranker.post(path, asked)
    assert status == 200, reply
    _, scored = await reranker.post("/score", {"queries": "hello", "documents": documents})
    scores = [each["score"] for each in scored["data"]]
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [each["index"] for each in reply["results"]] == order
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx(
        [scores[at] for at in order], abs=1e-6
    )
    assert reply["results"][0]["document"] == {"text": documents[order[0]]}
    long = {"query": "hello", "documents": [text + " dog" * 400 for text in documents], "max_tokens_per_doc": 4}
    status, reply = await reranker.post(path, long)
    assert (status, len(reply["results"])) == (200, 3)
    assert reply["usage"]["total_tokens"] < 1000


async def test_scores_need_two_sides_of_one_generation(server: Server) -> None:
    status, reply = await server.post("/score", {"text_1": "a", "documents": ["b"]})
    assert status == 400
    assert "give either text_1 and text_2, or queries and documents" in reply["error"]["message"]
    status, reply = await server.post("/v1/score", {"text_1": ["hello", "fox"], "text_2": ["hello", "dog"]})
    assert status == 200, reply
    assert reply["data"][0]["score"] == pytest.approx(1, abs=1e-5)


async def test_ollamas_route_cuts_what_is_too_long(server: Server) -> None:
    body = {"model": "tiny:latest", "input": ["hello world", "hello " * 5000]}
    status, headers, reply = await server.ask("/api/embed", "POST", json=body)
    assert (status, len(reply["embeddings"])) == (200, 2) and reply["prompt_eval_count"] > 2
    assert "an input was cut" in headers["x-troupe-warning"]
    status, reply = await server.post("/api/embed", body | {"truncate": False})
    assert status == 400 and "input" in reply["error"]
    _, one = await server.post("/api/embeddings", {"model": "tiny", "prompt": "hello world"})
    _, several = await server.post("/api/embed", {"model": "tiny", "input": ["hello world"]})
    assert one == {"embedding": several["embeddings"][0]}


async def test_vectors_are_given_up_when_the_client_goes_and_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "troupe.requests")
    _, reply = await server.post("/v1/embeddings", {"input": "hello world"})
    await wait_until(lambda: len(caplog.messages) == 1)
    assert f"model=tiny prompt_tokens={reply['usage']['prompt_tokens']} " in caplog.messages[0]
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(self: Any, *given: Any, **options: Any) -> list[Any]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    monkeypatch.setattr(Embedder, "embed", wait)
    asking = asyncio.create_task(server.post("/v1/embeddings", {"input": "hello"}))
    await begun.wait()
    asking.cancel()
    await asyncio.wait_for(ended.wait(), 5)
