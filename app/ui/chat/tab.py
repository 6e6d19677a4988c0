"""The chat tab: layout and wiring. What its buttons do is ChatRun; what the browser remembers is ChatHistory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio as gr

from app.ui.chat.attachments import FILE_TYPES
from app.ui.chat.branches import Thread
from app.ui.chat.conversation import History, read_text
from app.ui.chat.history import ChatHistory, Opened
from app.ui.chat.run import ChatRun, Turn, first_index, is_running, open_composer
from app.ui.chat.settings import Settings, build_settings, restore_settings
from app.ui.chat.store import Store
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.scripts import read_kept, read_script
from engine import Engine

INSIDE = """<button type="button" class="fold" aria-expanded="false" aria-controls="inside-body">
Look inside an answer</button>
<div class="body" id="inside-body" hidden><div class="which"></div><div class="trace" data-answers></div></div>"""
PLACEHOLDER = "Ask the model something"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Events that are over at once need no queue.
AT_ONCE: dict[str, Any] = {"queue": False, **QUIET}
# The chats are the last input of these: what the browser keeps when the event begins.
WITH_STORE: dict[str, Any] = {"js": read_kept("readChats"), **AT_ONCE}


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tab's components that events read or write."""

    chatbot: gr.Chatbot
    growing: gr.Chatbot
    textbox: gr.MultimodalTextbox
    tokens: gr.HTML
    branches: gr.HTML
    chats: gr.HTML
    thread: gr.State
    turn: gr.State

    @property
    def opened(self) -> list[gr.components.Component]:
        """What another chat fills."""
        return [self.chatbot, self.thread, self.branches, self.tokens, self.chats]


