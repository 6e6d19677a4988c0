"""The parts of a reply that chat, completions and streams share, as plain dicts ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from app.api.call import Call
from app.api.text_offsets import TextOffsets, find_prompt_offsets
from engine import CompletionOutput, Logprob, RequestOutput, TokenLogprobs

# JSON has no -Infinity; vLLM writes the same number
MIN_LOGPROB = -9999.0

Json = dict[str, Any]


def usage(num_prompt: int, num_output: int, num_cached: int) -> Json:
    """Return OpenAI's usage object without the details of a finished request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(call: Call, outputs: Sequence[RequestOutput], num_output: int) -> Json:
    """Return the usage of a finished call, summed over its prompts; `num_output` counts the tokens of all choices."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    found = usage(num_prompt, num_output, sum(output.num_cached_tokens for output in outputs))
    num_reasoning = num_reasoning_tokens(call)
    details = {} if num_reasoning is None else {"reasoning_tokens": num_reasoning}
    if call.prediction is not None:
        pairs = [output.metrics.drafts.get("prediction", (0, 0)) for output in outputs]
        num_drafted, num_accepted = (sum(counts) for counts in zip(*pairs, strict=True))
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_drafted - num_accepted
    return found | ({"completion_tokens_details": details} if details else {})


def num_reasoning_tokens(call: Call) -> int | None:
    """Return the number of reasoning tokens of a call; None if it cannot have any."""
    return None if call.thinking is None or call.validator is None else call.validator.num_reasoning_tokens()


def count_output(outputs: Iterable[RequestOutput]) -> int:
    """Return the number of tokens of whole outputs."""
    return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)


def extras(call: Call, outputs: Sequence[RequestOutput], indices: Iterable[int]) -> Json:
    """Return fields that a reply has only on request.

    Args:
        outputs: the last of each prompt that it is about.
        indices: the choices that it is about, numbered through all prompts.
    """
    found = structured_of(call, outputs[0], indices)
    if call.sampling.saves_blocks:
        found["kv_transfer_params"] = describe_saved(
            call, sum(len(each.prompt_token_ids) for each in outputs)
        )
    return found


def describe_saved(call: Call, num_tokens: int) -> Json:
    """Return what a proxy passes to the decode server; that server needs only the prompt to find the blocks."""
    transfer = call.context.engine.config.read_kv_transfer()
    assert transfer is not None, "the engine has refused the request"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.engine_id,
        "remote_request_id": call.reply_id,
        "remote_block_ids": [],
        "remote_host": transfer.kv_ip,
        "remote_port": transfer.kv_port,
        "remote_num_tokens": num_tokens,
        "tp_size": call.context.engine.config.tensor_parallel_size,
    }


def structured_of(call: Call, output: RequestOutput, indices: Iterable[int] = (0,)) -> Json:
    """Return the field with the backend of the grammar, its plan if requested, and the check; empty without one."""
    info = output.grammar
    if info is None:
        return {}
    described: Json = {"backend": info.backend, "compile_time_ms": round(info.compile_time_s * 1000, 3)}
    if call.body.return_grammar_plan:
        names = ("pointer", "keyword", "enforced_by")
        described["plan"] = [dict(zip(names, entry, strict=True)) for entry in info.plan]
    is_valid = None if call.validator is None else call.validator.is_valid(indices)
    return {"structured": described | {"valid": is_valid}}


def finish_reason(choice: CompletionOutput, calls_field: str | None) -> str | None:
    """Return OpenAI's finish_reason: the field of the calls, if there are any and the model ended the choice.

    A stop string may have cut a call short. Clients must not execute it, so the reason stays "stop".
    """
    return calls_field if calls_field and is_own_end(choice) else choice.finish_reason


def is_own_end(choice: CompletionOutput) -> bool:
    """Return whether the model ended the choice: neither a limit nor a stop string cut it."""
    return choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)


def header(call: Call, kind: str) -> Json:
    """The first fields of every reply and chunk."""
    return {
        "id": call.reply_id,
        "object": kind,
        "created": call.created,
        "model": call.model,
        "system_fingerprint": call.context.system_fingerprint,
    }


def chat_logprobs(call: Call, choice: CompletionOutput) -> Json | None:
    """OpenAI's chat form: one entry a token with its alternatives."""
    if call.sampling.logprobs is None or choice.logprobs is None:
        return None
    content = []
    for position in choice.logprobs:
        top = [_chat_entry(call, entry) for entry in position.top[: call.sampling.logprobs]]
        content.append({**_chat_entry(call, position.token), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(call: Call, entry: Logprob) -> Json:
    found: Json = {
        "token": _token_text(call, entry),
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.decoded_token.encode("utf-8", "replace") if entry.part is None else entry.part),
    }
    if entry.masked_logprob is not None:
        found["masked_logprob"] = _finite(entry.masked_logprob)
    return found


def completion_logprobs(
    call: Call, positions: Sequence[TokenLogprobs | None], ids: Sequence[int], offsets: Sequence[int]
) -> Json:
    """The older form of text completions: four lists. The first token of an echoed prompt has no probability.

    Args:
        offsets: where each token begins in the choice's text (`text_offsets.py`).
    """
    places = zip(positions, ids, offsets, strict=False)
    known = [(_first(call, token_id) if p is None else p.token, offset) for p, token_id, offset in places]
    return {
        "tokens": [_token_name(call, token) for token, _ in known],
        "token_logprobs": [None if p is None else _finite(p.token.logprob) for p in positions],
        "top_logprobs": [None if p is None else _top(call, p) for p in positions],
        "text_offset": [offset for _, offset in known],
    }


def echo_logprobs(call: Call, output: RequestOutput, echo: str) -> Json:
    """The same of a prompt that the reply repeats."""
    ids = output.prompt_token_ids
    positions = output.prompt_logprobs or [None] * len(ids)
    offsets = find_prompt_offsets(call.context.engine.tokenizer, echo, ids)
    return completion_logprobs(call, positions, ids, offsets)


def output_offsets(call: Call, output: RequestOutput, start: int) -> TextOffsets:
    """Return the counter of token offsets of one choice, after `start` characters of a repeated prompt."""
    tokenizer, skips_special = call.context.engine.tokenizer, call.sampling.skip_special_tokens
    return TextOffsets(tokenizer, output.prompt_token_ids, skips_special, start)


def _top(call: Call, position: TokenLogprobs) -> dict[str, float]:
    """The token and its rivals by name; a rival whose name is taken is named by its id."""
    found: dict[str, float] = {}
    for entry in {entry.token_id: entry for entry in (position.token, *position.top)}.values():
        name = _token_name(call, entry)
        found[f"token_id:{entry.token_id}" if name in found else name] = _finite(entry.logprob)
    return found


def _token_name(call: Call, entry: Logprob) -> str:
    r"""A token in the older form, which has no list of bytes: a part of a character is bytes:\xf0\x9f."""
    if entry.part is None or entry.decoded_token.isascii() or call.body.return_tokens_as_token_ids:
        return _token_text(call, entry)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.part)


def _first(call: Call, token_id: int) -> Logprob:
    """The first token of a prompt, of which only the text is known."""
    tokenizer = call.context.engine.tokenizer
    piece = "" if tokenizer is None else tokenizer.token_piece(token_id)
    if isinstance(piece, str):
        return Logprob(token_id, 0.0, 0, piece)
    return Logprob(token_id, 0.0, 0, piece.decode(errors="replace"), part=piece)


def prompt_logprobs(call: Call, output: RequestOutput) -> list[Json | None] | None:
    """Return vLLM's form: for each prompt token, a map from token id to its probability; None if not asked for."""
    if call.sampling.prompt_logprobs is None or output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(entry.token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for entry in (*position.top, position.token)
        }
        for position in output.prompt_logprobs
    ]


def _finite(value: float) -> float:
    # written so that NaN becomes the floor too
    return value if value > MIN_LOGPROB else MIN_LOGPROB


def _token_text(call: Call, entry: Logprob) -> str:
    return f"token_id:{entry.token_id}" if call.body.return_tokens_as_token_ids else entry.decoded_token
