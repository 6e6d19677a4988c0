"""Fields beyond the protocol models: refused, ignored in silence, or ignored with a log line.

A field that is known to change an answer is never dropped: one that cannot be honoured, one of another route, one by
which another server samples (llama.cpp, Ollama, transformers), and an unknown one that looks like a constraint are a
400, unless their value asks for nothing. OpenAI's bookkeeping fields change nothing and are ignored. Any other unknown
field is ignored, whatever it was meant to do, as vLLM does, and named in the log. Within a group of fields, such as
stream_options, an unknown one is a 400.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import ApiError

logger = logging.getLogger("troupe.api")

EMPTY: tuple[Any, ...] = (None, False, [], {}, "")

# field -> the values that ask for nothing, beside the empty ones
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "input_audio": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (),
    "return_token_offsets": (),
    "suffix": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "vllm_xargs": (),
    "web_search_options": (),
}
# of other routes of this server, whose clients expect them to be heard
OF_OTHER_ROUTES = frozenset(
    [
        "chat_template_kwargs",
        "continue_final_message",
        "input",
        "instructions",
        "max_completion_tokens",
        "max_output_tokens",
        "messages",
        "prompt",
        "stop_sequences",
        "system",
        "top_logprobs",
    ]
)
# of llama.cpp, Ollama, transformers and the like -> our name for the same thing, None where there is none; and the
# values that ask for nothing, beside the empty ones
OF_OTHER_SERVERS: dict[str, tuple[str | None, tuple[Any, ...]]] = {
    "dry_multiplier": (None, (0,)),
    "dynatemp_range": (None, (0,)),
    "max_length": ("max_tokens", ()),
    "max_new_tokens": ("max_tokens", ()),
    "max_tokens_to_sample": ("max_tokens", ()),
    "mirostat": (None, (0,)),
    "mirostat_eta": (None, ()),
    "mirostat_tau": (None, ()),
    "n_predict": ("max_tokens", ()),
    "n_probs": ("logprobs", (0,)),
    "no_repeat_ngram_size": (None, (0,)),
    "num_beams": (None, (1,)),
    "num_ctx": (None, ()),
    "num_predict": ("max_tokens", ()),
    "random_seed": ("seed", ()),
    "repeat_last_n": (None, (0,)),
    "repeat_penalty": ("repetition_penalty", (1,)),
    "samplers": (None, ()),
    "smoothing_factor": (None, (0,)),
    "tfs": (None, (1,)),
    "tfs_z": (None, (1,)),
    "top_a": (None, (0,)),
    "top_n_sigma": (None, (-1, 0)),
    "typical": (None, (1,)),
    "typical_p": (None, (1,)),
    "xtc_probability": (None, (0,)),
}
# False asks for something here, so the empty values do not count
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "do_sample": (None, True),
    "spaces_between_special_tokens": (None, True),
}

IGNORED = frozenset(
    [
        "include_reasoning",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
        "user",
        "verbosity",
    ]
)
# how a word of such a name begins
CONSTRAINT_STEMS = (
    *("guided", "structure", "grammar", "constrain", "json", "schema", "regex", "ebnf", "gbnf", "lark"),
    *("choice", "format", "pattern", "enum"),
)
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of a snake_case or camelCase name
# fields whose names do not show that they may hold a constraint -> where it belongs
HOLDERS = {
    "extra_body": "extra_body belongs to the Python client; write its fields into the body itself",
    "nvext": "nvext is not a field of this API; use response_format or structured_outputs",
    "options": "options belongs to Ollama's own API; write its fields into the body itself, under this API's names",
    "response_model": "response_model belongs to a client's library; use response_format",
    "text": "text is not a field of this route; use response_format",
}
# llama.cpp's reasoning_format sets where reasoning is returned; it is no constraint
NO_CONSTRAINTS = frozenset(["reasoning_format"])
MAX_LOGGED_FIELDS = 10
MAX_EXTRA_FIELDS = 1000


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Refuse what must not be dropped, and log what is.

    Raises:
        ApiError: 400 naming the field.
    """
    if extra is not None and len(extra) > MAX_EXTRA_FIELDS:
        message = (
            f"the body has {len(extra)} fields that are none of this API; at most {MAX_EXTRA_FIELDS} are read"
        )
        raise ApiError(400, message, code="unknown_field")
    unknown = []
    for name, value in (extra or {}).items():
        if name in UNSUPPORTED:
            if not is_empty(value) and value not in UNSUPPORTED[name]:
                raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_field")
        elif name in UNSUPPORTED_UNLESS:
            if value not in UNSUPPORTED_UNLESS[name]:
                raise ApiError(
                    400, f"{name}={value!r} is not supported by this server", name, "unsupported_field"
                )
        elif name in OF_OTHER_SERVERS:
            check_foreign(name, value)
        elif name in OF_OTHER_ROUTES and not is_empty(value):
            raise ApiError(400, f"{name} is not a field of this route", name, "unknown_field")
        elif name in HOLDERS and not is_empty(value):
            raise ApiError(400, HOLDERS[name], name, "unknown_field")
        elif looks_like_constraint(name) and value is not None and value is not False:
            message = f"{name[:80]} is not a field of this API; use response_format or structured_outputs"
            raise ApiError(400, message, name[:80], "unknown_field")
        elif name not in IGNORED:
            # a name is what a client typed: it must not be able to write lines of its own
            unknown.append(name[:80].encode("unicode_escape").decode())
    if unknown:
        logger.info("ignored unknown request fields: %s", ", ".join(unknown[:MAX_LOGGED_FIELDS]))


def check_foreign(name: str, value: object) -> None:
    """Refuse a field of another server, unless its value asks for nothing.

    Args:
        name: one of OF_OTHER_SERVERS.

    Raises:
        ApiError: 400 naming the field, and ours for the same thing.
    """
    own, neutral = OF_OTHER_SERVERS[name]
    if not is_empty(value) and value not in neutral:
        told = "it has nothing of the kind" if own is None else f"use {own}"
        raise ApiError(400, f"{name} is not a field of this API; {told}", name, "unknown_field")


def check_names(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse an unknown name in a group of fields, as in stream_options; null asks for nothing.

    Args:
        where: the group's place in the request.

    Raises:
        ApiError: 400 naming the field, and those that are known.
    """
    wrong = next((name for name, value in given.items() if name not in known and value is not None), None)
    if wrong is not None:
        message = f"{where}.{wrong[:80]} is not a known field; known are {', '.join(known)}"
        raise ApiError(400, message, re.split(r"[.\[]", where)[0], "unknown_field")


def is_empty(value: object) -> bool:
    """Whether a value asks for nothing; zero, which Python takes for false, may ask for something."""
    return value in EMPTY and (isinstance(value, bool) or not isinstance(value, int | float))


def looks_like_constraint(name: str) -> bool:
    """Return whether an unknown field name looks like a constraint of the output."""
    words = WORDS.findall(name[:200])
    return name not in NO_CONSTRAINTS and any(word.lower().startswith(CONSTRAINT_STEMS) for word in words)
