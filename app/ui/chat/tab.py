"""The chat tab: layout and wiring. ChatRun has the handlers, history.py the browser's storage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import gradio as gr

from app.ui.chat import history as memory
from app.ui.chat.attachments import FILE_TYPES, IMAGE_TYPES
from app.ui.chat.branches import Thread, describe, switch
from app.ui.chat.conversation import History, read_text
from app.ui.chat.run import ChatRun, Turn, first_index, is_running, open_composer
from app.ui.chat.settings import Settings, build_settings, restore_settings
from app.ui.chat.store import Store, empty_store, find_chat
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.scripts import keep_partial, keep_touched, read_kept, read_script
from engine import Engine

INSIDE = """<button type="button" class="fold" aria-expanded="false" aria-controls="inside-body">
Look inside an answer</button>
<div class="body" id="inside-body" hidden><div class="which"></div><div class="trace"></div></div>"""
LATEX: Any = [
    {"left": left, "right": right, "display": display}
    for left, right, display in (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False))
]
PLACEHOLDER = "Ask the model something"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Short events need no queue.
AT_ONCE: dict[str, Any] = {"queue": False, **QUIET}
# The last input of these events is the store: the chats in the browser when the event begins.
WITH_STORE: dict[str, Any] = {"js": read_kept("readChats"), **AT_ONCE}
# The same with the open chat only, which is all that a turn needs.
WITH_CHAT: dict[str, Any] = {"js": read_kept("readOpenChat"), **AT_ONCE}

# chatbot, thread, branches, tokens, chats, growing, composer, turn, settings
Opened = tuple[Any, ...]


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
    settings: list[gr.components.Component]

    @property
    def opened(self) -> list[gr.components.Component]:
        """Return the components that opening a chat fills."""
        shown = [self.chatbot, self.thread, self.branches, self.tokens, self.chats]
        return [*shown, self.growing, self.textbox, self.turn, *self.settings]


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

    def offer_files(self) -> Any:
        """Let the composer take images if the model sees them, which is known when the engine has started."""
        return gr.update(file_types=[*FILE_TYPES, *IMAGE_TYPES]) if self.engine.sees_images else gr.skip()

    def build(self, demo: gr.Blocks) -> None:
        """Put the tab's components on the page and connect them."""
        chats = memory.build_list()
        with gr.Column(elem_id="chat", elem_classes="fill"):
            with gr.Column(elem_id="talk"), gr.Column(elem_id="messages"):
                chatbot, growing = self._build_messages()
            branches = memory.build_branches()
            tokens = self._build_inside()
            textbox = gr.MultimodalTextbox(
                label="Message", show_label=False, container=False, placeholder=PLACEHOLDER, lines=1, max_lines=8,
                autofocus=True, elem_id="composer", submit_btn=True, stop_btn=False, sources=["upload"],
                file_count="multiple", file_types=FILE_TYPES,
            )  # fmt: skip
        with gr.Sidebar(position="right", open=False, width=320, elem_id="settings"):
            settings = build_settings(self.defaults, self.list_models())
            # Never displayed; carries the browser's storage into the event.
            kept = gr.HTML({}, html_template="", apply_default_css=False, elem_id="kept-settings")
        thread, turn = gr.State(None), gr.State(None)
        parts = _Parts(chatbot, growing, textbox, tokens, branches, chats, thread, turn, settings)
        self._connect_turns(parts)
        self._connect_history(parts)
        demo.load(self.offer_files, None, textbox, **AT_ONCE)
        # One event, so that the settings of the chat and those of the browser cannot overtake each other.
        opening = demo.load(
            self.restore,
            [thread, kept, chats],
            [*parts.opened[:8], kept],
            js=read_kept("readSettings", "readOpenChat"),
            **AT_ONCE,
        )
        untouched = keep_touched(list(asdict(self.defaults).values()))
        opening.then(None, [kept, *settings], settings, js=untouched, **AT_ONCE)
        self._go_on(opening, parts)

    def _build_messages(self) -> tuple[gr.Chatbot, gr.Chatbot]:
        """Two chatbots, history and growing turn, so that a new token does not redraw the history."""
        chatbot = gr.Chatbot(
            elem_id="chatbot", show_label=False, container=False, height=None, layout="bubble",
            editable="user", buttons=["copy"], feedback_options=None, placeholder=self.welcome,
            examples=[{"text": text} for text in self.examples], allow_tags=False, latex_delimiters=LATEX,
        )  # fmt: skip
        growing = gr.Chatbot(
            elem_id="growing", show_label=False, container=False, height=None, layout="bubble", buttons=[],
            feedback_options=None, placeholder=" ", allow_tags=False, autoscroll=False, latex_delimiters=LATEX,
        )  # fmt: skip
        return chatbot, growing

    def _build_inside(self) -> gr.HTML:
        """Build the view of the answers' tokens, shown on demand."""
        # Not an accordion: Gradio runs nothing inside a closed one, and every answer must be recorded.
        return gr.HTML(
            {"ids": []}, apply_default_css=False, elem_id="inside", html_template=INSIDE,
            js_on_load=read_script("inside"),
        )  # fmt: skip

    def end(self, turn: Turn | None, store: Store | None) -> tuple[Any, ...]:
        """Add the turn to the history, and store its chat in the browser."""
        closed = self.close(turn)
        history = closed[0]
        if turn is None or not isinstance(history, list):
            return (*closed, *(gr.skip() for _ in range(3)))
        thread, branches, _, chats = memory.keep(history, turn.thread, store)
        return (*closed, thread, branches, chats)

    def undo(
        self,
        history: History,
        thread: Thread | None,
        turn: Turn | None,
        store: Store | None,
        data: gr.UndoData,
    ) -> tuple[Any, ...]:
        """Move the last turn back into the text box; do nothing while an answer is generated."""
        if is_running(turn):
            return tuple(gr.skip() for _ in range(6))
        _leave(turn)
        index = first_index(data.index)
        text = read_text(history[index]["content"])
        composer = open_composer(value={"text": text, "files": []})
        return history[:index], composer, *memory.keep(history[:index], thread, store)

    def switch(
        self,
        history: History,
        thread: Thread | None,
        turn: Turn | None,
        store: Store | None,
        data: gr.EventData,
    ) -> tuple[Any, ...]:
        """Show another version of the conversation; do nothing while an answer is generated."""
        if is_running(turn):
            return tuple(gr.skip() for _ in range(5))
        if turn is not None and turn.is_shown:
            _leave(turn)
        thread = thread or memory.make_thread()
        thread, history = switch(thread, history, int(data._data["at"]), int(data._data["to"]))
        return history, *memory.keep(history, thread, store)

    def restore(self, thread: Thread | None, kept: Any, store: Store | None) -> tuple[Any, ...]:
        """Restore the chat that was open when the page was left; in place of the settings, list their updates.

        A question that was asked, or a chat that was opened, before this event, stays.
        """
        store = store or empty_store()
        chat = find_chat(store, store.get("current")) if thread is None else None
        opened = self._skip_opened() if chat is None else self._open(store, chat["id"])
        if chat is not None and chat.get("settings"):
            return *opened[:8], {"updates": opened[8:]}
        return *opened[:8], {"updates": restore_settings(self.defaults, kept, self.list_models())}

    def pick(self, turn: Turn | None, store: Store | None, data: gr.EventData) -> Opened:
        """Open another chat. The answer in the previous chat continues, and is shown when that chat is opened again."""
        is_here = turn is not None and turn.thread["id"] == data._data["id"]
        if turn is not None and is_here and turn.is_watched and is_running(turn):
            # The page shows this chat and its answer, which another tab may not have stored yet.
            return self._skip_opened()
        _leave(turn)
        return self._open(store or empty_store(), data._data.get("id"))

    def fresh(self, turn: Turn | None, store: Store | None) -> Opened:
        """Open a new chat."""
        _leave(turn)
        return self._open(store or empty_store(), None)

    async def drop(
        self, thread: Thread | None, turn: Turn | None, store: Store | None, data: gr.EventData
    ) -> Opened:
        """Remove a chat; if it is open, its answer ends and the page becomes empty."""
        chat_id, store = str(data._data.get("id")), store or empty_store()
        is_open = thread is not None and thread["id"] == chat_id
        opened = list(self._skip_opened())
        if is_open:
            if turn is not None:
                turn.answer.stop()
            _leave(turn)
            opened = list(self._open(store, None))
        opened[4] = memory.drop(store, chat_id, is_open)
        return tuple(opened)

    def _skip_opened(self) -> Opened:
        return tuple(gr.skip() for _ in range(8 + len(asdict(self.defaults))))

    def _open(self, store: Store, chat_id: str | None) -> Opened:
        history, thread, change = memory.open_chat(store, chat_id)
        history, turn = self.resume(history, thread)
        if turn is None:
            composer, growing = open_composer(), []
        else:
            composer, growing = gr.update(submit_btn=False, stop_btn=True), turn.growing
        kept = thread["settings"]
        kept = asdict(self.defaults) | kept if kept else None
        settings = restore_settings(self.defaults, kept, self.list_models())
        shown = [history, thread, describe(thread, history), memory.describe_tokens(history), change]
        return (*shown, growing, composer, turn, *settings)

    def _connect_turns(self, parts: _Parts) -> None:
        chatbot, textbox, turn = parts.chatbot, parts.textbox, parts.turn
        begun = [chatbot, textbox, parts.growing, parts.thread, turn, parts.chats]
        asked = [chatbot, parts.thread, turn, *parts.settings, parts.chats]
        for begin in (
            textbox.submit(self.send, [textbox, *asked], begun, **WITH_CHAT),
            chatbot.example_select(self.send_example, asked, begun, **WITH_CHAT),
            chatbot.retry(self.retry, asked, begun, **WITH_CHAT),
            chatbot.edit(self.edit, asked, begun, **WITH_CHAT),
        ):
            self._finish(begin.then(self.watch, turn, parts.growing, **QUIET), parts)
        textbox.stop(self.stop, turn, None, **AT_ONCE)
        # The displayed part of an answer stays in the browser in case the server is lost.
        parts.growing.change(None, parts.growing, None, js=keep_partial(), **AT_ONCE)

    def _connect_history(self, parts: _Parts) -> None:
        chatbot, thread, turn, chats = parts.chatbot, parts.thread, parts.turn, parts.chats
        opened = parts.opened
        taken_back = [chatbot, parts.textbox, thread, parts.branches, parts.tokens, chats]
        chatbot.undo(self.undo, [chatbot, thread, turn, chats], taken_back, **WITH_CHAT)
        self._go_on(chats.pick(self.pick, [turn, chats], opened, **WITH_STORE), parts)
        chats.fresh(self.fresh, [turn, chats], opened, **WITH_STORE)
        chats.drop(self.drop, [thread, turn, chats], opened, **WITH_STORE)
        chats.bring(memory.bring, chats, chats, **WITH_STORE)
        parts.branches.turn(self.switch, [chatbot, thread, turn, chats], opened[:5], **WITH_CHAT)

    def _go_on(self, opening: Any, parts: _Parts) -> None:
        """Watch the answer of a chat that was opened while it is generated."""
        self._finish(opening.then(self.watch_again, parts.turn, parts.growing, **QUIET), parts)

    def _finish(self, watching: Any, parts: _Parts) -> None:
        # Not the turn, because another one may have begun meanwhile.
        shown = [parts.chatbot, parts.textbox, parts.growing, parts.tokens]
        ended = [*shown, parts.thread, parts.branches, parts.chats]
        watching.then(self.end, [parts.turn, parts.chats], ended, **WITH_CHAT)


def _leave(turn: Turn | None) -> None:
    """Detach the turn, so that its output does not reach the chat that is opened."""
    if turn is not None:
        turn.is_left = True
