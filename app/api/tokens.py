"""POST /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from app.api.chat import prepare, read_chat
from app.api.context import ApiContext, Context, JsonRoute
from app.api.errors import BadRequest
from app.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, context: Context) -> JSONResponse:
    """Return the token ids of a prompt, or of chat messages under the model's template."""
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", "prompt")
    context.require_ready()
    tokenizer = require_tokenizer(context)
    fields = body.model_dump(exclude_unset=True, exclude={"return_token_strs"})
    if body.messages is not None:
        call = await prepare(read_chat(ChatRequest.read(fields)), request.state.info, context)
        assert isinstance(call.prompts[0], list), "the prompt of a chat is rendered to ids"
        tokens = call.prompts[0]
    else:
        CompletionRequest.read(fields)
        tokens = await encode(body.prompt or "", context, body.add_special_tokens is not False)
    texts = None
    if body.return_token_strs:
        texts = await asyncio.to_thread(lambda: [tokenizer.token_text(token) for token in tokens])
    reply = {
        "count": len(tokens), "max_model_len": context.engine.resolved.max_model_len, "tokens": tokens,
        "token_strs": texts,
    }
    # FastAPI would convert every token in Python before writing it
    return JSONResponse(reply)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context) -> dict[str, str]:
    """Return the text of token ids, special tokens included."""
    context.check_model(body.model)
    context.require_ready()
    tokenizer = require_tokenizer(context)
    limit, max_tokens = tokenizer.vocab_size, context.engine.resolved.max_model_len
    if len(body.tokens) > max_tokens:
        message = f"tokens has {len(body.tokens)} entries; this model takes at most {max_tokens} tokens"
        raise BadRequest(message, "tokens", "context_length_exceeded")
    wrong = next((token for token in body.tokens if not 0 <= token < limit), None)
    if wrong is not None:
        raise BadRequest(f"tokens: {wrong} must be a token id from 0 to {limit - 1}"[:200], "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


@router.get("/tokenizer_info")
async def show_tokenizer(context: Context) -> dict[str, Any]:
    """Return the names of special tokens and the chat template, for clients that render prompts themselves."""
    context.require_ready()
    limit = context.engine.resolved.max_model_len
    return require_tokenizer(context).describe() | {"model_max_length": limit}


async def encode(text: str, context: ApiContext, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a prompt."""
    tokenizer = require_tokenizer(context)
    max_tokens = context.engine.resolved.max_model_len
    # The longest token is found by a scan of the vocabulary, which is skipped for short texts.
    if len(text) > max_tokens and len(text) > (limit := max_tokens * tokenizer.max_token_chars):
        message = (
            f"prompt has {len(text)} characters, which do not fit the model's {max_tokens} tokens "
            f"(at most {limit} characters)"
        )
        raise BadRequest(message, "prompt", "context_length_exceeded")
    return await context.engine.encode(text, add_special_tokens=add_special_tokens)


def require_tokenizer(context: ApiContext) -> Tokenizer:
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise BadRequest("this server runs without a tokenizer: prompts are token ids", None, "no_tokenizer")
    return tokenizer
