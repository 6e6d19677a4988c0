"""Chats in the app's store: a chat object, and a turn object in it for each node of its tree.

chat    {"title", "named", "time", "settings", "leaf"}      `named` marks a title that a person gave
turn    {"before", "messages"}
file    {"chats": [{"id", "title", "named", "time", "settings", "leaf", "turns": [{"id", "before", "messages"}]}]}
An older file, and what an older version kept in the browser, has `messages` and `forks` in the place of `turns`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.store import Connection, Item, objects
from app.ui.chat.branches import Node, Tree
from app.ui.chat.conversation import (
    History,
    figures_message,
    is_file,
    list_image_paths,
    read_pending,
    read_text,
    read_with_names,
)

Json = dict[str, Any]

MAX_LISTED = 200
MAX_TITLE_CHARS = 60
MAX_READ_CHARS = 1000  # of a question, for its title
# Code, a link, emphasis, and what begins a heading, a quote or an item of a list.
MARKUP = re.compile(
    r"(?<!`)(?P<ticks>`{1,4})(?!`)(?:[\w+#-]*\n)?(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|!?\[(?P<link>[^\]]*)\]\([^)\s]*\)|^[ \t]*(?:#{1,6}|[>*+-])[ \t]+"
    r"|(?<![\w*])(?P<mark>\*{1,3}|_{1,3}|~~)(?=\S)(?P<text>.+?)(?<=\S)(?P=mark)(?![\w*])",
    re.DOTALL | re.MULTILINE,
)
# The latest date that a browser can represent.
MAX_TIME_S = 8_640_000_000_000
ROLES = ("user", "assistant", "system")


class ChatsError(ValueError):
    """A file does not contain chats; the message gives the reason."""


def make_id() -> str:
    return secrets.token_urlsafe(16)


def list_chats(db: Connection, owner: str, text: str = "") -> list[Json]:
    """Return the latest chats, or those that contain a text."""
    found = objects.find(db, owner, "chat", limit=-1 if text else MAX_LISTED)
    if text:
        found = [chat for chat in found if _contains(db, chat, text.lower())][:MAX_LISTED]
    return [{"id": chat.id} | {name: chat.body[name] for name in ("title", "time", "leaf")} for chat in found]


def _contains(db: Connection, chat: Item, text: str) -> bool:
    turns = (message for turn in objects.find_parts(db, chat, "turn") for message in turn.body["messages"])
    return text in chat.body["title"].lower() or any(text in read_with_names(m["content"]).lower() for m in turns)


def read_chat(db: Connection, owner: str, chat_id: str | None) -> tuple[Json, Tree] | None:
    """Return a chat and its turns; None if it does not exist."""
    chat = None if chat_id is None else objects.get(db, owner, "chat", chat_id)
    if chat is None:
        return None
    parts = objects.find_parts(db, chat, "turn")
    nodes = (Node(part.id, part.body["before"], list(map(_restore, part.body["messages"]))) for part in parts)
    return chat.body, Tree(nodes)


def begin_turn(db: Connection, owner: str, chat_id: str, settings: Json, nodes: Sequence[Node]) -> None:
    """Add a question, if it is new, and the answer that begins; a chat begins with its first question.

    Raises StoreFull: there is no room.
    """
    chat = objects.get(db, owner, "chat", chat_id)
    body = {"title": make_title(nodes[0].messages), "named": False} if chat is None else chat.body
    body = body | {"time": int(db.clock()), "settings": settings, "leaf": nodes[-1].id}
    objects.put(db, owner, "chat", chat_id, body)
    for node in nodes:
        put_node(db, owner, chat_id, node)


def put_node(db: Connection, owner: str, chat_id: str, node: Node) -> None:
    """Add a node, or change its messages; nothing if its chat was removed.

    Raises StoreFull: there is no room.
    """
    objects.put(db, owner, "turn", node.id, {"before": node.before, "messages": node.messages}, parent=chat_id)


def change_chat(db: Connection, owner: str, chat_id: str, **fields: Any) -> None:
    """Change fields of a chat, if it exists."""
    if (chat := objects.get(db, owner, "chat", chat_id)) is not None:
        objects.put(db, owner, "chat", chat_id, chat.body | fields)


def remove_turns(db: Connection, owner: str, chat_id: str, turn_ids: Sequence[str], leaf: str | None) -> None:
    """Remove turns, and the chat with its last one."""
    for turn_id in turn_ids:
        objects.delete(db, owner, "turn", turn_id)
    chat = objects.get(db, owner, "chat", chat_id)
    if chat is not None and not objects.find_parts(db, chat, "turn"):
        objects.delete(db, owner, "chat", chat_id)
    change_chat(db, owner, chat_id, leaf=leaf)


def export_chats(db: Connection, owner: str, chat_id: str | None = None) -> str:
    """Return all chats, or one of them, as a file."""
    found = []
    for chat in objects.find(db, owner, "chat"):
        if chat_id in (None, chat.id):
            turns = [{"id": turn.id, **turn.body} for turn in objects.find_parts(db, chat, "turn")]
            found.append({"id": chat.id, **chat.body, "turns": turns})
    return json.dumps({"chats": found}, ensure_ascii=False, indent=1)


def import_chats(db: Connection, owner: str, text: str) -> list[str]:
    """Add the chats of a file; one with the id of a chat that exists replaces it. Returns their ids.

    Raises:
        ChatsError: the text is not an exported file.
        StoreFull: there is no room.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatsError(f"it is not JSON: {error}") from error
    chats = given.get("chats") if isinstance(given, dict) else None
    if not isinstance(chats, list):
        raise ChatsError('it has no list "chats"')
    read = [_read_chat(chat, number) for number, chat in enumerate(chats, 1)]
    # The latest is the first in the file, and is added last.
    return [_add_chat(db, owner, *chat) for chat in reversed(read)][::-1]


