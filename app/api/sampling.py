"""From the fields of a request to SamplingParams with their grammar, and to the prompts that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from app.api.errors import BadRequest, refuse, to_api_error, use_names
from app.api.fields import check_unknown, warn
from app.api.protocol import (
    MAX_PROMPTS,
    ChatFields,
    CompletionRequest,
    GenerationFields,
    StructuredOutputs,
    read_all_whole,
)
from app.api.wording import Path
from engine import InvalidRequest, SamplingParams
from grammar import GrammarError, GrammarSpec, read_spaces, read_spec

Names = Mapping[str, str]  # field of a chat or text completion -> its name on the route
Whitespace = str  # as in a GrammarSpec

# names of other engines for the backends
BACKENDS = {"guidance": "llguidance", "outlines": "outlines_core", "auto": None}
# constraints with optional whitespace
KINDS = ("regex", "choice", "grammar", "json_object", "csv", "xml", "structural_tag")  # beside json
SPACED = ("json", "json_object", "xml", "structural_tag")
TAG_PARTS = ("format", "structures", "triggers")
MAX_LOGPROBS = 20
LEAST_TOP_P = 1e-9
# fields of requests that SamplingParams has under the same names; the first have other values there
READ_HERE = {"logit_bias", "max_tokens", "structured_outputs"}
COPIED = {each.name for each in fields(SamplingParams)} & GenerationFields.model_fields.keys() - READ_HERE
# the last ones are of vLLM's connectors, which find blocks by their ids
KV_TRANSFER = (
    "do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_host",
    "remote_num_tokens", "remote_port", "remote_request_id", "tp_size", "transfer_id",
)


def chat_sampling(
    body: ChatFields, constraint: Constraint | None, defaults: Mapping[str, float], names: Names,
    shows_special: bool = False,
) -> SamplingParams:
    """Return the sampling of a chat; without a limit it runs up to the model's length.

    Args:
        defaults: fields that the model recommends, for requests that do not have them.
        names: the fields that have another name on the route.
        shows_special: the text needs its special tokens, whatever the request says.

    Raises:
        InvalidRequest: a value outside its range.
        ApiError: top_logprobs without logprobs.
    """
    if body.top_logprobs and not body.logprobs:
        raise refuse(("top_logprobs",), " needs logprobs=true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise refuse(("top_logprobs",), f"={body.top_logprobs} must be an integer from 0 to {MAX_LOGPROBS}"[:180])
    # two names of one limit: the lower holds, after one that is out of range, which is refused below
    limits = [(getattr(body, name), name) for name in ("max_tokens", "max_completion_tokens")]
    given = [each for each in limits if each[0] is not None]
    limit, name = min(given, key=lambda each: each[0] if each[0] < 2**31 else 0, default=(None, "max_tokens"))
    name = names.get(name, name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        changes = {"skip_special_tokens": False} if shows_special else {}
        return _make(body, constraint, defaults, max_tokens=limit, logprobs=logprobs, **changes)
    except InvalidRequest as error:
        if limit is not None and error.param == "min_tokens" and (least := body.min_tokens or 0) > limit:
            raise refuse(("min_tokens",), f"={least} must not exceed {name}={limit}") from error
        raise use_names(error, {**names, "max_tokens": name}) from error


def completion_sampling(
    body: CompletionRequest, constraint: Constraint | None, defaults: Mapping[str, float], names: Names
) -> SamplingParams:
    """Return the sampling of a text completion; the default limit is OpenAI's 16 tokens.

    Raises InvalidRequest: a value outside its range.
    """
    limit = 16 if body.max_tokens is None else body.max_tokens
    if limit == 0 and body.echo:
        # The engine always draws; scoring a prompt means one token that the reply leaves out.
        limit = 1
    changes: dict[str, Any] = {"max_tokens": limit, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = body.logprobs
    try:
        return _make(body, constraint, defaults, **changes)
    except InvalidRequest as error:
        raise use_names(error, names) from error


def _make(
    body: GenerationFields, constraint: Constraint | None, defaults: Mapping[str, float], **changes: Any
) -> SamplingParams:
    if body.stream and body.prompt_logprobs is not None:
        raise refuse(("prompt_logprobs",), " needs stream=false", "unsupported_field")
    values = {name: getattr(body, name) for name in COPIED if getattr(body, name) is not None}
    given = {name: value for name, value in changes.items() if value is not None}
    if values.get("top_p") == 0:  # OpenAI's and Ollama's smallest value: the most probable token alone
        values["top_p"] = LEAST_TOP_P
    return SamplingParams(
        **({"max_tokens": None} | dict(defaults) | values | given), logit_bias=read_logit_bias(body.logit_bias),
        grammar=None if constraint is None else constraint.spec, output_kind="delta" if body.stream else "final",
        saves_blocks=read_kv_transfer(body.kv_transfer_params),
    )


def read_kv_transfer(given: dict[str, Any] | None) -> bool:
    """Return whether a proxy asks this server to compute the prompt for another one.

    With `do_remote_prefill` nothing is to be done: blocks are found by their content, not by the ids that come with it.
    """
    if given is None:
        return False
    check_unknown(given, KV_TRANSFER, ("kv_transfer_params",))
    flags = {name: given.get(name) or False for name in KV_TRANSFER[:2]}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise refuse(("kv_transfer_params", name), " must be true or false")
    if all(flags.values()):
        raise refuse(("kv_transfer_params",), ": one of do_remote_decode and do_remote_prefill is possible")
    return flags["do_remote_decode"]


def read_logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """JSON has only text keys; token ids come as digits."""
    wrong = next((key for key in bias or {} if not (key.isascii() and key.isdigit() and len(key) <= 10)), None)
    if wrong is not None:
        message = f"logit_bias must map token ids to numbers; {wrong[:80]!r} is not a token id"
        raise BadRequest(message, "logit_bias")
    return {int(token): value for token, value in (bias or {}).items()}


def read_prompts(given: Any, name: str = "prompt", max_count: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Return the texts or lists of token ids of a field, which may be one or several."""
    given = read_all_whole(given)
    if isinstance(given, list):
        given = [*map(read_all_whole, given)]
    listed = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(listed, list) or not all(isinstance(each, str) or each == [] or _is_ids(each) for each in listed):
        raise refuse((name,), f" must be a text, a list of token ids, or a list of 1 to {max_count} of these")
    if not 1 <= len(listed) <= max_count:
        raise refuse((name,), f" has {len(listed)} entries; 1 to {max_count} are allowed")
    if not all(listed):
        where: Path = (name,) if listed == [given] else (name, next(i for i, each in enumerate(listed) if not each))
        raise refuse(where, " is empty")
    return listed


