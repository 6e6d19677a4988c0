"""The chat tab: its layout, its events, and what its settings offer.

ChatRun has the handlers of a turn, ChatList those that open, change and list chats.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import gradio as gr

from app.ui.chat.attachments import FILE_TYPES, IMAGE_TYPES
from app.ui.chat.chat_list import ChatList
from app.ui.chat.events import AT_ONCE, EACH, OPEN, QUIET, run_in_turn
from app.ui.chat.history import build_branches, build_list, build_outbox
from app.ui.chat.run import Turn, is_running
from app.ui.chat.settings import Settings, build_model_choice, build_settings, show_grammar, show_thinking
from app.ui.chat.thinking import ThinkingChoices
from app.ui.chat.welcome import welcome
from app.ui.scripts import keep_touched, read_kept, read_script

INSIDE = """<button type="button" class="fold" aria-expanded="false" aria-controls="inside-body">
Look inside an answer</button>
<div class="body" id="inside-body" hidden><div class="which"></div><div class="trace"></div></div>"""
LATEX: Any = [
    {"left": left, "right": right, "display": display}
    for left, right, display in (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False))
]
GRAMMAR_KIND, MODELS, EFFORT = map(
    [each.name for each in fields(Settings)].index, ("grammar_kind", "models", "effort")
)
PLACEHOLDER = "Ask the model something"
# The message that was entered first, in place of the text box, where the next one is typed.
READ_ENTERED = "[outbox.read(), ...inputs.slice(1)]"
# Gradio shows a file as an icon: its name goes beside it.
NAME_FILES = """({ files = [] } = {}) => setTimeout(() => {
for (const [at, chip] of document.querySelectorAll("#composer .thumbnail-item").entries()) {
  chip.dataset.name = files[at]?.orig_name || files[at]?.path?.split("/").at(-1) || "";
  chip.parentElement.setAttribute("aria-label", chip.dataset.name);
}
})"""


class ChatTab(ChatList):
    """One chat on one engine; the page's state is which chat and which version of it the page shows."""

    def build(self, demo: gr.Blocks) -> None:
        """Put the tab's components on the page and connect them."""
        self.chats = build_list()
        with gr.Column(elem_id="chat", elem_classes="fill"):
            with gr.Column(elem_id="talk"), gr.Column(elem_id="messages"):
                self.chatbot, self.growing = self._build_messages()
            self.branches = build_branches()
            self.tokens = self._build_inside()
            # Above the text box, because a grammar shapes every answer until it is switched off.
            chip = gr.HTML(
                "", elem_id="grammar-chip", apply_default_css=False,
                js_on_load='element.onclick = (event) => { if (event.target.closest("button")) trigger("off"); };',
            )
            self.outbox = build_outbox()
            self.textbox = gr.MultimodalTextbox(
                label="Message", show_label=False, container=False, placeholder=PLACEHOLDER, lines=1, max_lines=8,
                autofocus=True, elem_id="composer", submit_btn=True, stop_btn=False, sources=["upload"],
                file_count="multiple", file_types=[*FILE_TYPES, *IMAGE_TYPES],
            )
            with gr.Row(elem_id="under"):
                answering, thinks, compare = build_model_choice(self.defaults, self.models.has_choice)
        with gr.Sidebar(position="right", open=False, width=320, elem_id="settings"):
            self.settings = settings = build_settings(self.defaults, answering, thinks)
            # Never displayed; they carry the browser's storage into the event.
            kept = gr.HTML({}, html_template="", apply_default_css=False, elem_id="kept-settings")
            current = gr.HTML("", html_template="", apply_default_css=False, elem_id="kept-chat")
        for event in (answering.focus, compare.loaded):
            event(self.offer_models, None, answering, **AT_ONCE)
        choose = f"(names) => [chooseModels(names, {json.dumps(self.engine.model_name)})]"
        answering.input(None, answering, answering, js=choose, **AT_ONCE)
        self.choosing, self.thinking = [answering, thinks], [thinks, settings[EFFORT]]
        for event in (answering.change, thinks.change, compare.loaded):
            event(self.offer_thinking, self.choosing, self.thinking, **AT_ONCE)
        for event in (answering.change, compare.loaded):
            event(self.welcome, answering, self.chatbot, **AT_ONCE)
        kind: Any = settings[GRAMMAR_KIND]
        kind.change(show_chip, kind, chip, **AT_ONCE)
        free = ("none", gr.update(**show_grammar("none")))
        chip.off(lambda: free, None, [kind, settings[GRAMMAR_KIND + 1]], **AT_ONCE)
        self.thread, self.turn = gr.State(None), gr.State(None)
        # What opening a chat fills.
        shown = [self.chatbot, self.thread, self.branches, self.tokens, self.chats]
        opened = [*shown, self.growing, self.textbox, self.turn, *settings]
        self._connect_turns()
        self._connect_history(opened)
        # One event, so that the settings of the chat and those of the browser cannot overtake each other.
        opening = demo.load(
            self.restore, [kept, current], [*opened[:8], kept],
            js=read_kept("readSettings", "readCurrent"), **AT_ONCE,
        )
        untouched = keep_touched(list(asdict(self.defaults).values()))
        opening.then(None, [kept, *settings], settings, js=untouched, **AT_ONCE)
        for end in (opening.then, opening.failure):
            end(None, js=OPEN, **AT_ONCE)
        opening.then(self.offer_thinking, self.choosing, self.thinking, **AT_ONCE)
        self._watch(opening)

    def _build_messages(self) -> tuple[gr.Chatbot, gr.Chatbot]:
        """Two chatbots, history and growing turn, so that a new token does not redraw the history."""
        text, examples = welcome(self.models)
        chatbot = gr.Chatbot(
            elem_id="chatbot", show_label=False, container=False, height=None, layout="bubble",
            editable="user", buttons=["copy"], feedback_options=None, placeholder=text,
            examples=[{"text": example} for example in examples], allow_tags=False, latex_delimiters=LATEX,
        )
        growing = gr.Chatbot(
            elem_id="growing", show_label=False, container=False, height=None, layout="bubble", buttons=[],
            feedback_options=None, placeholder=" ", allow_tags=False, autoscroll=False, latex_delimiters=LATEX,
        )
        return chatbot, growing

    def _build_inside(self) -> gr.HTML:
        """Build the view of the answers' tokens, shown on demand."""
        # Not an accordion: Gradio runs nothing inside a closed one, and every answer must be recorded.
        return gr.HTML(
            {"ids": []}, apply_default_css=False, elem_id="inside", html_template=INSIDE,
            js_on_load=read_script("make") + read_script("inside"),
        )

    async def send_entered(
        self, typed: Mapping[str, Any], data: gr.EventData, request: gr.Request, *rest: Any
    ) -> tuple[Any, ...]:
        """Begin a turn, and tell the outbox whether it has begun; "busy" if another turn runs."""
        begun = await self.send(typed, request, *rest)
        state = "begun" if isinstance(begun[4], Turn) else "busy" if is_running(rest[1]) else "refused"
        return *begun, {"id": data._data["id"], "state": state}

    async def offer_models(self) -> Any:
        """Offer the models that are here now: one may have been fetched since the page was opened."""
        return gr.update(choices=await self.models.label_here())

    async def welcome(self, names: list[str]) -> Any:
        """Say in the empty chat which models answer."""
        text, examples = welcome(self.models, names)
        return gr.update(placeholder=text, examples=[{"text": example} for example in examples])

    async def offer_thinking(self, names: list[str], thinks: bool) -> tuple[Any, Any]:
        """Show the settings of reasoning that the chosen models take; one that is not loaded is not asked."""
        choices = ThinkingChoices()
        for name in names or [self.engine.model_name]:
            engine = self.models.find(name)
            choices |= ThinkingChoices() if engine is None else await self.generation.find_choices(engine)
        return show_thinking(choices, thinks)

    def _connect_turns(self) -> None:
        chatbot, textbox, turn = self.chatbot, self.textbox, self.turn
        begun = [chatbot, textbox, self.growing, self.thread, turn, self.chats]
        asked = [self.thread, turn, *self.settings]
        sent = run_in_turn(
            self.outbox.send, self.send_entered, [textbox, *asked], [*begun, self.outbox], data=READ_ENTERED
        )
        sent.failure(None, js="() => outbox.end()", **AT_ONCE)
        self.outbox.take_files(None, textbox, textbox, js="(typed) => outbox.takeFiles(typed)", **AT_ONCE)
        self.outbox.give_back(None, textbox, textbox, js="(typed) => outbox.giveBack(typed)", **AT_ONCE)
        self._watch(sent)
        for event, begin in (
            (chatbot.example_select, self.send_example),
            (self.branches.again, self.retry),
            (self.branches.go_on, self.go_on),
        ):
            self._watch(run_in_turn(event, begin, asked, begun, is_of_chat=True))
        self._watch(run_in_turn(chatbot.edit, self.edit, [chatbot, *asked], begun, is_of_chat=True))
        textbox.change(None, textbox, None, js=NAME_FILES, **AT_ONCE)
        textbox.stop(self.stop, turn, None, **AT_ONCE)
        self.branches.behind(self.slow_down, turn, None, **AT_ONCE)

    def _connect_history(self, opened: list[gr.components.Component]) -> None:
        thread, turn, chats = self.thread, self.turn, self.chats
        taken_back = [self.chatbot, self.textbox, thread, self.branches, self.tokens, chats]
        run_in_turn(self.chatbot.undo, self.undo, [thread, turn], taken_back, is_of_chat=True)
        run_in_turn(self.branches.turn, self.switch, [thread, turn], opened[:5], is_of_chat=True)
        self._watch(run_in_turn(chats.pick, self.pick, [turn], opened))
        self._watch(run_in_turn(chats.bring, self.bring, [thread, turn], opened))
        run_in_turn(chats.fresh, self.fresh, [turn], opened)
        run_in_turn(chats.drop, self.drop, [thread, turn], opened)
        run_in_turn(chats.rename, self.rename, [thread], opened)
        run_in_turn(chats.search, self.search, [thread], opened)
        chats.export(self.export, None, opened, **AT_ONCE)

    def _watch(self, begun: Any) -> None:
        """Show the answer that an event has begun, or found, while it grows, and then add it to the history."""
        watching = begun.then(self.watch, self.turn, self.growing, **EACH, **QUIET)
        # Not the turn, because another one may have begun meanwhile.
        shown = [self.chatbot, self.textbox, self.growing, self.tokens]
        run_in_turn(watching.then, self.end, self.turn, [*shown, self.thread, self.branches, self.chats])


def show_chip(kind: str) -> str:
    """Return the note that a grammar shapes the answers, with a button that ends it; "" without one."""
    if kind == "none":
        return ""
    return (
        f"<p>Answers follow a {html.escape(kind)}{' grammar' if kind in ('regex', 'EBNF') else ''}. "
        '<button type="button">Switch it off</button></p>'
    )


