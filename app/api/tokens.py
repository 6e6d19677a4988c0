"""POST /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from app.api.chat import calls_many, show_calls, show_tools
from app.api.context import ApiContext, context_of
from app.api.errors import ApiError
from app.api.messages import read_messages, read_template_kwargs
from app.api.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from app.api.tools.use import read_tools
from engine import Tokenizer

router = APIRouter()
Context = Annotated[ApiContext, Depends(context_of)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, context: Context) -> dict[str, Any]:
    """Token ids of a prompt, or of chat messages under the model's template."""
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
    context.require_ready()
    tokenizer = require_tokenizer(context)
    if body.messages is not None:
        asked = ChatRequest(messages=body.messages, tools=body.tools, tool_choice=body.tool_choice)
        tools = read_tools(asked, await calls_many(body.tools, context))
        messages = await show_calls(read_messages(body.messages), context)
        tokens = await context.engine.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            **read_template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
            **await show_tools(tools, context),
        )
    elif body.add_special_tokens:
        tokens = await context.engine.encode(body.prompt or "")
    else:
        tokens = await encode_bare(body.prompt or "", context)
    texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": context.engine.resolved.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context) -> dict[str, str]:
    """Text of token ids, special tokens included."""
    context.check_model(body.model)
    context.require_ready()
    tokenizer = require_tokenizer(context)
    limit = tokenizer.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < limit), None)
    if wrong is not None:
        raise ApiError(
            400, f"tokens: {wrong} must be a token id from 0 to {limit - 1}"[:200], "tokens", "invalid_value"
        )
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


async def encode_bare(text: str, context: ApiContext) -> list[int]:
    """Token ids without the special tokens that the tokenizer would put around a text."""
    require_tokenizer(context)
    return await context.engine.encode(text, add_special_tokens=False)


def require_tokenizer(context: ApiContext) -> Tokenizer:
    """The engine's tokenizer.

    Raises:
        ApiError: the server was started without one.
    """
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise ApiError(
            400, "this server runs without a tokenizer: prompts are token ids", code="no_tokenizer"
        )
    return tokenizer