def _is_ids(value: object) -> bool:
    # type() and not isinstance(): true is not a token id
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 2**31 for item in value)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the request field that an error about it should name."""

    param: str
    spec: GrammarSpec


def read_constraint(body: GenerationFields, names: Names) -> Constraint | None:
    """Find the request's one constraint.

    Args:
        names: the fields that have another name on the route.
    """
    found = [
        (names.get(param, param), make)
        for param, make in (
            *_response_format(body), *_structured_outputs(body.structured_outputs), *_guided(body), *_sglang(body)
        )
    ]
    if len(found) > 1:
        message = f"a request can have one constraint, not {' and '.join(param for param, _ in found)}"
        raise BadRequest(message, found[1][0], "too_many_constraints")
    if not found:
        return None
    param, make = found[0]
    try:
        return Constraint(param, make())
    except GrammarError as error:
        raise to_api_error(error, param) from error


Candidates = list[tuple[str, Callable[[], GrammarSpec]]]


def _response_format(body: GenerationFields) -> Candidates:
    asked = body.response_format
    if asked is None:
        return []
    if asked.json_schema is not None and asked.type != "json_schema":
        message = f"response_format.json_schema is a part of the type json_schema, not {asked.type}"
        raise BadRequest(message, "response_format")
    parts = {name: getattr(asked, name) for name in TAG_PARTS if getattr(asked, name) is not None}
    if asked.type == "structural_tag":
        return [("response_format", lambda: GrammarSpec.structural_tag(parts))]
    if parts:
        message = f"response_format.{next(iter(parts))} is a part of the type structural_tag, not {asked.type}"
        raise BadRequest(message, "response_format")
    if asked.type == "text" and asked.schema_ is not None:
        message = "response_format.schema is a part of the types json_schema and json_object, not text"
        raise BadRequest(message, "response_format")
    if asked.type == "text":
        return []
    if asked.schema_ is not None and asked.json_schema is not None:
        message = "response_format.schema and response_format.json_schema exclude each other"
        raise BadRequest(message, "response_format", "too_many_constraints")
    if (flat := asked.schema_) is not None:
        return [("response_format", lambda: GrammarSpec.json_schema(flat))]
    if asked.type == "json_object":
        return [("response_format", GrammarSpec.json_object)]
    if asked.json_schema is None:
        raise BadRequest("response_format.json_schema is required", "response_format", "missing_field")
    schema = asked.json_schema.schema_
    return [("response_format", lambda: GrammarSpec.json_schema(schema))]


def _structured_outputs(asked: StructuredOutputs | None, prefix: str = "structured_outputs.") -> Candidates:
    """Return the constraints of `structured_outputs`, or, with a prefix, of its older fields."""
    if asked is None:
        return []
    name = prefix.rstrip(".") if prefix.endswith(".") else "guided_decoding_backend"
    backend = _backend(asked.backend, name)
    takes_none = asked.json_ is not None or asked.json_object or asked.regex is not None
    if asked.grammar is None and (backend == "xgrammar" or (backend == "outlines_core" and takes_none)):
        # The name of an engine that does not take the kind is a hint.
        warn(f"the backend {backend} takes no constraint of this kind here; the default one enforces it")
        backend = None
    whitespace: Whitespace = "compact" if asked.disable_any_whitespace else asked.whitespace or "spaced"
    if asked.whitespace_pattern is not None:
        whitespace = _read_spaces(asked.whitespace_pattern, name)
    schema = asked.json_
    if asked.disable_additional_properties and schema is not None:
        schema = close_objects(schema)
    given = {kind: getattr(asked, kind) for kind in KINDS if getattr(asked, kind) not in (None, False)}
    if schema is not None:
        given = {"json": schema, **given}
    if asked.property_order is not None and asked.json_ is None:
        raise BadRequest("structured_outputs.property_order belongs to structured_outputs.json", name)
    if not given:
        raise BadRequest("structured_outputs names no constraint", name, "missing_field")
    _check_whitespace(asked, given)

    def make(kind: str) -> GrammarSpec:
        if kind == "json_object":
            return GrammarSpec.json_object(whitespace, backend)
        known, order = "json_schema" if kind == "json" else kind, asked.property_order or "schema"
        return read_spec(known, given[kind], whitespace, backend, order)

    return [(prefix + kind, partial(make, kind)) for kind in given]


def _guided(body: GenerationFields) -> Candidates:
    """Return the constraints of the older fields guided_json and so on."""
    names = ["json", "regex", "choice", "grammar", "json_object"]
    given = {name: value for name in names if (value := getattr(body, f"guided_{name}")) not in (None, False)}
    if body.guided_whitespace_pattern is not None:
        _read_spaces(body.guided_whitespace_pattern, "guided_whitespace_pattern")
        if given.keys() & set(SPACED):
            given["whitespace_pattern"] = body.guided_whitespace_pattern
    asked = StructuredOutputs.model_validate(given | {"backend": body.guided_decoding_backend}) if given else None
    return _structured_outputs(asked, "guided_")


def _sglang(body: GenerationFields) -> Candidates:
    """Return the constraints of SGLang's fields regex and ebnf."""
    return [(kind, partial(read_spec, kind, text)) for kind in ("regex", "ebnf") if (text := getattr(body, kind))]