def _add_chat(db: Connection, owner: str, chat_id: str, body: Json, nodes: Sequence[Node]) -> str:
    if not objects.delete(db, owner, "chat", chat_id) and _is_taken(db, owner, chat_id):
        chat_id = make_id()
    # New ids, because those of the file may be taken.
    ids: dict[str | None, str] = {node.id: make_id() for node in nodes}
    leaf = ids.get(body["leaf"]) or Tree(nodes).find_leaf(None)
    objects.put(db, owner, "chat", chat_id, body | {"leaf": ids.get(leaf, leaf)})
    for node in nodes:
        put_node(db, owner, chat_id, Node(ids[node.id], ids.get(node.before), node.messages))
    return chat_id


def _is_taken(db: Connection, owner: str, item_id: str) -> bool:
    return db.execute("SELECT 1 FROM objects WHERE owner = ? AND id = ?", (owner, item_id)).fetchone() is not None


def _read_chat(chat: Any, number: int) -> tuple[str, Json, list[Node]]:
    fields = chat if isinstance(chat, dict) else {}
    if isinstance(turns := fields.get("turns"), list):
        nodes: list[Node] = []
        for turn in turns:
            turn = turn if isinstance(turn, dict) else {}
            known = {node.id for node in nodes}
            if not isinstance(turn.get("id"), str) or turn["id"] in known or turn.get("before") not in {None, *known}:
                raise ChatsError(f"chat {number} has a turn without an id, or before the one that it follows")
            nodes.append(Node(turn["id"], turn.get("before"), _read_messages(turn.get("messages"), number)))
    else:
        nodes = list(_read_line(fields, number, None, 0))
    if not nodes:
        raise ChatsError(f"chat {number} has no messages")
    seconds, settings = fields.get("time"), fields.get("settings")
    title = str(fields.get("title") or make_title(nodes[0].messages))[:MAX_TITLE_CHARS]
    body = {
        "title": title, "named": fields.get("named") is True, "leaf": fields.get("leaf"),
        "time": seconds if isinstance(seconds, int) and 0 <= seconds <= MAX_TIME_S else 0,
        "settings": settings if isinstance(settings, dict) else None,
    }
    return str(fields.get("id") or make_id())[:40], body, nodes


def _read_line(line: Any, number: int, before: str | None, start: int) -> list[Node]:
    """Return the nodes of an older file's messages, and of the versions beside them; the shown one comes last."""
    messages = _read_messages(line.get("messages") if isinstance(line, dict) else None, number)
    nodes: list[Node] = []
    forks = {fork["at"]: fork["tails"] for fork in line.get("forks") or () if _is_fork(fork)}
    last = before
    for index, message in enumerate(messages):
        begins = not index or message["role"] == "user" or messages[index - 1]["role"] == "user"
        if begins or index + start in forks:
            for tail in forks.get(index + start, ()):
                nodes += _read_line(tail, number, last, index + start) if tail else []
            nodes.append(Node(make_id(), last, []))
            last = nodes[-1].id
        nodes[-1].messages.append(message)
    return nodes


def _is_fork(fork: Any) -> bool:
    return isinstance(fork, dict) and isinstance(fork.get("at"), int) and isinstance(fork.get("tails"), list)


def _read_messages(messages: Any, number: int) -> History:
    if not isinstance(messages, list) or not messages:
        raise ChatsError(f"chat {number} has no messages")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
            raise ChatsError(f"chat {number} has a message without role and content")
        if not _is_text(message["content"]):
            raise ChatsError(f"chat {number} has a message whose content is not text")
        if not isinstance(message.get("metadata"), dict | None):
            raise ChatsError(f"chat {number} has a message whose metadata is not an object")
    return list(map(plain_message, messages))


def _is_text(content: Any) -> bool:
    """Return whether it is a text, a text block, or a list of these: the formats that Gradio uses."""
    if isinstance(content, list):
        return all(not isinstance(block, list) and _is_text(block) for block in content)
    if isinstance(content, dict) and list_image_paths(content):
        return True
    return isinstance(content.get("text") if isinstance(content, dict) else content, str)


def plain_message(message: Any) -> Json:
    """Return role, text with names of images, and the metadata that this app writes; other fields are dropped."""
    plain: Json = {"role": message["role"], "content": read_with_names(message["content"])}
    metadata = message.get("metadata") or {}
    kept = {name: metadata[name] for name in ("title", "id", "status") if isinstance(metadata.get(name), str)}
    return plain | ({"metadata": kept} if kept else {})


def _restore(message: Mapping[str, Any]) -> Json:
    """Return a stored message; names stand for images that are no longer on the server."""
    paths = list_image_paths(message["content"])
    is_here = all(Path(path).is_file() for path in paths)
    return dict(message) if is_here else {**message, "content": read_with_names(message["content"])}


def end_pending(history: History) -> History:
    """Return the history with the figures of an answer that a lost server has left."""
    answer_id = read_pending(history)
    return history if answer_id is None else [*history[:-1], figures_message("stopped", answer_id)]


def make_title(messages: History) -> str:
    """Return the first question as plain text, shortened; the name of its file if it has no words."""
    asked = (each for each in messages if each["role"] == "user")
    texts = (each["metadata"]["title"] if is_file(each) else _drop_markup(read_text(each["content"])) for each in asked)
    first = next(filter(None, texts), "")
    line = " ".join(first.split())
    return line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 1] + "…"


def _drop_markup(text: str) -> str:
    """Return the beginning of a Markdown text as plain text; code stays as it was written."""
    read = text[:MAX_READ_CHARS]
    return MARKUP.sub(lambda match: match["code"] or _drop_markup(match["link"] or match["text"] or ""), read)
