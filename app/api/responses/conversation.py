"""Conversation: instructions and input items of a response, as the messages of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import ApiError

Json = dict[str, Any]


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
                self._add_call(where, item)
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
                place = self._add(where, result)
                self.places |= {
                    f"{place}.tool_call_id": f"{where}.call_id",
                    f"{place}.content": f"{where}.output",
                }
            case "reasoning":
                # clients send earlier output back; templates omit old reasoning as well
                return
            case kind:
                message = f"{where}: items of type {str(kind)[:40]!r} are not supported"
                raise ApiError(400, message, "input", "unsupported_content")

    def _add_call(self, where: str, item: Mapping[str, Any]) -> None:
        # the calls of one turn are one message for a chat template
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(where, {"role": "assistant", "content": None})
        calls = self.messages[-1].setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.places |= {f"{place}.id": f"{where}.call_id", f"{place}.function": where}
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})

    def _add(self, where: str, message: Json) -> str:
        place = f"messages[{len(self.messages)}]"
        self.places[place] = where
        self.messages.append(message)
        return place
