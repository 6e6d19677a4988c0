"""Embeddings, rerank and score over HTTP, with OpenAI's client and a tiny model."""

import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, run_server
from tests.engine.embedding_folders import make_embedding_folder, make_reranker_folder

SETTINGS: dict[str, Any] = {"num_blocks": 200, "num_threads": 1, "served_model_name": "tiny"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    make_embedding_folder(tmp_path, matryoshka_dimensions=[8])
    async with (
        Engine(EngineConfig(str(tmp_path), **SETTINGS)) as engine,
        run_server(engine, AppConfig()) as one,
    ):
        yield one


@pytest.fixture
async def reranker(tmp_path: Path) -> AsyncIterator[Server]:
    folder = tmp_path / "Qwen3-Reranker-tiny"
    folder.mkdir()
    make_reranker_folder(folder)
    async with (
        Engine(EngineConfig(str(folder), **SETTINGS)) as engine,
        run_server(engine, AppConfig()) as one,
    ):
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
        ({"input": []}, "input", "input must be a string"),
        ({"input": ["a", ""]}, "input", r"input\[1\] is empty"),
        ({"input": [1, "a"]}, "input", "input must be a string"),
        ({"input": [[5, 10**6]]}, "prompt", "outside the vocabulary"),
        ({"input": "a", "dimensions": 9}, "dimensions", "must be one of 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "pooling": "mean"}, "pooling", "pooling"),
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
    assert "has no modules.json" in reply["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_come_back_best_first(reranker: Server, path: str) -> None:
    documents = ["the lazy dog", "hello again", "café"]
    status, reply = await reranker.post(path, {"query": "hello", "documents": documents, "top_n": 2})
    assert status == 200, reply
    _, scored = await reranker.post("/score", {"queries": "hello", "documents": documents})
    scores = [each["score"] for each in scored["data"]]
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [each["index"] for each in reply["results"]] == order
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx(
        [scores[at] for at in order], abs=1e-6
    )
    assert reply["results"][0]["document"] == {"text": documents[order[0]]}


async def test_scores_need_two_sides_of_one_generation(server: Server) -> None:
    status, reply = await server.post("/score", {"text_1": "a", "documents": ["b"]})
    assert status == 400
    assert "give either text_1 and text_2, or queries and documents" in reply["error"]["message"]
    status, reply = await server.post("/v1/score", {"text_1": ["hello", "fox"], "text_2": ["hello", "dog"]})
    assert status == 200, reply
    assert reply["data"][0]["score"] == pytest.approx(1, abs=1e-5)
