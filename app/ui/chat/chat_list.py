"""Handlers that open, change and list chats: what the page shows of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.store import Store, StoreError, objects
from app.ui.chat import store as chats
from app.ui.chat.attachments import write_files
from app.ui.chat.branches import Node, Tree, find_place, join
from app.ui.chat.conversation import lay_out, read_text
from app.ui.chat.history import Thread, describe_chats, describe_tokens, report_problem
from app.ui.chat.run import ChatRun, Turn, first_index, is_running, open_composer
from app.ui.chat.settings import Settings, name_gone, restore_settings
from app.ui.chat.writing import inspect, show
from app.ui.owner import describe_keeping, find_owner
from app.ui.pacing import UPDATE_INTERVAL_S
from engine import Engine

EMPTY: Mapping[str, Any] = {}

# chatbot, thread, branches, tokens, chats, growing, composer, turn, settings
Opened = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """What the store has: a chat, all its turns, those that the page shows, and the list of chats."""

    body: dict[str, Any]
    tree: Tree
    path: list[Node]
    listed: list[dict[str, Any]]

    @property
    def branches(self) -> list[dict[str, Any]]:
        return self.tree.describe(self.path)


class ChatList(ChatRun):
    """The chats of a visitor, and the one that the page shows.

    Args:
        defaults: the settings of a new chat.
    """

    def __init__(
        self, engine: Engine, store: Store, defaults: Settings | None = None,
        interval_s: float = UPDATE_INTERVAL_S, pool: ModelPool | None = None,
    ) -> None:
        super().__init__(engine, store, interval_s, pool)
        self.defaults = defaults or Settings()

    async def end(self, turn: Turn | None, request: gr.Request) -> tuple[Any, ...]:
        """Add the turn to the history; returns also thread, branches and chats."""
        closed = self.close(turn)
        if turn is None or not isinstance(closed[0], list):
            return *closed, *(gr.skip() for _ in range(3))
        problem = {}
        try:
            if turn.answer.written is not None:
                await asyncio.wrap_future(turn.answer.written)
        except StoreError as error:
            problem = {"problem": f"This answer is lost when the page is closed: {error}."}
        found = await self._read(request, turn.thread)
        return *closed, turn.thread, found.branches, describe_chats(found.listed, turn.thread, **problem)

    async def undo(
        self, thread: Thread | None, turn: Turn | None, data: gr.UndoData, request: gr.Request
    ) -> tuple[Any, ...]:
        """Move the last turn back into the text box; do nothing while an answer is generated."""
        if is_running(turn) or thread is None:
            return tuple(gr.skip() for _ in range(6))
        found = await self._read(request, thread)
        place = find_place(found.path, first_index(data.index))
        if place >= len(found.path):
            return tuple(gr.skip() for _ in range(6))
        _leave(turn)
        question = found.path[place]
        removed, leaf = found.tree.list_after(question.id), question.before
        await self.store.run(chats.remove_turns, find_owner(request), thread["id"], removed, leaf)
        files = await asyncio.to_thread(write_files, question.messages)
        composer = open_composer(value={"text": read_text(question.messages[0]["content"]), "files": files})
        history, *shown = await self._show(request, thread | {"leaf": leaf})
        return history, composer, *shown

    async def switch(
        self, thread: Thread | None, turn: Turn | None, data: gr.EventData, request: gr.Request
    ) -> tuple[Any, ...]:
        """Show another version of the conversation; do nothing while an answer is generated."""
        if is_running(turn) or thread is None:
            return tuple(gr.skip() for _ in range(5))
        found = await self._read(request, thread)
        place, to = find_place(found.path, int(data._data["at"])), int(data._data["to"])
        versions = found.tree.list_versions(found.path[place]) if place < len(found.path) else []
        if not 0 <= to < len(versions):
            return tuple(gr.skip() for _ in range(5))
        if turn is not None and turn.is_shown:
            _leave(turn)
        leaf = found.tree.find_leaf(versions[to].id)
        await self.store.run(chats.change_chat, find_owner(request), thread["id"], leaf=leaf)
        return await self._show(request, thread | {"leaf": leaf})

    async def restore(self, kept: Any, chat_id: str | None, request: gr.Request) -> tuple[Any, ...]:
        """Open the chat that this tab had open, or the latest; in place of the settings, list their updates."""
        owner = find_owner(request)
        more = {"where": describe_keeping(self.store, owner)}
        notes = [more["where"]] if owner.startswith(objects.GUEST) else self.store.notes
        more |= {"problem": " ".join(notes)} if notes else {}
        if chat_id is None:
            listed = await self.store.run(chats.list_chats, owner)
            chat_id = listed[0]["id"] if listed else None
        *opened, settings = await self._open(request, chat_id, more)
        opened, updates = await self._restore_settings(opened, settings or kept)
        return *opened, {"updates": updates}

    async def pick(self, turn: Turn | None, data: gr.EventData, request: gr.Request) -> Opened:
        """Open another chat. The answer in the previous chat continues, and is shown when that chat is opened again."""
        is_here = turn is not None and turn.thread["id"] == data._data["id"]
        if turn is not None and is_here and turn.is_watched and is_running(turn):
            return self._skip_opened()
        return await self._replace(turn, request, data._data.get("id"))

    async def fresh(self, turn: Turn | None, request: gr.Request) -> Opened:
        """Open a new chat."""
        return await self._replace(turn, request, None)

    async def drop(self, thread: Thread | None, turn: Turn | None, data: gr.EventData, request: gr.Request) -> Opened:
        """Remove a chat, and give it to the page, which may bring it back; an open one ends its answer."""
        chat_id, owner = str(data._data.get("id")), find_owner(request)
        is_open = thread is not None and thread["id"] == chat_id
        if is_open and turn is not None:
            turn.answer.stop()
        removed = await self.store.run(chats.export_chats, owner, chat_id)
        await self.store.run(objects.delete, owner, "chat", chat_id)
        more: dict[str, Any] = {"removed": {"text": removed, "was_open": is_open}}
        if is_open:
            return await self._replace(turn, request, None, more)
        return await self._list(request, thread, **more)

    async def bring(self, thread: Thread | None, turn: Turn | None, data: gr.EventData, request: gr.Request) -> Opened:
        """Import the chats of a file, or those that this browser kept before; open the first if the page wants it."""
        try:
            found = await self.store.run(chats.import_chats, find_owner(request), str(data._data.get("text")))
        except (chats.ChatsError, StoreError) as error:
            problem = f"Nothing imported: {error}. Choose a file that Export has written."
            return *self._skip_opened()[:4], report_problem(problem), *self._skip_opened()[5:]
        if data._data.get("opens") and found:
            return await self._replace(turn, request, found[0])
        return await self._list(request, thread, is_taken=bool(data._data.get("is_old")))

    async def rename(self, thread: Thread | None, data: gr.EventData, request: gr.Request) -> Opened:
        """Give a chat another title."""
        title = str(data._data.get("title"))[: chats.MAX_TITLE_CHARS]
        owner, chat_id = find_owner(request), str(data._data.get("id"))
        await self.store.run(chats.change_chat, owner, chat_id, title=title, named=True)
        return await self._list(request, thread)

    async def search(self, thread: Thread | None, data: gr.EventData, request: gr.Request) -> Opened:
        """List the chats that contain a text, or all."""
        text = str(data._data.get("text") or "")
        return await self._list(request, thread, text, is_search=bool(text))

    async def export(self, request: gr.Request) -> Opened:
        """Give the page all chats as a file."""
        text = await self.store.run(chats.export_chats, find_owner(request))
        return *self._skip_opened()[:4], {"id": chats.make_id(), "file": text}, *self._skip_opened()[5:]

    async def _read(self, request: gr.Request, thread: Thread | None) -> _Found:
        """Return what the store has of the open chat, and the list of chats."""
        owner, chat_id = find_owner(request), None if thread is None else thread["id"]
        found = await self.store.run(chats.read_chat, owner, chat_id)
        listed = await self.store.run(chats.list_chats, owner)
        body, tree = found or ({}, Tree())
        return _Found(body, tree, tree.find_path(thread["leaf"]) if thread is not None else [], listed)

    async def _show(self, request: gr.Request, thread: Thread) -> tuple[Any, ...]:
        found = await self._read(request, thread)
        history = show(found.path)
        return history, thread, found.branches, describe_tokens(history), describe_chats(found.listed, thread)

    async def _list(self, request: gr.Request, thread: Thread | None, text: str = "", **more: Any) -> Opened:
        """Update the list of chats only; another one may be opened meanwhile."""
        listed = await self.store.run(chats.list_chats, find_owner(request), text)
        skipped = self._skip_opened()
        return *skipped[:4], describe_chats(listed, thread, **more), *skipped[5:]

    def _skip_opened(self) -> Opened:
        return tuple(gr.skip() for _ in range(8 + len(asdict(self.defaults))))

    async def _replace(
        self, turn: Turn | None, request: gr.Request, chat_id: str | None, more: Mapping[str, Any] = EMPTY
    ) -> Opened:
        """Open another chat in the place of the one that the page shows."""
        _leave(turn)
        *opened, kept = await self._open(request, chat_id, more)
        kept = asdict(self.defaults) | kept if kept else None
        opened, updates = await self._restore_settings(opened, kept)
        return *opened, *updates

    async def _restore_settings(self, opened: Sequence[Any], kept: Any) -> tuple[list[Any], list[Any]]:
        """Return an opened chat, with a note if its model is not here any more, and the updates of its settings."""
        models = await self.models.label_here()
        *before, listed, _, _, _ = opened
        if note := name_gone(kept, [name for _, name in models]):
            listed = listed if "id" in listed else report_problem("")
            listed |= {"problem": f"{listed.get('problem', '')} {note}".strip()}
        return [*before, listed, *opened[5:]], restore_settings(self.defaults, kept, models)

    async def _open(self, request: gr.Request, chat_id: str | None, more: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what the page shows of a stored or a new chat, and the chat's settings."""
        found = await self._read(request, {"id": chat_id, "leaf": None})
        thread: Thread = {"id": chat_id if found.body else chats.make_id(), "leaf": found.body.get("leaf")}
        path = found.tree.find_path(thread["leaf"])
        answer = self.answers.find(thread["leaf"] or "")
        history, turn, growing, composer = show(path), None, [], open_composer()
        if answer is not None and not answer.is_over:
            history = lay_out(join(path[:-1]))
            turn = Turn(history, len(history), thread, answer)
            growing, composer = turn.growing, gr.update(submit_btn=False, stop_btn=True)
        listed = describe_chats(found.listed, thread, **more)
        tokens = inspect(history, None if turn is not None else answer)
        shown = [history, thread, found.tree.describe(path), tokens, listed, growing, composer, turn]
        return *shown, found.body.get("settings")


def _leave(turn: Turn | None) -> None:
    """Detach the turn, so that its output does not reach the chat that is opened."""
    if turn is not None:
        turn.is_left = True
