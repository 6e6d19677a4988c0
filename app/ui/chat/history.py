"""The list of chats and the switches between versions: what the page gets of the stored chats."""

from __future__ import annotations

import secrets
from typing import Any

import gradio as gr

from app.ui.chat.conversation import History, list_titles
from app.ui.scripts import read_script

Json = dict[str, Any]
# {"id": of the chat, "leaf": of the version that the page shows; None in an empty chat}
Thread = dict[str, Any]


def describe_tokens(history: History) -> Json:
    """Return what the page needs to link each line of figures to the tokens stored in the browser."""
    return {"ids": list_titles(history)}


def describe_chats(listed: list[Json], thread: Thread | None, **more: Any) -> Json:
    """Return the list of chats and which one the page shows; `id` lets the page take each list once."""
    shown = {"current": None, "leaf": None} if thread is None else {"current": thread["id"], "leaf": thread["leaf"]}
    return {"id": secrets.token_hex(6), "chats": listed, **shown, **more}


def report_problem(problem: str) -> Json:
    """Show a problem over the page, and leave the list as it is."""
    return {"id": secrets.token_hex(6), "problem": problem}


def build_list() -> gr.HTML:
    with gr.Sidebar(position="left", open=False, width=280, elem_id="chats"):
        return gr.HTML(
            {}, html_template='<div class="chats"></div>', apply_default_css=False,
            js_on_load=read_script("kept") + read_script("make") + read_script("chats"), elem_id="chat-list",
        )


def build_branches() -> gr.HTML:
    """Build the switches between versions; the script places each at its message."""
    return gr.HTML(
        [], html_template='<div class="branches"></div>', apply_default_css=False,
        js_on_load=read_script("kept") + read_script("make") + read_script("branches"), elem_id="branches",
    )


def build_outbox() -> gr.HTML:
    """Build the list of the messages that were entered and wait for the end of an answer."""
    return gr.HTML(
        {}, html_template='<ul class="outbox"></ul>', apply_default_css=False, elem_id="outbox",
        js_on_load=read_script("kept") + read_script("make") + read_script("outbox"),
    )
