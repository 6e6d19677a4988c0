"""The chat's memory: the list of chats in the browser, opening one, and going between versions of it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.ui.chat.branches import Thread, describe, prune, switch
from app.ui.chat.conversation import History, list_titles
from app.ui.chat.store import (
    Change,
    Store,
    StoreError,
    empty_store,
    find_chat,
    import_chats,
    list_changes,
    make_chat_id,
    remove_chat,
    save_chat,
)
from app.ui.scripts import read_script

Opened = tuple[Any, ...]  # chatbot, thread, branches, tokens, chats


def describe_tokens(history: History) -> dict[str, Any]:
    """What the page needs to lead from each line of figures to the tokens that the browser keeps."""
    return {"ids": list_titles(history)}


def make_thread() -> Thread:
    return {"id": make_chat_id(), "forks": []}


def keep_chat(store: Store | None, thread: Thread, history: History) -> Change:
    """What the browser has to change so that it keeps the chat like this; without a store no other chat makes room."""
    before = store or empty_store()
    return list_changes(before, save_chat(before, thread["id"], history, thread["forks"]))


class ChatHistory:
    """Handlers over the store; each gives back all that the page shows of a chat, and what it changes in the store."""

    def build_list(self) -> gr.HTML:
        """The sidebar with the chats: as an input of an event it is the store, as an output a change of it."""
        with gr.Sidebar(position="left", open=False, width=280, elem_id="chats"):
            return gr.HTML(
                {}, html_template='<div class="chats"></div>', apply_default_css=False,
                js_on_load=read_script("kept") + read_script("chats"), elem_id="chat-list",
            )  # fmt: skip

    def build_branches(self) -> gr.HTML:
        """The switches between versions."""
        return gr.HTML(
            [], html_template='<div class="branches"></div>', apply_default_css=False,
            js_on_load=read_script("branches"), elem_id="branches",
        )  # fmt: skip

    def keep(self, history: History, thread: Thread | None, store: Store | None) -> tuple[Any, ...]:
        """The chat goes into the store as it is. Gives thread, branches, tokens and chats."""
        thread = prune(thread or make_thread(), history)
        return thread, describe(thread, history), describe_tokens(history), keep_chat(store, thread, history)

    def restore(self, store: Store | None) -> Opened:
        """What was open when the page was left."""
        store = store or empty_store()
        if find_chat(store, store.get("current")) is None:
            # Nothing to restore, and a person may have asked something by now.
            return tuple(gr.skip() for _ in range(5))
        return (*self._open(store, store["current"])[:4], gr.skip())

    def pick(self, store: Store | None, data: gr.EventData) -> Opened:
        """Another chat."""
        return self._open(store or empty_store(), data._data.get("id"))

    def fresh(self, store: Store | None) -> Opened:
        """A new chat."""
        return self._open(store or empty_store(), None)

    def drop(self, thread: Thread | None, store: Store | None, data: gr.EventData) -> Opened:
        """One chat less; when it is the one that is open, the page is empty again."""
        chat_id, store = str(data._data.get("id")), store or empty_store()
        left = remove_chat(store, chat_id)
        if thread is not None and thread["id"] == chat_id:
            return (*self._open(store, None)[:4], list_changes(store, left | {"current": None}))
        return (*(gr.skip() for _ in range(4)), list_changes(store, left))

    def bring(self, store: Store | None, data: gr.EventData) -> Change:
        """The chats of an exported file."""
        store = store or empty_store()
        try:
            return list_changes(store, import_chats(store, str(data._data.get("text"))))
        except StoreError as error:
            why = f"Nothing imported: {error}. Choose a file that Export has written."
            return list_changes(store, store, why)

    def turn(
        self, history: History, thread: Thread | None, store: Store | None, data: gr.EventData
    ) -> Opened:
        """Another version of the conversation."""
        thread = thread or make_thread()
        thread, history = switch(thread, history, int(data._data["at"]), int(data._data["to"]))
        saved = keep_chat(store, thread, history)
        return history, thread, describe(thread, history), describe_tokens(history), saved

    def _open(self, store: Store, chat_id: str | None) -> Opened:
        chat = find_chat(store, chat_id)
        if chat is None:
            thread, history = make_thread(), []
        else:
            thread, history = {"id": chat["id"], "forks": chat["forks"]}, chat["messages"]
        change = list_changes(store, {**store, "current": chat["id"] if chat else None})
        return history, thread, describe(thread, history), describe_tokens(history), change
