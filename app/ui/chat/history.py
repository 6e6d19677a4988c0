"""Stored chats: the list in the browser, opening a chat, and switching between its versions."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.ui.chat.branches import Thread, describe, list_turn_ids, merge, prune
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


def describe_tokens(history: History) -> dict[str, Any]:
    """Return what the page needs to link each line of figures to the tokens stored in the browser."""
    return {"ids": list_titles(history)}


def make_thread() -> Thread:
    return {"id": make_chat_id(), "forks": [], "seen": [], "settings": None}


def keep_chat(store: Store | None, thread: Thread, history: History) -> tuple[Thread, Change]:
    """Merge the changes of other tabs into the thread, and list the changes to store in the browser."""
    before = store or empty_store()
    thread = merge(thread, history, find_chat(before, thread["id"]))
    return thread, list_changes(before, save_chat(before, thread, history))


def build_list() -> gr.HTML:
    """Build the list of chats: as an event's input it is the store, as an output a change of it."""
    with gr.Sidebar(position="left", open=False, width=280, elem_id="chats"):
        return gr.HTML(
            {}, html_template='<div class="chats"></div>', apply_default_css=False,
            js_on_load=read_script("kept") + read_script("chats"), elem_id="chat-list",
        )  # fmt: skip


def build_branches() -> gr.HTML:
    """Build the switches between versions; the script places each at its message."""
    return gr.HTML(
        [], html_template='<div class="branches"></div>', apply_default_css=False,
        js_on_load=read_script("branches"), elem_id="branches",
    )  # fmt: skip


def keep(history: History, thread: Thread | None, store: Store | None) -> tuple[Any, ...]:
    """Store the chat as it is. Returns thread, branches, tokens and chats."""
    thread, change = keep_chat(store, prune(thread or make_thread(), history), history)
    return thread, describe(thread, history), describe_tokens(history), change


def open_chat(store: Store, chat_id: str | None) -> tuple[History, Thread, Change]:
    """Open a stored or a new chat: its messages, versions and the browser's notes."""
    chat = find_chat(store, chat_id)
    if chat is None:
        return [], make_thread(), list_changes(store, {**store, "current": None})
    tails = [tail for each in chat["forks"] for tail in each["tails"] if tail is not None]
    lines = [chat["messages"], *(tail["messages"] for tail in tails)]
    seen = [turn_id for line in lines for turn_id in list_turn_ids(line)]
    thread = {"id": chat["id"], "forks": chat["forks"], "seen": seen, "settings": chat.get("settings")}
    return chat["messages"], thread, list_changes(store, {**store, "current": chat["id"]})


def drop(store: Store, chat_id: str, is_open: bool) -> Change:
    """Remove a chat; if it is open, no chat is current."""
    left = remove_chat(store, chat_id)
    return list_changes(store, left | {"current": None}) if is_open else _change_others(store, left)


def bring(store: Store | None, data: gr.EventData) -> Change:
    """Import the chats of an exported file."""
    store = store or empty_store()
    try:
        return _change_others(store, import_chats(store, str(data._data.get("text"))))
    except StoreError as error:
        return report_problem(store, f"Nothing imported: {error}. Choose a file that Export has written.")


def report_problem(store: Store | None, problem: str) -> Change:
    """Show a problem over the page, and change no chat."""
    store = store or empty_store()
    return _change_others(store, store) | {"problem": problem}


def _change_others(before: Store, after: Store) -> Change:
    """List the changes to chats that are not open; another one may be opened meanwhile."""
    change = list_changes(before, after)
    del change["current"]
    return change
