"""An encoder behind the API: vectors, scores, cut texts, and a clear answer to what it does not do."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, run_server
from tests.engine.encoder_folders import make_encoder_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS: dict[str, Any] = {"num_threads": 1, "served_model_name": "tiny"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    make_encoder_folder(folder := tmp_path_factory.mktemp("encoder"))
    async with Engine(EngineConfig(str(folder), **SETTINGS)) as engine, run_server(engine, AppConfig()) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reranker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    make_encoder_folder(folder := tmp_path_factory.mktemp("reranker"), mode=None, num_labels=1)
    async with Engine(EngineConfig(str(folder), **SETTINGS)) as engine, run_server(engine, AppConfig()) as one:
        yield one


async def test_many_texts_in_one_request_have_the_vectors_of_each_alone(server: Server) -> None:
    texts = [f"the fox {'jumps ' * (number % 7)}over" for number in range(80)]
    status, reply = await server.post("/v1/embeddings", {"input": texts})
    assert status == 200, reply
    for number in (0, 5, 79):
        _, alone = await server.post("/v1/embeddings", {"input": texts[number]})
        assert reply["data"][number]["embedding"] == pytest.approx(alone["data"][0]["embedding"], abs=1e-6)
    status, compared = await server.post("/score", {"text_1": texts[3], "text_2": [texts[3], "dogs"]})
    assert status == 200 and compared["data"][0]["score"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("/v1/extract", {"text": "hi", "schema": {"type": "object"}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}},
        ),
    ],
)
async def test_text_is_refused_and_what_the_model_does_is_named(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    status, reply = await server.post(path, {"model": "tiny"} | body)
    assert status == 400, reply
    assert "this model is an encoder and generates no text" in str(reply)
    assert "/v1/embeddings" in str(reply)


async def test_long_texts_are_cut_where_the_client_asks(server: Server) -> None:
    long = "abcde " * 40
    status, reply = await server.post("/v1/embeddings", {"input": ["a", long]})
    assert (status, reply["error"]["param"]) == (400, "input")
    assert "input[1] has 202 tokens; this model takes at most 80" in reply["error"]["message"]
    for most, used in ((-1, 80), (12, 12), (500, 80)):
        status, reply = await server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": most})
        assert (status, reply["usage"]["prompt_tokens"]) == (200, used), reply
    status, short = await server.post("/v1/embeddings", {"input": "abcde abcde"})
    _, cut = await server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 12})
    assert np.allclose(short["data"][0]["embedding"], cut["data"][0]["embedding"], atol=1e-6)
    status, reply = await server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 2})
    assert (status, reply["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_pairs_are_ranked_and_the_longer_text_is_cut(reranker: Server) -> None:
    documents = ["the lazy dog", "fox", "a quick brown fox", "abcde " * 40]
    status, reply = await reranker.post("/rerank", {"query": "quick fox", "documents": documents})
    assert (status, reply["error"]["param"]) == (400, "documents") and "documents[3] has" in reply["error"]["message"]
    body = {"query": "quick fox", "documents": documents, "truncate_prompt_tokens": -1}
    status, reply = await reranker.post("/rerank", body)
    assert status == 200, reply
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    _, scored = await reranker.post("/score", {"queries": "quick fox", "documents": documents[:3]})
    by_index = {each["index"]: each["relevance_score"] for each in reply["results"]}
    assert [each["score"] for each in scored["data"]] == pytest.approx([by_index[at] for at in range(3)], abs=1e-6)
    _, odd = await reranker.post("/rerank", body | {"query": "abcdef " * 20, "truncate_prompt_tokens": 20})
    assert odd["usage"]["total_tokens"] <= 80
    status, reply = await reranker.post("/v1/embeddings", {"input": "hi"})
    assert (status, reply["error"]["param"]) == (400, "model")
