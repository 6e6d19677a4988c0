"""From a request's sampling fields to SamplingParams, and from its prompt fields to what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.constraint import Constraint
from app.api.errors import BadRequest
from app.api.fields import check_unknown
from app.api.own_names import own_names
from app.api.protocol import MAX_PROMPTS, ChatRequest, CompletionRequest, GenerationFields, read_all_whole
from engine import SamplingParams

MAX_LOGPROBS = 20
COPIED = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs",
)  # fmt: skip
# the last ones are of vLLM's connectors, which find blocks by their ids
KV_TRANSFER = (
    "do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_host",
    "remote_num_tokens", "remote_port", "remote_request_id", "tp_size", "transfer_id",
)  # fmt: skip


def chat_sampling(
    body: ChatRequest, constraint: Constraint | None, defaults: Mapping[str, float]
) -> SamplingParams:
    """Sampling of a chat request; without a limit it runs up to the model's length.

    Args:
        defaults: fields that the model recommends, for requests that do not have them.

    Raises:
        InvalidRequest: a value outside its range.
        ApiError: top_logprobs without logprobs.
    """
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs={body.top_logprobs} must be an integer from 0 to {MAX_LOGPROBS}"
        raise BadRequest(message[:200], "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    # two names of one limit: both have to be sound, and the lower holds
    sampling = _make(body, constraint, defaults, max_tokens=body.max_tokens, logprobs=logprobs)
    limit = body.max_completion_tokens
    if limit is None:
        return sampling
    with own_names({"max_tokens": "max_completion_tokens"}):
        other = _make(body, constraint, defaults, max_tokens=limit, logprobs=logprobs)
    return sampling if body.max_tokens is not None and body.max_tokens < limit else other


def completion_sampling(
    body: CompletionRequest, constraint: Constraint | None, defaults: Mapping[str, float]
) -> SamplingParams:
    """Sampling of a text completion; the default limit is OpenAI's 16 tokens.

    Raises:
        InvalidRequest: a value outside its range.
    """
    limit = 16 if body.max_tokens is None else body.max_tokens
    if limit == 0 and body.echo:
        # The engine always draws; scoring a prompt means one token that the reply leaves out.
        limit = 1
    changes: dict[str, Any] = {"max_tokens": limit, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    return _make(body, constraint, defaults, **changes)


def _make(
    body: GenerationFields, constraint: Constraint | None, defaults: Mapping[str, float], **changes: Any
) -> SamplingParams:
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs needs stream=false", "prompt_logprobs", "unsupported_field")
    values = {name: getattr(body, name) for name in COPIED if getattr(body, name) is not None}
    given = {name: value for name, value in changes.items() if value is not None}
    return SamplingParams(
        **({"max_tokens": None} | dict(defaults) | values | given),
        logit_bias=read_logit_bias(body.logit_bias),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        grammar=None if constraint is None else constraint.spec,
        output_kind="delta" if body.stream else "final",
        saves_blocks=read_kv_transfer(body.kv_transfer_params),
    )


def read_kv_transfer(given: dict[str, Any] | None) -> bool:
    """Return whether a proxy asks this server to compute the prompt for another one.

    With `do_remote_prefill` nothing is to be done: blocks are found by their content, not by the ids that come with it.
    """
    check_unknown(given or {}, KV_TRANSFER, "kv_transfer_params")
    flags = {name: (given or {}).get(name) or False for name in KV_TRANSFER[:2]}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise BadRequest(f"kv_transfer_params.{name} must be true or false", "kv_transfer_params")
    if all(flags.values()):
        message = "kv_transfer_params: one of do_remote_decode and do_remote_prefill is possible"
        raise BadRequest(message, "kv_transfer_params")
    return flags["do_remote_decode"]


def read_logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """JSON has only text keys; token ids come as digits."""
    wrong = next(
        (key for key in bias or {} if not (key.isascii() and key.isdigit() and len(key) <= 10)), None
    )
    if wrong is not None:
        message = f"logit_bias must map token ids to numbers; {wrong[:80]!r} is not a token id"
        raise BadRequest(message, "logit_bias")
    return {int(token): value for token, value in (bias or {}).items()}


def read_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a text completion: a text, token ids, or a list of either.

    Raises:
        ApiError: 400 for anything else, an empty prompt, or too many.
    """
    value = read_all_whole(value)
    if isinstance(value, list):
        value = [*map(read_all_whole, value)]
    if isinstance(value, str) or _is_ids(value):
        prompts = [value]
    elif isinstance(value, list) and value and all(isinstance(item, str) or _is_ids(item) for item in value):
        prompts = value
    else:
        message = "prompt must be a text, a list of token ids, or a list of either, none of them empty"
        raise BadRequest(message, "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(
            f"prompt has {len(prompts)} entries; at most {MAX_PROMPTS} are allowed", "prompt", None
        )
    if not all(prompts):
        raise BadRequest("prompt must not be empty", "prompt")
    return prompts


def _is_ids(value: object) -> bool:
    # type() and not isinstance(): true is not a token id
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item < 2**31 for item in value)
    )
