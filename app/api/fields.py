"""Fields beyond the protocol models: refused, ignored in silence, or ignored with a log line.

A field that would change the answer is never dropped: known ones that cannot be honoured and unknown ones
that look like a constraint are a 400. OpenAI's bookkeeping fields change nothing and are ignored. Any other
unknown field is ignored, as vLLM does, and named in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
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
# False asks for something here, so the empty values do not count
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {"spaces_between_special_tokens": (None, True)}

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
CONSTRAINT_LIKE = re.compile(
    r"^(guided|structured|grammar|constrain|json_schema|json_object|regex|ebnf|gbnf|lark|choice|schema|format)",
    re.IGNORECASE,
)
MAX_LOGGED_FIELDS = 10


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Refuse what must not be dropped, and log what is.

    Raises:
        ApiError: 400 naming the field.
    """
    unknown = []
    for name, value in (extra or {}).items():
        if name in UNSUPPORTED:
            if value not in EMPTY and value not in UNSUPPORTED[name]:
                raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_field")
        elif name in UNSUPPORTED_UNLESS:
            if value not in UNSUPPORTED_UNLESS[name]:
                raise ApiError(
                    400, f"{name}={value!r} is not supported by this server", name, "unsupported_field"
                )
        elif CONSTRAINT_LIKE.match(name):
            message = f"{name[:80]} is not a field of this API; use response_format or structured_outputs"
            raise ApiError(400, message, name[:80], "unknown_field")
        elif name not in IGNORED:
            unknown.append(name[:80])
    if unknown:
        logger.info("ignored unknown request fields: %s", ", ".join(unknown[:MAX_LOGGED_FIELDS]))
