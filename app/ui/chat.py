"""The chat tab: layout and wiring. What its buttons do is ChatRun; what the browser remembers is ChatHistory."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.ui.attachments import FILE_TYPES
from app.ui.chat_history import NO_TOKENS, ChatHistory
from app.ui.chat_run import ChatRun
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.scripts import read_script
from app.ui.settings import Settings, build_settings
from engine import Engine

PLACEHOLDER = "Ask the model something"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


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
        store, chats = self.history.build_list()
        with gr.Column(elem_id="chat", elem_classes="fill"):
            chatbot = gr.Chatbot(
                elem_id="chatbot", show_label=False, container=False, height=None, layout="bubble",
                editable="user", buttons=["copy"], feedback_options=None, placeholder=self.welcome,
                examples=[{"text": text} for text in self.examples], allow_tags=False, scale=1,
            )  # fmt: skip
            branches = self.history.build_branches()
            with gr.Accordion("Look inside the last answer", open=False, elem_id="inside"):
                tokens = gr.HTML(
                    NO_TOKENS, apply_default_css=False, elem_id="tokens", js_on_load=read_script("trace"),
                    html_template='<div class="trace" data-empty="Ask something: every token of the answer appears '
                    'here with its probability and its rivals."></div>',
                )  # fmt: skip
            textbox = gr.MultimodalTextbox(
                label="Message", show_label=False, container=False, placeholder=PLACEHOLDER, lines=1, max_lines=8,
                autofocus=True, elem_id="composer", submit_btn=True, stop_btn=False, sources=["upload"],
                file_count="multiple", file_types=FILE_TYPES,
            )  # fmt: skip
            live = gr.HTML(
                "",
                html_template="<span></span>",
                apply_default_css=False,
                js_on_load=read_script("live"),
                elem_id="live",
            )
        with gr.Sidebar(position="right", open=False, width=320, elem_id="settings"):
            settings = build_settings(self.defaults)
        thread = gr.State(None)
        self._connect(chatbot, textbox, tokens, thread, live, branches, store, chats, settings)
        opened = [chatbot, thread, branches, tokens, store, chats]
        demo.load(self.history.restore, store, opened, queue=False, **QUIET)

    def _connect(
        self,
        chatbot: gr.Chatbot,
        textbox: gr.MultimodalTextbox,
        tokens: gr.HTML,
        thread: gr.State,
        live: gr.HTML,
        branches: gr.HTML,
        store: gr.BrowserState,
        chats: gr.HTML,
        settings: list[gr.components.Component],
    ) -> None:
        answered = [chatbot, textbox, tokens, thread, live]
        kept = {
            "inputs": [chatbot, thread, store],
            "outputs": [thread, branches, store, chats],
            "queue": False,
        }
        keep = {"fn": self.history.keep, **kept, **QUIET}
        textbox.submit(self.send, [textbox, chatbot, thread, *settings], answered, **QUIET).then(**keep)
        chatbot.example_select(self.send_example, [chatbot, thread, *settings], answered, **QUIET).then(
            **keep
        )
        chatbot.retry(self.retry, [chatbot, thread, *settings], answered, **QUIET).then(**keep)
        chatbot.edit(self.edit, [chatbot, thread, *settings], answered, **QUIET).then(**keep)
        chatbot.undo(self.undo, chatbot, [chatbot, textbox], queue=False, **QUIET).then(**keep)
        textbox.stop(self.stop, None, None, queue=False, **QUIET)
        opened = [chatbot, thread, branches, tokens, store, chats]
        chatbot.clear(self.discard, None, None, queue=False, **QUIET).then(
            self.history.fresh, store, opened, queue=False, **QUIET
        )
        # What another chat was about to write must not reach this one.
        chats.pick(self.leave, None, None, queue=False, **QUIET)
        chats.pick(self.history.pick, store, opened, queue=False, **QUIET)
        chats.fresh(self.leave, None, None, queue=False, **QUIET)
        chats.fresh(self.history.fresh, store, opened, queue=False, **QUIET)
        chats.drop(self.history.drop, [store, thread], opened, queue=False, **QUIET)
        chats.bring(self.history.bring, store, [store, chats], queue=False, **QUIET)
        branches.turn(self.history.turn, [chatbot, thread, store], opened, queue=False, **QUIET)