class ChatTab(ChatRun):
    """One chat on one engine; the page's state is the history that travels with each event."""

    def __init__(
        self,
        engine: Engine,
        welcome: str,
        examples: list[str],
        defaults: Settings | None = None,
        interval_s: float = UPDATE_INTERVAL_S,
    ) -> None:
        super().__init__(engine, interval_s)
        self.defaults = defaults or Settings()
        self.welcome = welcome
        self.examples = examples
        self.history = ChatHistory()

    def build(self, demo: gr.Blocks) -> None:
        """Put the tab's components on the page and connect them."""
        chats = self.history.build_list()
        with gr.Column(elem_id="chat", elem_classes="fill"):
            with gr.Column(elem_id="talk"), gr.Column(elem_id="messages"):
                chatbot, growing = self._build_messages()
            branches = self.history.build_branches()
            tokens = self._build_inside()
            textbox = gr.MultimodalTextbox(
                label="Message", show_label=False, container=False, placeholder=PLACEHOLDER, lines=1, max_lines=8,
                autofocus=True, elem_id="composer", submit_btn=True, stop_btn=False, sources=["upload"],
                file_count="multiple", file_types=FILE_TYPES,
            )  # fmt: skip
        with gr.Sidebar(position="right", open=False, width=320, elem_id="settings"):
            settings = build_settings(self.defaults)
            # Its value is never drawn; it takes what the browser keeps into the event.
            kept = gr.HTML({}, html_template="", apply_default_css=False, elem_id="kept-settings")
        thread, turn = gr.State(None), gr.State(None)
        parts = _Parts(chatbot, growing, textbox, tokens, branches, chats, thread, turn)
        self._connect_turns(parts, settings)
        self._connect_history(parts)
        demo.load(self.history.restore, chats, parts.opened, **WITH_STORE)
        demo.load(
            partial(restore_settings, self.defaults), kept, settings, js=read_kept("readSettings"), **AT_ONCE
        )

    def _build_messages(self) -> tuple[gr.Chatbot, gr.Chatbot]:
        """Two chatbots, history and growing turn, so that a new token does not redraw the history."""
        chatbot = gr.Chatbot(
            elem_id="chatbot", show_label=False, container=False, height=None, layout="bubble",
            editable="user", buttons=["copy"], feedback_options=None, placeholder=self.welcome,
            examples=[{"text": text} for text in self.examples], allow_tags=False,
        )  # fmt: skip
        growing = gr.Chatbot(
            elem_id="growing", show_label=False, container=False, height=None, layout="bubble", buttons=[],
            feedback_options=None, placeholder=" ", allow_tags=False, autoscroll=False,
        )  # fmt: skip
        return chatbot, growing

    def _build_inside(self) -> gr.HTML:
        """The tokens of the answers, on demand."""
        # Not an accordion: Gradio runs nothing inside a closed one, and every answer must be recorded.
        return gr.HTML(
            {"ids": []}, apply_default_css=False, elem_id="inside", html_template=INSIDE,
            js_on_load=read_script("trace") + read_script("inside"),
        )  # fmt: skip

    def end(self, turn: Turn | None, store: Store | None) -> tuple[Any, ...]:
        """Put the turn into the history, and its chat into the browser's store."""
        closed = self.close(turn)
        history = closed[0]
        if turn is None or not isinstance(history, list):
            return (*closed, *(gr.skip() for _ in range(3)))
        thread, branches, _, chats = self.history.keep(history, turn.thread, store)
        return (*closed, thread, branches, chats)

    def undo(
        self,
        history: History,
        thread: Thread | None,
        turn: Turn | None,
        store: Store | None,
        data: gr.UndoData,
    ) -> tuple[Any, ...]:
        """Take the last turn back into the text box; none while an answer is written, which would bring it back."""
        if is_running(turn):
            return tuple(gr.skip() for _ in range(6))
        index = first_index(data.index)
        text = read_text(history[index]["content"])
        composer = open_composer(value={"text": text, "files": []})
        return history[:index], composer, *self.history.keep(history[:index], thread, store)

    def switch(
        self,
        history: History,
        thread: Thread | None,
        turn: Turn | None,
        store: Store | None,
        data: gr.EventData,
    ) -> Opened:
        """Another version of the conversation; none while an answer is written to this one."""
        if is_running(turn):
            return tuple(gr.skip() for _ in range(5))
        return self.history.turn(history, thread, store, data)

    def _connect_turns(self, parts: _Parts, settings: list[gr.components.Component]) -> None:
        chatbot, growing, textbox, turn = parts.chatbot, parts.growing, parts.textbox, parts.turn
        begun = [chatbot, textbox, growing, parts.thread, turn, parts.chats]
        ended = [
            chatbot,
            textbox,
            growing,
            parts.tokens,
            turn,
            parts.thread,
            parts.branches,
            parts.chats,
        ]
        asked = [chatbot, parts.thread, turn]
        for begin in (
            textbox.submit(self.send, [textbox, *asked], begun, **AT_ONCE),
            chatbot.example_select(self.send_example, asked, begun, **AT_ONCE),
            chatbot.retry(self.retry, asked, begun, **AT_ONCE),
            chatbot.edit(self.edit, asked, begun, **AT_ONCE),
        ):
            written = begin.then(self.answer, [turn, *settings], growing, **QUIET)
            written.then(self.end, [turn, parts.chats], ended, **WITH_STORE)
        textbox.stop(self.stop, turn, None, **AT_ONCE)

    def _connect_history(self, parts: _Parts) -> None:
        chatbot, thread, turn, chats = parts.chatbot, parts.thread, parts.turn, parts.chats
        opened = parts.opened
        taken_back = [chatbot, parts.textbox, thread, parts.branches, parts.tokens, chats]
        chatbot.undo(self.undo, [chatbot, thread, turn, chats], taken_back, **WITH_STORE)
        # What another chat was about to write must not reach this one.
        chats.pick(self.leave, turn, None, **AT_ONCE)
        chats.pick(self.history.pick, chats, opened, **WITH_STORE)
        chats.fresh(self.leave, turn, None, **AT_ONCE)
        chats.fresh(self.history.fresh, chats, opened, **WITH_STORE)
        chats.drop(self.leave_removed, turn, None, **AT_ONCE)
        chats.drop(self.history.drop, [thread, chats], opened, **WITH_STORE)
        chats.bring(self.history.bring, chats, chats, **WITH_STORE)
        parts.branches.turn(self.switch, [chatbot, thread, turn, chats], opened, **WITH_STORE)
