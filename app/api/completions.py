"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api import replies
from app.api.call import Call, make_reply_id, make_validator
from app.api.chunks import Chunks, is_scoring, stream, without_hidden
from app.api.constraint import read_constraint
from app.api.context import ApiContext, Context
from app.api.errors import BadRequest
from app.api.protocol import CompletionRequest
from app.api.request_info import RequestInfo
from app.api.sampling import completion_sampling, read_prompts
from app.api.sse import STREAMED, EventStream, unless_gone
from app.api.tokens import encode, require_tokenizer
from app.concurrency import gather_bounded
from engine import CompletionOutput, RequestOutput

router = APIRouter()
MAX_CHOICES = 1024
SEPARATOR = "<|endoftext|>"  # GPT-2's, Qwen's and SmolLM's name for it


@router.post("/v1/completions", responses=STREAMED)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Continue one text or several, in one piece or as a stream."""
    call = await prepare(body, request.state.info, context)
    if body.stream:
        chunks = Chunks(call, "text_completion", is_chat=False)
        return EventStream(lambda emit: stream(chunks, partial(read_echo, call), emit))
    outputs = await unless_gone(request.receive, finish_all(call))
    return JSONResponse(whole_reply(call, outputs))


async def prepare(body: CompletionRequest, info: RequestInfo, context: ApiContext) -> Call:
    """Check the request and tokenise its prompts off the loop.

    Raises:
        ApiError, InvalidRequest: the request cannot be served as asked.
    """
    model = info.model = context.check_model(body.model)
    context.require_ready()
    constraint = read_constraint(body)
    sampling = completion_sampling(body, constraint, await context.read_sampling_defaults())
    info.counts_output = body.max_tokens != 0
    if body.best_of not in (None, 1, sampling.n):
        message = f"best_of={body.best_of} must be n={sampling.n}: every text that is drawn is in the reply"
        raise BadRequest(message[:200], "best_of", "unsupported_field")
    given = prompts = read_prompts(_new_document(context) if body.prompt is None else body.prompt)
    if len(prompts) * sampling.n > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n={sampling.n} are more than {MAX_CHOICES} choices"
        raise BadRequest(message, "n")
    if body.add_special_tokens is False:
        prompts = [p if isinstance(p, list) else await encode(p, context, False) for p in prompts]
    reply_id = make_reply_id("cmpl-", info, body)
    validator = make_validator(context, constraint)
    return Call(
        context, info, body, reply_id, model, prompts, sampling, constraint, validator=validator, given=given
    )


def _new_document(context: ApiContext) -> list[int]:
    """The prompt of a request without one: what stands before the first word of a document.

    Raises:
        ApiError: 400 where the model has no such token.
    """
    tokenizer = require_tokenizer(context)
    if ids := tokenizer.encode(""):
        return ids
    # models that mark no beginning know what stands between two documents
    between = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    known = [tokenizer.bos_token_id, *(between if len(between) == 1 else ()), *tokenizer.eos_token_ids]
    for token_id in known:
        if token_id is not None:
            return [token_id]
    raise BadRequest("prompt must not be null: this model has no token that begins a document", "prompt")


async def finish_all(call: Call) -> list[RequestOutput]:
    """Run every prompt to its end, side by side."""
    num = len(call.prompts)
    return await gather_bounded(map(call.finish, range(num)), num)


def whole_reply(call: Call, outputs: list[RequestOutput]) -> dict[str, Any]:
    """The text_completion object; choices are numbered through all prompts."""
    choices = [
        _choice(call, number, output, choice)
        for number, output in enumerate(outputs)
        for choice in output.outputs
    ]
    usage = replies.usage_of(call, outputs, 0 if is_scoring(call) else replies.count_output(outputs))
    reply = {**replies.header(call, "text_completion"), "choices": choices, "usage": usage}
    reply["kv_transfer_params"] = None
    return reply | replies.extras(call, outputs, range(len(choices)))


def read_echo(call: Call, number: int, output: RequestOutput) -> str:
    """Return the prompt of that number if the reply repeats it, as it was written; of token ids, the full text."""
    if not call.body.echo:
        return ""
    given = call.given[number]
    if isinstance(given, str):
        return given
    tokenizer = call.context.engine.tokenizer
    return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def _choice(call: Call, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    choice = without_hidden(call, choice)
    echo = read_echo(call, number, output)
    has_ids = call.body.return_token_ids
    return {
        "index": number * call.sampling.n + choice.index,
        "text": echo + choice.text,
        "logprobs": _logprobs(call, output, choice, echo),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prompt_logprobs": replies.prompt_logprobs(call, output),
        "token_ids": list(choice.token_ids) if has_ids else None,
        "prompt_token_ids": output.prompt_token_ids if has_ids else None,
    }


def _logprobs(
    call: Call, output: RequestOutput, choice: CompletionOutput, echo: str
) -> dict[str, Any] | None:
    if call.sampling.logprobs is None or choice.logprobs is None:
        return None
    if is_scoring(call):
        return replies.echo_logprobs(call, output, echo)
    offsets = replies.output_offsets(call, output, len(echo)).take(choice.token_ids)
    found = replies.completion_logprobs(call, choice.logprobs, choice.token_ids, offsets)
    if not call.body.echo:
        return found
    before = replies.echo_logprobs(call, output, echo)
    return {name: before[name] + found[name] for name in found}
