"""Conversation: the items of POST /v1/responses as messages of a chat request."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import BadRequest
from app.api.fields import warn
from app.api.parts import describe_block
from app.api.responses.tools import join_name

Json = dict[str, Any]
# the beginning of reasoning that only this server reads again
SEAL = "troupe:"
# fields of an item that are not the arguments of its call
IDENTITIES = ("type", "id", "call_id", "status", "execution")


class Conversation:
    """A conversation, and the origin of each of its parts.

    Attributes:
        messages: in the format of a chat request, whose validation checks their content.
        places: location in those messages -> location in this request, for error messages.
    """

    def __init__(
        self,
        instructions: str | None,
        items: str | Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.messages: list[Json] = []
        self.places: dict[str, str] = {}
        self._reasoning: list[str] = []  # of the assistant's message that follows
        if instructions is not None:
            self._add("instructions", {"role": "system", "content": instructions})
        for item in before:
            self._add_item("previous_response_id", item)
        if isinstance(items, str):
            self._add("input", {"role": "user", "content": items})
            return
        for i, item in enumerate(items):
            self._add_item(f"input[{i}]", item)

    def _add_item(self, where: str, item: Mapping[str, Any]) -> None:
        match item.get("type") or "message":
            case "message":
                self._add(where, {"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                name = join_name(item.get("namespace"), item.get("name"))
                self._add_call(where, item, "function", {"name": name, "arguments": item.get("arguments")})
            case "custom_tool_call":
                name = join_name(item.get("namespace"), item.get("name"))
                self._add_call(where, item, "custom", {"name": name, "input": item.get("input")})
            case "reasoning":
                self._reasoning.append(_read_reasoning(where, item))
            case "additional_tools" | "compaction" as kind:
                warn(f"{where} was left out: the model cannot see items of type {kind}")
            case str() as kind if kind.endswith("_output"):
                self._add_result(where, item)
            case str() as kind if kind.endswith("_call") and item.get("call_id"):
                given = {name: value for name, value in item.items() if name not in IDENTITIES}
                arguments = json.dumps(item.get("action") or given, ensure_ascii=False)
                self._add_call(where, item, "function", {"name": kind.removesuffix("_call"), "arguments": arguments})
            case str() as kind if kind.endswith("_call") or kind.startswith("mcp_"):
                self._add(where, {"role": "assistant", "content": describe_block(item)})
            case kind:
                message = f"{where}: items of type {str(kind)[:40]!r} are not supported"
                raise BadRequest(message, "input", "unsupported_content")

    def _add_result(self, where: str, item: Mapping[str, Any]) -> None:
        name = "output" if "output" in item or "tools" not in item else "tools"
        output = item.get(name)
        if isinstance(output, dict):
            output = [output] if "type" in output else json.dumps(output, ensure_ascii=False)
        elif name == "tools":
            output = json.dumps(output, ensure_ascii=False)
        # OpenAI's outputs of the local shell name their call by `id`
        identity = item.get("id" if item["type"] == "local_shell_call_output" else "call_id")
        place = self._add(where, {"role": "tool", "tool_call_id": identity, "content": output})
        self.places |= {f"{place}.tool_call_id": f"{where}.call_id", f"{place}.content": f"{where}.{name}"}

    def _add_call(self, where: str, item: Mapping[str, Any], kind: str, call: Json) -> None:
        # the calls of one turn are one message for a chat template
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(where, {"role": "assistant", "content": None})
        self._take_reasoning()
        calls = self.messages[-1].setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.places |= {f"{place}.id": f"{where}.call_id", f"{place}.{kind}": where}
        calls.append({"id": item.get("call_id"), "type": kind, kind: call})

    def _add(self, where: str, message: Json) -> str:
        place = f"messages[{len(self.messages)}]"
        self.places[place] = where
        self.messages.append(message)
        if message["role"] == "assistant":
            self._take_reasoning()
        elif message["role"] == "user":
            self._reasoning = []  # of an answer that never came
        return place

    def _take_reasoning(self) -> None:
        """Give the last message the reasoning before it; chat templates leave out what is no longer worth reading."""
        message = self.messages[-1]
        texts = [message.get("reasoning_content"), *self._reasoning]
        if found := "\n\n".join(filter(None, texts)):
            message["reasoning_content"] = found
        self._reasoning = []


def seal(text: str) -> str:
    """Return reasoning as a text that clients keep without reading it; it is not a secret."""
    return SEAL + base64.b64encode(text.encode()).decode()


def _read_reasoning(where: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: its content, what this server has sealed, or its summary."""
    sealed = item.get("encrypted_content")
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise BadRequest(f"{where}.{name} must be a list of parts", "input")
        if text := "\n\n".join(str(part.get("text", "")) for part in parts):
            return text
        if name == "content" and isinstance(sealed, str) and sealed.startswith(SEAL):
            try:
                return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError) as error:
                raise BadRequest(f"{where}.encrypted_content is damaged: {error}", "input") from error
    return ""
