"""Conversation: reads the items of POST /v1/responses as chat messages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import refuse
from app.api.fields import warn
from app.api.messages import MAX_TOOL_CALLS, make_call, parse_arguments, read_message
from app.api.parts import describe_block, read_parts
from app.api.protocol import read_text
from app.api.responses.tools import join_name
from app.api.wording import Path, say_place
from app.json_text import ValueCounter

Json = dict[str, Any]
# the beginning of reasoning that only this server reads again
SEAL = "troupe:"
# fields of an item that are not the arguments of its call
IDENTITIES = ("type", "id", "call_id", "status", "execution")


class Conversation:
    """Reads the items of a conversation as chat messages. Errors name the item and its field.

    Attributes:
        messages: as `read_message` returns them.
    """

    def __init__(
        self, instructions: str | None, items: str | Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.messages: list[Json] = []
        self._counter = ValueCounter()
        self._reasoning: list[str] = []  # of the assistant's message that follows
        if instructions is not None:
            self._add(("instructions",), "system", instructions)
        for item in before:
            self._add_item(("previous_response_id",), item)
        if isinstance(items, str):
            self._add(("input",), "user", items)
            return
        for i, item in enumerate(items):
            self._add_item(("input", i), item)

    def _add_item(self, where: Path, item: Mapping[str, Any]) -> None:
        match item.get("type") or "message":
            case "message":
                self._add(where, item.get("role"), item.get("content"))
            case "function_call":
                arguments = parse_arguments((*where, "arguments"), item.get("arguments"), self._counter)
                self._add_call(where, item, join_name(item.get("namespace"), item.get("name")), arguments)
            case "custom_tool_call":
                arguments = {"input": read_text((*where, "input"), item.get("input"))}
                self._add_call(where, item, join_name(item.get("namespace"), item.get("name")), arguments)
            case "reasoning":
                self._reasoning.append(_read_reasoning(where, item))
            case "additional_tools" | "compaction" as kind:
                warn(f"{say_place(where)} was left out: the model cannot see items of type {kind}")
            case str() as kind if kind.endswith("_output"):
                self._add_result(where, item)
            case str() as kind if kind.endswith("_call") and item.get("call_id"):
                given = {name: value for name, value in item.items() if name not in IDENTITIES}
                action = item.get("action") or given
                arguments = action if isinstance(action, dict) else {"action": action}
                self._add_call(where, item, kind.removesuffix("_call"), arguments)
            case str() as kind if kind.endswith("_call") or kind.startswith("mcp_"):
                self._add(where, "assistant", describe_block(item))
            case kind:
                rule = f": items of type {str(kind)[:40]!r} are not supported"
                raise refuse(where, rule, "unsupported_content")

    def _add_result(self, where: Path, item: Mapping[str, Any]) -> None:
        is_own = item["type"] in ("function_call_output", "custom_tool_call_output")
        name = next((each for each in ("output", "tools", "status") if item.get(each) is not None), "output")
        output = item.get("output" if is_own else name) or ""
        if isinstance(output, dict):
            output = [output] if "type" in output else json.dumps(output, ensure_ascii=False)
        elif isinstance(output, list) and not is_own and (name == "tools" or not all(map(_has_type, output))):
            output = json.dumps(output, ensure_ascii=False)  # tools, or what commands of a shell have written
        # OpenAI's outputs of the local shell name their call by `id`
        identity = item.get("id" if item["type"] == "local_shell_call_output" else "call_id")
        parts = read_parts((*where, name), output, is_history=True)
        self.messages.append(
            {"role": "tool", "content": parts, "tool_call_id": read_text((*where, "call_id"), identity)}
        )

    def _add_call(self, where: Path, item: Mapping[str, Any], name: object, arguments: Json) -> None:
        # the calls of one turn are one message for a chat template
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(where, "assistant", None)
        self._take_reasoning()
        calls = self.messages[-1].setdefault("tool_calls", [])
        if len(calls) == MAX_TOOL_CALLS:
            raise refuse(where, f": a turn may have at most {MAX_TOOL_CALLS} calls")
        name = read_text((*where, "name"), name)
        calls.append(make_call(read_text((*where, "call_id"), item.get("call_id")), name, arguments))

    def _add(self, where: Path, role: object, content: object) -> None:
        message = read_message(where, {"role": role, "content": content}, self._counter)
        self.messages.append(message)
        if role == "assistant":
            self._take_reasoning()
        elif role == "user":
            self._reasoning = []  # of an answer that never came

    def _take_reasoning(self) -> None:
        """Give the last message the reasoning before it; chat templates leave out what is no longer worth reading."""
        message = self.messages[-1]
        texts = [message.get("reasoning_content"), *self._reasoning]
        if found := "\n\n".join(filter(None, texts)):
            message["reasoning_content"] = found
        self._reasoning = []


def _has_type(value: object) -> bool:
    return isinstance(value, dict) and "type" in value


def seal(text: str) -> str:
    """Return reasoning as a text that clients keep without reading it; it is not a secret."""
    return SEAL + base64.b64encode(text.encode()).decode()


def _read_reasoning(where: Path, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, what this server has sealed, or its summary."""
    sealed = item.get("encrypted_content")
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise refuse((*where, name), " must be a list of parts")
        if text := "\n\n".join(str(part.get("text", "")) for part in parts):
            return text
        if name == "content" and isinstance(sealed, str) and sealed.startswith(SEAL):
            try:
                return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError) as error:
                raise refuse((*where, "encrypted_content"), f" is damaged: {error}") from error
    return ""
