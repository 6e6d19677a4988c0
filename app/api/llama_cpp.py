"""POST /completion, GET /props and GET /slots: the routes of llama.cpp's server, with its fields."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app import __version__
from app.api import completions, replies
from app.api.call import Call
from app.api.context import Context
from app.api.errors import BadRequest
from app.api.own_names import own_names
from app.api.protocol import CompletionRequest, Fields, Integer
from app.api.sse import STREAMED, Emit, EventStream, frame, unless_gone
from engine import CompletionOutput, RequestOutput

router = APIRouter()
Json = dict[str, Any]

# a field of /completion -> the field of /v1/completions that does the same
NAMES = {
    "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_probs": "logprobs", "min_keep": None,
    "samplers": None, "t_max_predict_ms": None, "post_sampling_probs": None, "n_keep": None, "repeat_last_n": None,
    "response_fields": None, "t_max_prompt_ms": None, "n_indent": None, "lora": None, "return_tokens": None,
}  # fmt: skip
SAME = (
    "prompt", "temperature", "top_k", "top_p", "min_p", "stop", "stream", "presence_penalty", "frequency_penalty",
)  # fmt: skip
DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
STOP_TYPES = {"length": "limit", "stop": "eos"}


class LlamaCompletion(Fields):
    """POST /completion: the fields of llama.cpp's server."""

    PASSED = frozenset((*SAME, *NAMES, *CompletionRequest.model_fields))

    prompt: Any
    stream: bool = False
    n_predict: Integer = -1
    seed: Integer = -1
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: Any = None
    return_tokens: bool = False


