"""The chats that a browser keeps: plain JSON in, plain JSON out. The server remembers none of them.

How much fits only the browser knows: kept.js writes them, and says when there is no room for one.

store = {"current": id, "chats": [chat, ...]}, the latest first
chat = {"id", "title", "named", "time", "messages", "forks", "settings"}; `named` marks a title that a person gave;
`seen`, the turns that the page knew, is not kept: the browser adds those of other tabs

Several tabs may keep chats at the same time, so no store is written back whole: each event reads it and gives the
browser a change = {"id", "current", "put": chats, "removed": ids}. Without "current", the open chat stays.
"problem", if there is one, is shown over the page.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from app.ui.chat.conversation import History, read_text, read_with_names

Store = dict[str, Any]
Chat = dict[str, Any]
Change = dict[str, Any]

MAX_TITLE_CHARS = 60
# The latest date that a browser can represent.
MAX_TIME_S = 8_640_000_000_000
ROLES = ("user", "assistant", "system")


class StoreError(ValueError):
    """A file does not contain chats; the message gives the reason."""


def empty_store() -> Store:
    return {"current": None, "chats": []}


def make_chat_id() -> str:
    return secrets.token_hex(6)


def save_chat(
    store: Store, thread: Mapping[str, Any], messages: History, clock: Callable[[], float] = time.time
) -> Store:
    """Return the store with this chat first; a chat without messages is not stored."""
    chat_id = thread["id"]
    others = [chat for chat in store["chats"] if chat["id"] != chat_id]
    if not messages:
        return {"current": chat_id, "chats": others}
    chat = {
        "id": chat_id,
        "title": make_title(messages),
        "time": int(clock()),
        "messages": [plain_message(message) for message in messages],
        "forks": thread["forks"],
        "settings": thread.get("settings"),
        "seen": thread.get("seen"),
    }
    return {"current": chat_id, "chats": [chat, *others]}


def list_changes(before: Store, after: Store) -> Change:
    """Return the changes to the chats in the browser."""
    known = {chat["id"]: chat for chat in before["chats"]}
    kept = {chat["id"] for chat in after["chats"]}
    return {
        "id": make_chat_id(),
        "current": after["current"],
        "put": [chat for chat in after["chats"] if known.get(chat["id"]) != chat],
        "removed": [chat_id for chat_id in known if chat_id not in kept],
    }


def find_chat(store: Store, chat_id: str | None) -> Chat | None:
    """Return the chat with this id; None if it does not exist."""
    return next((chat for chat in store["chats"] if chat["id"] == chat_id), None)


def remove_chat(store: Store, chat_id: str) -> Store:
    """Return the store without this chat."""
    current = None if store["current"] == chat_id else store["current"]
    return {"current": current, "chats": [chat for chat in store["chats"] if chat["id"] != chat_id]}


def import_chats(store: Store, text: str) -> Store:
    """Return the store with the chats of an exported file first; chats with the same id are replaced.

    Raises:
        StoreError: the text is not an exported file.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"it is not JSON: {error}") from error
    chats = given.get("chats") if isinstance(given, dict) else None
    if not isinstance(chats, list):
        raise StoreError('it has no list "chats"')
    read = [_read_chat(chat, number) for number, chat in enumerate(chats, 1)]
    try:
        json.dumps(read, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise StoreError("it has half a character, which no page can show") from error
    ids = {chat["id"] for chat in read}
    return {"current": store["current"], "chats": [*read, *(c for c in store["chats"] if c["id"] not in ids)]}


def _read_chat(chat: Any, number: int) -> Chat:
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        raise StoreError(f"chat {number} has no messages")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
            raise StoreError(f"chat {number} has a message without role and content")
        if not _is_text(message["content"]):
            raise StoreError(f"chat {number} has a message whose content is not text")
        if not isinstance(message.get("metadata"), dict | None):
            raise StoreError(f"chat {number} has a message whose metadata is not an object")
    plain = [plain_message(message) for message in messages]
    seconds = chat.get("time")
    return {
        "id": str(chat.get("id") or make_chat_id())[:40],
        "title": str(chat.get("title") or make_title(plain))[:MAX_TITLE_CHARS],
        "named": chat.get("named") is True,
        "time": seconds if isinstance(seconds, int) and 0 <= seconds <= MAX_TIME_S else 0,
        "messages": plain,
        # The structure of versions is trusted only in chats created here.
        "forks": [],
    }


def _is_text(content: Any) -> bool:
    """Return whether it is a text, a text block, or a list of these: the formats that Gradio uses."""
    if isinstance(content, list):
        return all(not isinstance(block, list) and _is_text(block) for block in content)
    return isinstance(content.get("text") if isinstance(content, dict) else content, str)


def plain_message(message: Any) -> dict[str, Any]:
    """Return role, text with names of images, and the metadata that this app writes; other fields are dropped."""
    plain: dict[str, Any] = {"role": message["role"], "content": read_with_names(message["content"])}
    metadata = message.get("metadata") or {}
    kept = {name: metadata[name] for name in ("title", "id", "status") if isinstance(metadata.get(name), str)}
    return plain | ({"metadata": kept} if kept else {})


def make_title(messages: History) -> str:
    """Return the first question, shortened."""
    first = next((read_text(each["content"]) for each in messages if each["role"] == "user"), "")
    line = " ".join(first.split())
    return line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 1] + "…"
