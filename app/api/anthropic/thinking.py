"""The field thinking of POST /v1/messages, as the fields of a chat request that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.errors import ApiError
from app.api.fields import check_names

Json = dict[str, Any]

# type -> what may stand beside it
KINDS = {
    "enabled": ("type", "budget_tokens", "display"),
    "disabled": ("type",),
    "adaptive": ("type", "display"),
}
DISPLAYS = ("summarized", "omitted")
MIN_BUDGET_TOKENS = 1024  # the protocol's own


def read_thinking(thinking: Json | None, fields: Mapping[str, Any]) -> Json:
    """The chat fields about thoughts: the template's switch, and whether the reply shows them.

    Args:
        fields: the chat fields that the request names itself; its chat_template_kwargs come first.

    Raises:
        ApiError: 400 for what is malformed.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        message = f"thinking.type={str(kind)[:40]!r} must be one of {', '.join(KINDS)}"
        raise ApiError(400, message, "thinking", "invalid_value")
    check_names("thinking", thinking, KINDS[kind])
    _check_budget(thinking.get("budget_tokens"))
    display, kwargs = thinking.get("display"), fields.get("chat_template_kwargs")
    if display is not None and display not in DISPLAYS:
        message = f"thinking.display={str(display)[:40]!r} must be one of {', '.join(DISPLAYS)}"
        raise ApiError(400, message, "thinking", "invalid_value")
    found: Json = {"include_reasoning": False} if display == "omitted" else {}
    # adaptive is the model's default; chat_template_kwargs that are not an object are rejected later
    if kind != "adaptive" and (kwargs is None or isinstance(kwargs, dict)):
        # templates of models that think take it; the others ignore it
        found["chat_template_kwargs"] = {"enable_thinking": kind == "enabled", **(kwargs or {})}
    return found


def _check_budget(budget: object) -> None:
    """The budget is a target in the protocol, too, not a limit: max_tokens is what bounds thoughts and words here."""
    if budget is not None and (type(budget) is not int or budget < MIN_BUDGET_TOKENS):
        told = repr(budget)[:40]
        message = f"thinking.budget_tokens={told} must be an integer of at least {MIN_BUDGET_TOKENS}"
        raise ApiError(400, message, "thinking", "invalid_value")
