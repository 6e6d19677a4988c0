"""Models that think before they answer: which chat templates are theirs, and what a grammar makes of them.

the prompt ends in <think>          the output begins inside a thought (DeepSeek R1, QwQ)
the template knows thoughts         the output may begin with one (Qwen 3), unless enable_thinking is false
the prompt ends in </think>, or
the template knows none             there is no thought, and <think> is a text like any other

A thought is free text; a constraint holds for what stands behind its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.api.constraint import Constraint
from app.api.errors import ApiError, to_api_error
from engine import InvalidRequest
from grammar import GrammarError, GrammarSpec

Json = dict[str, Any]

OPEN = "<think>"
CLOSE = "</think>"
PROBE = "probe_of_troupe"
# the names under which chat templates have their switch
SWITCHES = ("enable_thinking", "thinking")
BREAK: Json = {"type": "optional", "content": {"type": "const_string", "value": "\n\n"}}


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the outputs of one request are split into reasoning and content.

    Attributes:
        is_open: the prompt ends inside the reasoning; otherwise the output may begin it.
        keeps_breaks: line breaks after the reasoning belong to the content.
        is_shown: whether the reply includes reasoning.
    """

    is_open: bool
    keeps_breaks: bool = False
    is_shown: bool = True


def knows_thoughts(render: Callable[..., str]) -> bool:
    """Return whether a chat template supports reasoning.

    Args:
        render: `Tokenizer.apply_chat_template`.
    """
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    asked = _try(render, [user])
    # a switch that changes what the prompt says about thoughts
    silent = [_try(render, [user], **{name: False}) for name in SWITCHES]
    if any(text != asked and OPEN in text for text in silent) or asked.rstrip().endswith(OPEN):
        return True
    # a thought is written between the marks, or an old one is left out
    if OPEN in _try(render, [user, answer | {"reasoning_content": PROBE}], add_generation_prompt=False):
        return True
    thought = answer | {"content": f"{OPEN}{PROBE}{CLOSE}y"}
    told = _try(render, [user, thought, user])
    return bool(told) and PROBE not in told


def find_thinking(
    knows: bool, tail: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Thinking | None:
    """How the output of a rendered conversation begins; None when it holds no thought.

    Args:
        knows: whether the template knows thoughts.
        tail: the end of the rendered prompt.
        options: what the template was given, `add_generation_prompt` and its like included.
    """
    if options.get("continue_final_message"):
        _, mark, thought = str(messages[-1]["content"]).rpartition(OPEN)
        return Thinking(True) if knows and mark and CLOSE not in thought else None
    tail = tail.rstrip()
    if not options.get("add_generation_prompt") or tail.endswith(CLOSE):
        return None
    if tail.endswith(OPEN):
        return Thinking(True)
    is_off = any(options.get(name) is False for name in SWITCHES)
    return Thinking(False) if knows and not is_off else None


def think_first(constraint: Constraint, thinking: Thinking) -> tuple[Constraint, Thinking]:
    """The constraint of thoughts followed by what a constraint allows.

    Raises:
        ApiError: 400 for a constraint that cannot be a part of such a grammar.
    """
    spec = constraint.spec
    is_loose = spec.kind in ("json_schema", "json_object") or constraint.param == "tools"
    thought: Json = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": CLOSE}
    start: Json = {"type": "sequence", "elements": [thought, BREAK]} if is_loose else thought
    if not thinking.is_open:
        opened = {"type": "sequence", "elements": [{"type": "const_string", "value": OPEN}, start]}
        start = {"type": "optional", "content": opened}
    try:
        value = _make_format(spec, constraint.param)
        whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": [start, value]}}
        backend = spec.backend if is_loose or spec.kind == "structural_tag" else None
        composed = GrammarSpec.structural_tag(whole, spec.whitespace, backend)
    except GrammarError as error:
        raise to_api_error(error, constraint.param) from error
    return Constraint(constraint.param, composed), replace(thinking, keeps_breaks=not is_loose)


def _make_format(spec: GrammarSpec, param: str) -> Json:
    """A constraint as a part of a structural tag."""
    if spec.kind in ("regex", "choice", "ebnf") and spec.backend not in (None, "llguidance"):
        raise _refuse(f"backend={spec.backend!r} cannot enforce a {spec.kind}", param)
    match spec.kind:
        case "json_schema" | "json_object":
            order = spec.property_order == "any"
            return {"type": "json_schema", "json_schema": json.loads(spec.text), "any_order": order}
        case "regex":
            return {"type": "regex", "pattern": spec.text}
        case "ebnf":
            return {"type": "grammar", "grammar": spec.text}
        case "choice":
            choices = [{"type": "const_string", "value": choice} for choice in json.loads(spec.text)]
            return {"type": "or", "elements": choices}
        case "structural_tag":
            found: Json = json.loads(spec.text)["format"]
            return found
    raise _refuse(f"a {spec.kind} grammar cannot stand", param)


def _refuse(what: str, param: str) -> ApiError:
    message = (
        f"{what} behind the thoughts of this model; "
        'switch them off with chat_template_kwargs {"enable_thinking": false}'
    )
    return ApiError(400, message, param, "unsupported_grammar")


def _try(render: Callable[..., str], messages: Sequence[Json], **options: Any) -> str:
    try:
        return render(messages, **options)
    except InvalidRequest:
        return ""