@router.post("/completion", responses=STREAMED)
async def complete(body: LlamaCompletion, request: Request, context: Context) -> Response:
    """Continue one text, in one reply or as a stream."""
    with own_names(
        {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
    ):
        call = await completions.prepare(read_request(body), request.state.visit, context)
    if body.n_predict < 0:
        call = replace(call, sampling=replace(call.sampling, max_tokens=None))  # up to the model's length
    if len(call.prompts) > 1:
        raise BadRequest("prompt must be one text or one list of token ids", "prompt")
    if body.stream:
        return EventStream(lambda emit: stream(call, body, emit), context.config.keep_alive_s, b"")
    output = await unless_gone(request.receive, call.finish())
    choice = output.outputs[0]
    reply: Json = {"content": choice.text, "has_new_line": "\n" in choice.text}
    if found := list_probabilities(call, choice):
        reply["completion_probabilities"] = found
    return JSONResponse(reply | finish(call, body, output, choice, list(choice.token_ids)))


def read_request(body: LlamaCompletion) -> CompletionRequest:
    """Return the equivalent request for /v1/completions.

    Raises:
        ApiError: 400 for a field that would change the text and is not known here.
    """
    fields: Json = DEFAULTS | {"prompt": body.prompt, "stream": body.stream, "add_special_tokens": True}
    for name, value in (body.model_extra or {}).items():
        if name in SAME or name in CompletionRequest.model_fields:
            fields[name] = value
        elif NAMES.get(name):
            fields[str(NAMES[name])] = value or None
    fields["max_tokens"] = None if body.n_predict < 0 else body.n_predict
    fields["seed"] = None if body.seed < 0 else body.seed
    if body.grammar and body.json_schema is not None:
        raise BadRequest("give either grammar or json_schema", "grammar", "too_many_constraints")
    if body.grammar:
        fields["structured_outputs"] = {"grammar": body.grammar}
    elif body.json_schema is not None:
        fields["structured_outputs"] = {"json": body.json_schema}
    fields["logit_bias"] = read_bias(body.logit_bias)
    return CompletionRequest.read(fields)


def read_bias(bias: Any) -> dict[str, float] | None:
    """Read a map from token ids, or llama.cpp's list of pairs, in which false forbids a token.

    Raises:
        ApiError: 400, it is neither.
    """
    if bias is None:
        return None
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise BadRequest("logit_bias must be a list of pairs of a token id and a number", "logit_bias", None)
    return {str(token): -100.0 if value is False else value for token, value in pairs}


async def stream(call: Call, body: LlamaCompletion, emit: Emit) -> None:
    """Emit pieces of the text, then the full result."""
    ids: list[int] = []
    probabilities: list[Json] = []  # of tokens whose text has not been sent
    has_new_line = False
    async with aclosing(call.generate()) as outputs:
        async for output in outputs:
            choice = output.outputs[0]
            ids += choice.token_ids
            piece: Json = {
                "index": 0,
                "content": choice.text,
                "tokens": list(choice.token_ids),
                "stop": False,
            }
            probabilities += list_probabilities(call, choice)
            has_new_line |= "\n" in choice.text
            if choice.text:
                if probabilities:
                    piece["completion_probabilities"], probabilities = probabilities, []
                await emit(frame(piece | {"id_slot": -1, "tokens_predicted": len(ids)}))
            if choice.is_finished:
                end = {"content": "", "has_new_line": has_new_line} | finish(call, body, output, choice, ids)
                await emit(frame(end))


def list_probabilities(call: Call, choice: CompletionOutput) -> list[Json]:
    """Return the log probabilities of the tokens with their ids; none without n_probs."""
    found, positions = replies.chat_logprobs(call, choice), choice.logprobs or ()
    for entry, position in zip(found["content"] if found else (), positions, strict=True):
        entry["id"] = position.token.token_id
        for other, each in zip(entry["top_logprobs"], position.top, strict=False):
            other["id"] = each.token_id
    return found["content"] if found else []


def finish(
    call: Call, body: LlamaCompletion, output: RequestOutput, choice: CompletionOutput, ids: list[int]
) -> Json:
    """Return the result fields of a finished completion."""
    times, num_in = output.metrics, len(output.prompt_token_ids)
    is_word = isinstance(choice.stop_reason, str)
    span = (times.last_token_time or 0.0) - (times.first_token_time or 0.0)
    prompt_ms, predicted_ms = (times.ttft or 0.0) * 1000, span * 1000
    return {
        "index": 0,
        "id_slot": -1,
        "stop": True,
        "model": call.model,
        "tokens": ids if body.return_tokens else [],
        "tokens_predicted": len(ids),
        "tokens_evaluated": num_in,
        "tokens_cached": output.num_cached_tokens,
        "truncated": False,
        "stop_type": "word" if is_word else STOP_TYPES.get(choice.finish_reason or "", "none"),
        "stopping_word": choice.stop_reason if is_word else "",
        "generation_settings": {
            name: getattr(call.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")
        }
        | {"n_predict": body.n_predict},
        "timings": {
            "cache_n": output.num_cached_tokens,
            "prompt_n": num_in - output.num_cached_tokens,
            "prompt_ms": round(prompt_ms, 3),
            "predicted_n": len(ids),
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_second": round(times.tokens_per_second(len(ids)) or 0.0, 3),
        },
    }


@router.get("/props")
async def show_properties(context: Context) -> Json:
    """Show the model and the defaults of /completion."""
    context.require_ready()
    max_model_len = context.engine.resolved.max_model_len
    return {
        "default_generation_settings": {"n_ctx": max_model_len, "params": DEFAULTS | {"n_predict": -1}},
        "total_slots": context.engine.resolved.scheduler.max_num_seqs,
        "model_alias": context.served_names[0],
        "model_path": context.served_names[0],
        "modalities": {"vision": False, "audio": False},
        "build_info": f"troupe-{__version__}",
    }


@router.get("/slots")
async def list_slots(context: Context) -> list[Json]:
    """Return one entry for each request that can run at once, without its text."""
    context.require_ready()
    num_running, n_ctx = context.engine.stats().num_running, context.engine.resolved.max_model_len
    return [
        {"id": number, "n_ctx": n_ctx, "is_processing": number < num_running}
        for number in range(context.engine.resolved.scheduler.max_num_seqs)
    ]
