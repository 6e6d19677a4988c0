"""The policy for fields that a route does not define, the same for every route and every object within a request.

A field that would constrain the answer is refused. Any other unknown field is left out, and the response header
x-troupe-warning names it. A value that requests nothing (null, an empty list, a default) passes without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from app.api.errors import BadRequest, refuse
from app.api.wording import Path, say_place

Values = tuple[Any, ...]

# Fields that clients send with every request and that change no token.
BOOKKEEPING = frozenset([
    "cache_control", "cache_prompt", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "session_id", "store", "user",
])
# The constraints of all dialects -> the values, beside the empty ones, that request nothing. False requests something
# where True is listed. A route checks only the fields that its model does not define.
READ: dict[str, Values] = {
    **dict.fromkeys((
        "chat_template", "context", "conversation", "documents", "functions", "images", "input", "input_extra",
        "input_prefix", "input_suffix", "instructions", "lora", "lora_path", "lora_request", "messages",
        "multi_modal_data", "previous_response_id", "prompt", "prompt_embeds", "suffix", "system", "system_prompt",
        "template", "tools",
    ), ()),
    "function_call": ("none", "auto"), "mm_processor_kwargs": ({},), "modalities": (["text"],),
    "tool_choice": ("none", "auto"), "truncate_prompt_tokens": (-1,), "truncation": ("auto", "disabled"),
}
WRITTEN: dict[str, Values] = {
    **dict.fromkeys((
        "allowed_token_ids", "audio", "bad_words", "bad_words_ids", "choice", "enum", "format", "json", "json_mode",
        "json_object", "jsonmode", "logit_bias", "output_config", "pattern", "random_seed", "response_model", "seed",
        "structural_tag", "structured", "structured_outputs", "use_beam_search",
    ), ()),
    **dict.fromkeys(("extra_body", "nvext", "options", "vllm_xargs"), ({},)),
    "best_of": (1,), "do_sample": (True,), "dynatemp_range": (0,), "dry_multiplier": (0,), "mirostat": (0,),
    "length_penalty": (1,), "min_p": (0,), "n": (1,), "no_repeat_ngram_size": (0,), "num_beams": (1,),
    "num_return_sequences": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repeat_last_n": (0,),
    "repeat_penalty": (1,), "repetition_penalty": (1,), "response_format": ({"type": "text"},), "temperature": (1,),
    "output_format": ({"type": "text"},), "text": ({"format": {"type": "text"}},), "tfs_z": (1,), "top_a": (0,),
    "top_k": (0, -1), "top_n_sigma": (-1, 0), "top_p": (1,), "typical_p": (1,), "xtc_probability": (0,),
    **dict.fromkeys(("reasoning_budget", "thinking_budget", "thinking_token_budget"), (-1,)),
    "spaces_between_special_tokens": (True,),
}
ANSWER = READ | WRITTEN
# The same for a vector or a score instead of a text.
VECTOR: dict[str, Values] = {
    **dict.fromkeys((
        "body", "chat_template", "content", "data", "documents", "image", "images", "input", "inputs", "instruction",
        "items", "messages", "prompt", "prompt_name", "prompts", "queries", "query", "task", "text", "texts",
    ), ()),
    "add_special_tokens": (True,), "embedding_types": (["float"],), "embed_dtype": ("float32",),
    "lora_path": (), "lora_request": (), "mm_processor_kwargs": ({},), "normalize": (True,),
    "output_dtype": ("float",), **dict.fromkeys(("dimensions", "output_dimension", "pooling"), ()),
    "truncate": ("NONE",), "use_activation": (True,),
}
# Names that constrain in whatever dialect they come: json_schema, guided_regex, stop_words, max_new_tokens.
CONSTRAINING = re.compile(
    r"guided_.*|(.*_)?(schema|grammar|regex|ebnf|lark)(_(file|name|string|type))?|.*logits?_processors?|(.+_)?stop(_(at|ids|regex|sequences|strings"
    r"|token_ids|tokens|words))?|(max|min)(_new|_output|_completion|_generated)?_(tokens|length|chars|words)"
    r"(_to_sample)?|n(um)?_predict"
)
# What the largest and smallest length request when they request nothing.
NO_LIMIT = (-1, 0)
# another server's or library's name -> the names here, of which a route has one
OURS = {
    "n_probs": ("logprobs",), "random_seed": ("seed",), "repeat_penalty": ("repetition_penalty",),
    "extra_body": ("its fields in the body itself",), "options": ("its fields in the body itself",),
    "conversation": ("previous_response_id",), "system": ("instructions", "messages"),
    "instructions": ("system", "messages"), "query": ("queries",),
    "stop_sequences": ("stop",), "stop": ("stop_sequences",), "verbatim": ("options",), "bounds": ("options",),
    "property_order": ("options",),
}
LENGTHS = ("max_tokens", "max_output_tokens")
FORMATS = ("response_format", "text", "output_config")
FORM = re.compile(r"guided_.*|.*(schema|grammar|regex|ebnf|json).*|(response_?)?(format|model|text)|choice")
MAX_NAME_CHARS = 80
MAX_WARNINGS = 32
MAX_FIELDS = 1000

# The warnings of the request that is being answered; the gate puts them into the response's headers.
WARNINGS: ContextVar[list[str]] = ContextVar("warnings")


def warn(text: str) -> None:
    """Name a part of the request that the answer leaves out, in the response header x-troupe-warning."""
    warnings = WARNINGS.get([])
    if text not in warnings and len(warnings) < MAX_WARNINGS:
        warnings.append(text)


def check_unknown(
    given: Mapping[str, Any], known: Collection[str] = (), where: Path = (),
    constraints: Mapping[str, Values] | None = ANSWER,
) -> None:
    """Refuse the first field that would constrain the answer, and leave out the other ones that are not known.

    Args:
        where: the place of the fields, such as ("stream_options",); empty for the request itself.
        constraints: the fields that constrain, and the values of each that request nothing; None: every one does.
    """
    if len(given) > MAX_FIELDS:
        place = say_place(where) or "the request"
        raise BadRequest(f"{place} has {len(given)} fields; at most {MAX_FIELDS} are allowed", place)
    for name, value in given.items():
        if name in known or (name in BOOKKEEPING and not where):
            continue
        # camelCase and dashes: maxTokens is max_tokens
        plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name[:MAX_NAME_CHARS]).replace("-", "_").lower()
        constrains = constraints is None or plain in constraints
        is_pattern = constraints is not None and constraints is not VECTOR and CONSTRAINING.fullmatch(plain) is not None
        neutral = (constraints or {}).get(plain, NO_LIMIT if is_pattern else ())
        is_absent = value is None if any(each is True for each in neutral) else is_empty(value)
        if is_absent or value in neutral:
            continue
        at = (*where, name[:MAX_NAME_CHARS])
        if is_pattern or constrains:
            raise refuse(at, f" is not a field of this route{_hint(plain, known)}", "unknown_field")
        if value not in (0, {}) and not (isinstance(value, dict) and all(map(is_empty, value.values()))):
            warn(f"{say_place(at)} is not known here and was left out")


def _hint(name: str, known: Collection[str]) -> str:
    """Return the name of the same thing on this route, after a comma."""
    if FORM.fullmatch(name):
        ours: tuple[str, ...] = FORMATS
    elif name.startswith(("max_", "n_predict", "num_predict")):
        ours = LENGTHS
    else:
        ours = OURS.get(name, ())
    found = [each for each in ours if each in known or " " in each]
    return f"; use {' or '.join(found)}" if found else ""


def is_empty(value: object) -> bool:
    """Return whether a value requests nothing: not {}, a schema of everything, nor 0, which may be a limit."""
    return value is None or value is False or value in ([], "")
