"""Checks fields that no request model defines: a short list is ignored, all others are a 400.

A dropped field would change the answer without notice. A field passes if it is null or empty, if its value is the
default of the server that knows it (NEUTRAL), or if it is only bookkeeping (IGNORED).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from app.api.errors import BadRequest
from app.api.wording import say_value

# Not {}, which is a schema that accepts everything.
EMPTY: tuple[Any, ...] = (None, False, [], "")
# Bookkeeping fields, cache hints and formatting wishes that change no token here.
IGNORED = frozenset([
    "cache_prompt", "id_slot", "include_reasoning", "keep_alive", "metadata", "moderation", "num_batch", "num_ctx",
    "num_gpu", "num_keep", "num_thread", "parallel_tool_calls",
    "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort",
    "reasoning_format", "return_progress", "safety_identifier", "service_tier", "session_id", "store",
    "stream_interval", "timings_per_token", "user", "verbosity",
])  # fmt: skip
# field -> values, beside the empty ones, that request nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "dry_multiplier": (0,), "dynatemp_range": (0,), "function_call": ("none", "auto"),
    "length_penalty": (1,), "mirostat": (0,), "mm_processor_kwargs": ({},), "vllm_xargs": ({},),
    "modalities": (["text"],), "n_probs": (0,),
    "no_repeat_ngram_size": (0,), "num_beams": (1,), "repeat_last_n": (0,), "repeat_penalty": (1,),
    "tfs_z": (1,), "tool_choice": ("none", "auto"), "top_a": (0,), "top_n_sigma": (-1, 0), "typical_p": (1,),
    "xtc_probability": (0,), "do_sample": (True,), "spaces_between_special_tokens": (True,),
}  # fmt: skip
# Fields for which false is a request.
MEANT_IF_FALSE = ("do_sample", "spaces_between_special_tokens")
# another server's or library's name -> the name to use here
OURS = {
    "max_length": "max_tokens", "max_new_tokens": "max_tokens", "max_tokens_to_sample": "max_tokens",
    "n_predict": "max_tokens", "num_predict": "max_tokens", "n_probs": "logprobs", "random_seed": "seed",
    "repeat_penalty": "repetition_penalty", "format": "response_format", "grammar": "structured_outputs",
    "json_schema": "response_format", "json_mode": "response_format", "schema": "response_format",
    "response_model": "response_format", "responseFormat": "response_format", "text": "response_format",
    "extra_body": "its fields in the body itself", "options": "its fields in the body itself",
}  # fmt: skip
CONSTRAINTS = "response_format or structured_outputs"
MAX_NAME_CHARS = 80


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Reject the first field that would be ignored.

    Raises:
        ApiError: 400 naming the field, and ours for the same thing.
    """
    for name, value in (extra or {}).items():
        is_absent = value is None if name in MEANT_IF_FALSE else is_empty(value)
        if not (name in IGNORED or is_absent or value in NEUTRAL.get(name, ())):
            shown = name[:MAX_NAME_CHARS]
            ours = OURS.get(name, CONSTRAINTS if name.startswith("guided_") else None)
            hint = f"; use {ours}" if ours else ""
            raise BadRequest(f"{shown} is not a field of this API{hint}", shown, "unknown_field")


def check_names(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Reject an unknown name in a group of fields, as in stream_options; null requests nothing.

    Args:
        where: the group's place in the request.

    Raises:
        ApiError: 400 naming the field, and those that are known.
    """
    wrong = next((name for name, value in given.items() if name not in known and value is not None), None)
    if wrong is not None:
        message = f"{where}.{wrong[:80]} is not a known field; known are {', '.join(known)}"
        raise BadRequest(message, field_of(where), "unknown_field")


def check_choice(where: str, value: object, allowed: Collection[str]) -> None:
    """Reject a value that is not one of the allowed texts.

    Raises:
        ApiError: 400 naming the field, and the allowed texts.
    """
    if not isinstance(value, str) or value not in allowed:
        message = f"{where}={say_value(value)} must be one of {', '.join(allowed)}"
        raise BadRequest(message, field_of(where))


def read_text(where: str, value: object) -> str:
    """Return a value that must be a text.

    Raises:
        ApiError: 400 naming the field.
    """
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a text", field_of(where))
    return value


def field_of(where: str) -> str:
    """Return the field of the request that a place is in: messages for messages[0].content."""
    return re.split(r"[.\[]", where)[0]


def is_empty(value: object) -> bool:
    """Return whether a value requests nothing; zero, which Python treats as false, may request something."""
    return value in EMPTY and (isinstance(value, bool) or not isinstance(value, int | float))
