"""POST /v1/embeddings of OpenAI; /rerank and /score with vLLM's fields. They need a model that supports embeddings."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Coroutine, Iterable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest
from app.api.fields import VECTOR
from app.api.protocol import Fields, Integer
from app.api.sampling import read_prompts
from app.api.sse import unless_gone
from engine import Embedding, Score

router = APIRouter(route_class=JsonRoute)
MAX_INPUTS = 2048  # as OpenAI's limit

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
OneOrMore = str | Texts


class PoolingFields(Fields):
    """Common fields of the requests for vectors and scores."""

    CONSTRAINTS = VECTOR

    model: str | None = None
    priority: Integer = Field(default=0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    # Number of tokens to read of each text or pair of texts; -1: as many as the model takes.
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None

    def read_options(self, context: ApiContext, model: str) -> dict[str, Any]:
        """Return the options of the engine's requests."""
        adapter = context.select_adapter(model)
        if (most := self.truncate_prompt_tokens) == 0:
            raise BadRequest("truncate_prompt_tokens=0 must be -1 or at least 1", "truncate_prompt_tokens")
        options = {"lora_request": adapter, "priority": self.priority, "cache_salt": self.cache_salt}
        return options | {"max_tokens": most}


class EmbeddingRequest(PoolingFields):
    """POST /v1/embeddings."""

    input: Any
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"


class Document(Fields):
    """A document of a rerank request as Cohere's and Jina's clients send it."""

    PLACE = ("documents",)
    CONSTRAINTS = VECTOR

    text: str


class RerankRequest(PoolingFields):
    """POST /rerank; top_n and max_tokens_per_doc of 0 set no limit."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[Integer, Field(ge=0)] = 0
    max_tokens_per_doc: Annotated[Integer, Field(ge=0)] = 0
    instruction: str | None = None
    return_documents: bool = True


class ScoreRequest(PoolingFields):
    """POST /score: vLLM's names of both generations."""

    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    queries: OneOrMore | None = None
    documents: OneOrMore | None = None
    instruction: str | None = None


@router.post("/v1/embeddings")
async def embed(body: EmbeddingRequest, request: Request, context: Context) -> JSONResponse:
    """Return one vector per input."""
    model = context.check_model(body.model)
    context.require_ready()
    options = body.read_options(context, model)
    work = context.embedder.embed(read_prompts(body.input, "input", MAX_INPUTS), body.dimensions, **options)
    found = await finish(work, request, model)
    is_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(each.vector.astype("<f4").tobytes()).decode()
            if is_text
            else each.vector.tolist(),
        }
        for index, each in enumerate(found)
    ]
    usage = count(each.num_tokens for each in found)
    return JSONResponse({"object": "list", "data": data, "model": model, "usage": usage})


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankRequest, request: Request, context: Context) -> JSONResponse:
    """Return the documents, best first."""
    model = context.check_model(body.model)
    context.require_ready()
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    work = context.embedder.score(
        [body.query], documents, body.instruction, max_document_tokens=body.max_tokens_per_doc or None,
        **body.read_options(context, model),
    )
    scores = await finish(work, request, model)
    order = sorted(range(len(scores)), key=lambda index: -scores[index].score)[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index].score} for index in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    usage = count(each.num_tokens for each in scores)
    reply = {"id": f"rerank-{secrets.token_hex(8)}", "model": model, "usage": usage, "results": results}
    return JSONResponse(reply)


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request, context: Context) -> JSONResponse:
    """Score each pair of texts; a single text on the left is paired with every text on the right."""
    model = context.check_model(body.model)
    context.require_ready()
    names = ("text_1", "text_2") if body.text_1 or body.text_2 else ("queries", "documents")
    pair = [getattr(body, name) for name in names]
    if not all(pair) or (names[0] == "text_1" and (body.queries or body.documents)):
        raise BadRequest("give either text_1 and text_2, or queries and documents", names[0])
    left, right = ([each] if isinstance(each, str) else each for each in pair)
    options = body.read_options(context, model)
    work = context.embedder.score(left, right, body.instruction, names=names, **options)
    scores = await finish(work, request, model)
    data = [{"object": "score", "index": index, "score": each.score} for index, each in enumerate(scores)]
    reply = {"id": f"score-{secrets.token_hex(8)}", "object": "list", "created": int(time.time()), "model": model}
    return JSONResponse(reply | {"data": data, "usage": count(each.num_tokens for each in scores)})


Pooled = TypeVar("Pooled", Embedding, Score)


async def finish(work: Coroutine[Any, Any, list[Pooled]], request: Request, model: str) -> list[Pooled]:
    """Await vectors or scores, unless the client goes away, and note their tokens."""
    info = request.state.info
    info.model = model
    # Run in a separate task: its task group cancels its task, which anyio would mistake for a cancelled request.
    found = await unless_gone(request.receive, asyncio.ensure_future(work))
    for each in found:
        info.count(each.num_tokens, 0, 0)
    return found


def count(counts: Iterable[int]) -> dict[str, int]:
    """Return the usage of a reply."""
    total = sum(counts)
    return {"prompt_tokens": total, "total_tokens": total}
