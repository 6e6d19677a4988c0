"""Chat messages as clients send them, turned into what a chat template reads: role and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import ApiError

ROLES = ("system", "developer", "user", "assistant")
RESERVED_KWARGS = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)
MAX_KWARGS = 32


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Check roles and flatten content parts.

    Raises:
        ApiError: 400 naming the message, for a role or content that a text engine cannot take.
    """
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_message(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise ApiError(
            400, f"{where}: tool calls are not supported by this server", "messages", "unsupported_field"
        )
    if role not in ROLES:
        raise ApiError(
            400, f"{where}.role={role!r} must be one of {', '.join(ROLES)}"[:300], "messages", "invalid_value"
        )
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    # OpenAI's newer name for a system message; chat templates know only the old one
    return {"role": "system" if role == "developer" else role, "content": _read_content(where, content)}


def _read_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a text or a list of parts", "messages", "invalid_value")
    return "".join(_read_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _read_part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "input_text", "output_text", "refusal"):
        message = f"{where}: only text parts are supported, not {str(kind)[:40]!r}"
        raise ApiError(400, message, "messages", "unsupported_content")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.text must be a text", "messages", "invalid_value")
    return text


def read_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template; names that would change what the renderer does are refused.

    Raises:
        ApiError: 400 naming the reserved name.
    """
    for name in kwargs or {}:
        if name in RESERVED_KWARGS or not name.isidentifier():
            message = f"chat_template_kwargs must not set {name[:80]!r}"
            raise ApiError(400, message, "chat_template_kwargs", "invalid_value")
    if kwargs and len(kwargs) > MAX_KWARGS:
        raise ApiError(
            400, f"chat_template_kwargs has more than {MAX_KWARGS} entries", "chat_template_kwargs"
        )
    return dict(kwargs or {})
