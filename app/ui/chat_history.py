"""The chat's memory: the list of chats in the browser, opening one, and going between versions of it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.ui.branches import Thread, describe, prune, switch
from app.ui.chat_store import (
    Store,
    StoreError,
    empty_store,
    find_chat,
    import_chats,
    make_chat_id,
    remove_chat,
    save_chat,
)
from app.ui.conversation import History, list_titles
from app.ui.scripts import read_script

# Kept in the browser only. The secret is no secret: it lets the same browser read its own store after a restart.
STORAGE_KEY, SECRET = "troupe-chats", "troupe-on-this-browser"

Opened = tuple[Any, ...]  # chatbot, thread, branches, tokens, store, list


def describe_tokens(history: History) -> dict[str, Any]:
    """What the page needs to lead from each line of figures to the tokens that the browser keeps."""
    return {"ids": list_titles(history)}


def make_thread() -> Thread:
    return {"id": make_chat_id(), "forks": []}


class ChatHistory:
    """Handlers over the store; each gives back everything the page shows of a chat."""

    def build_list(self) -> tuple[gr.BrowserState, gr.HTML]:
        """The store, and the sidebar that lists it."""
        store = gr.BrowserState(empty_store(), storage_key=STORAGE_KEY, secret=SECRET)
        with gr.Sidebar(position="left", open=False, width=280, elem_id="chats"):
            chats = gr.HTML(
                empty_store(), html_template='<div class="chats"></div>', apply_default_css=False,
                js_on_load=read_script("chats"), elem_id="chat-list",
            )  # fmt: skip
        return store, chats

    def build_branches(self) -> gr.HTML:
        """The switches between versions."""
        return gr.HTML(
            [], html_template='<div class="branches"></div>', apply_default_css=False,
            js_on_load=read_script("branches"), elem_id="branches",
        )  # fmt: skip

    def keep(self, history: History, thread: Thread | None, store: Store | None) -> tuple[Any, ...]:
        """After an undo: the chat goes into the store as it is. Gives thread, branches, tokens, store and list."""
        thread = prune(thread or make_thread(), history)
        saved = save_chat(store or empty_store(), thread["id"], history, thread["forks"])
        return thread, describe(thread, history), describe_tokens(history), saved, saved

    def restore(self, store: Store | None) -> Opened:
        """What was open when the page was left."""
        store = store or empty_store()
        shown = store if store["chats"] else gr.skip()
        if find_chat(store, store.get("current")) is None:
            # Nothing to restore, and a person may have asked something by now: only the list is filled.
            return (*(gr.skip() for _ in range(5)), shown)
        # The store itself stays as it is: this answer may come later than something that was kept meanwhile.
        return (*self._open(store, store["current"])[:4], gr.skip(), shown)

    def pick(self, store: Store | None, data: gr.EventData) -> Opened:
        """Another chat."""
        return self._open(store or empty_store(), data._data.get("id"))

    def fresh(self, store: Store | None) -> Opened:
        """A new chat."""
        return self._open(store or empty_store(), None)

    def drop(self, store: Store | None, thread: Thread | None, data: gr.EventData) -> Opened:
        """One chat less; when it is the one that is open, the page is empty again."""
        chat_id = str(data._data.get("id"))
        store = remove_chat(store or empty_store(), chat_id)
        if thread is not None and thread["id"] == chat_id:
            return self._open(store, None)
        return (*(gr.skip() for _ in range(4)), store, store)

    def bring(self, store: Store | None, data: gr.EventData) -> tuple[Any, Any]:
        """The chats of an exported file. Gives store and list."""
        try:
            store = import_chats(store or empty_store(), str(data._data.get("text")))
        except StoreError as error:
            why = f"Nothing imported: {error}. Choose a file that Export has written."
            return gr.skip(), (store or empty_store()) | {"problem": why}
        return store, store

    def turn(
        self, history: History, thread: Thread | None, store: Store | None, data: gr.EventData
    ) -> Opened:
        """Another version of the conversation."""
        thread = thread or make_thread()
        thread, history = switch(thread, history, int(data._data["at"]), int(data._data["to"]))
        saved = save_chat(store or empty_store(), thread["id"], history, thread["forks"])
        return history, thread, describe(thread, history), describe_tokens(history), saved, saved

    def _open(self, store: Store, chat_id: str | None) -> Opened:
        chat = find_chat(store, chat_id)
        if chat is None:
            thread, history = make_thread(), []
        else:
            thread, history = {"id": chat["id"], "forks": chat["forks"]}, chat["messages"]
        store = {**store, "current": chat["id"] if chat else None}
        return history, thread, describe(thread, history), describe_tokens(history), store, store