def _read_spaces(pattern: str, param: str) -> Whitespace:
    try:
        return read_spaces(pattern)
    except GrammarError as error:
        raise to_api_error(error, param) from error


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects with listed properties allow no others, as vLLM's option says."""
    if isinstance(schema, str):
        try:
            return close_objects(json.loads(schema))
        except ValueError:
            return schema  # its reader says what is wrong
    if isinstance(schema, list):
        return [*map(close_objects, schema)]
    if not isinstance(schema, dict):
        return schema
    values = ("enum", "const", "default", "examples")
    closed = {
        key: close_objects(value) if isinstance(value, dict | list) and key not in values else value
        for key, value in schema.items()
    }
    is_listing = isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema
    return closed | ({"additionalProperties": False} if is_listing else {})


def _check_whitespace(asked: StructuredOutputs, kinds: Iterable[str]) -> None:
    """Reject whitespace options for constraints without optional whitespace, and conflicting values."""
    given = {
        "whitespace": asked.whitespace, "whitespace_pattern": asked.whitespace_pattern,
        "disable_any_whitespace": asked.disable_any_whitespace or None,
    }
    options = [f"structured_outputs.{name}={value!r}" for name, value in given.items() if value is not None]
    if options and not set(SPACED) & set(kinds):
        message = f"{options[0]} belongs to {', '.join(SPACED[:-1])} or {SPACED[-1]}"
        raise BadRequest(message, "structured_outputs")
    if len(options) > 1 and (asked.whitespace_pattern is not None or asked.whitespace != "compact"):
        raise BadRequest(f"{' and '.join(options)} exclude each other", "structured_outputs")


def _backend(name: str | None, param: str) -> str | None:
    if name is None:
        return None
    # vLLM's old form carries options behind a colon, such as "guidance:no-fallback"
    plain = name.split(":", 1)[0]
    if plain == "lm-format-enforcer":
        raise BadRequest(f"{name!r} is not a backend of this server", param, "unsupported_field")
    return BACKENDS.get(plain, plain)
