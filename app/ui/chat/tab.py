"""The chat tab: layout, wiring, and the handlers that open, change and list chats. ChatRun has those of a turn."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.store import Store, StoreError, objects
from app.ui.chat import store as chats
from app.ui.chat.attachments import FILE_TYPES, IMAGE_TYPES, write_files
from app.ui.chat.branches import Node, Tree, find_place, join
from app.ui.chat.conversation import lay_out, read_text
from app.ui.chat.history import (
    Thread,
    build_branches,
    build_list,
    build_outbox,
    describe_chats,
    describe_tokens,
    report_problem,
)
from app.ui.chat.run import ChatRun, Turn, first_index, is_running, open_composer
from app.ui.chat.settings import (
    Settings,
    build_settings,
    name_gone,
    restore_settings,
    show_grammar,
    show_thinking,
)
from app.ui.chat.thinking import ThinkingChoices
from app.ui.chat.welcome import welcome
from app.ui.chat.writing import inspect, show
from app.ui.owner import describe_keeping, find_owner
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.scripts import keep_touched, read_kept, read_script
from engine import Engine

INSIDE = """<button type="button" class="fold" aria-expanded="false" aria-controls="inside-body">
Look inside an answer</button>
<div class="body" id="inside-body" hidden><div class="which"></div><div class="trace"></div></div>"""
LATEX: Any = [
    {"left": left, "right": right, "display": display}
    for left, right, display in (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False))
]
GRAMMAR_KIND, MODELS, THINKS, EFFORT = map(
    [each.name for each in fields(Settings)].index, ("grammar_kind", "models", "thinks", "effort")
)
PLACEHOLDER = "Ask the model something"
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Short events need no queue.
AT_ONCE: dict[str, Any] = {"queue": False, **QUIET}
# An edited question with files is reported once for each of them. By default, Gradio would drop the event that follows
# the text's report while the one that follows a file's report is running, and the answer would never be shown.
EACH: dict[str, Any] = {"trigger_mode": "multiple"}
# A question that is asked while the page opens must come after what opening fills, which would take its answer away.
WAIT_UNTIL_OPEN = """async (...inputs) => {
while (!globalThis.isChatOpen) await new Promise((resume) => setTimeout(resume, 20));
return inputs;
}"""
# The message that was entered first, in place of the text box, where the next one is typed.
READ_ENTERED = "(typed, ...inputs) => [outbox.read(), ...inputs]"
# Gradio shows a file as an icon: its name goes beside it.
NAME_FILES = """({ files = [] } = {}) => setTimeout(() => {
for (const [at, chip] of document.querySelectorAll("#composer .thumbnail-item").entries()) {
  chip.dataset.name = files[at]?.orig_name || files[at]?.path?.split("/").at(-1) || "";
  chip.parentElement.setAttribute("aria-label", chip.dataset.name);
}
})"""
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


class ChatTab(ChatRun):
    """One chat on one engine; the page's state is which chat and which version of it the page shows."""

    def __init__(
        self, engine: Engine, store: Store, defaults: Settings | None = None,
        interval_s: float = UPDATE_INTERVAL_S, pool: ModelPool | None = None,
    ) -> None:
        super().__init__(engine, store, interval_s, pool)
        self.defaults = defaults or Settings()

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
        with gr.Sidebar(position="right", open=False, width=320, elem_id="settings"):
            self.settings = settings = build_settings(self.defaults, self.models.has_choice)
            # Never displayed; they carry the browser's storage into the event.
            kept = gr.HTML({}, html_template="", apply_default_css=False, elem_id="kept-settings")
            current = gr.HTML("", html_template="", apply_default_css=False, elem_id="kept-chat")
        answering: Any = settings[MODELS]
        answering.focus(self.offer_models, None, answering, **AT_ONCE)
        thinks: Any = settings[THINKS]
        self.choosing, self.thinking = [answering, thinks], [thinks, settings[EFFORT]]
        gr.on([answering.change, thinks.change], self.offer_thinking, self.choosing, self.thinking, **AT_ONCE)
        answering.change(self.welcome, answering, self.chatbot, **AT_ONCE)
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
            self.restore, [self.thread, self.turn, kept, current], [*opened[:8], kept],
            js=read_kept("readSettings", "readCurrent"), **AT_ONCE,
        )
        untouched = keep_touched(list(asdict(self.defaults).values()))
        opening.then(None, [kept, *settings], settings, js=untouched, **AT_ONCE)
        opening.then(None, js="() => { globalThis.isChatOpen = true; }", **AT_ONCE)
        opening.then(self.offer_thinking, self.choosing, self.thinking, **AT_ONCE)
        self._go_on(opening)

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

    async def restore(
        self, thread: Thread | None, turn: Turn | None, kept: Any, chat_id: str | None, request: gr.Request
    ) -> tuple[Any, ...]:
        """Open the chat that this tab had open, the latest in a new tab; in place of the settings, list their updates.

        A question that was asked, or a chat that was opened, before this event, stays.
        """
        owner = find_owner(request)
        more = {"where": describe_keeping(self.store, owner)}
        notes = [more["where"]] if owner.startswith(objects.GUEST) else self.store.notes
        more |= {"problem": " ".join(notes)} if notes else {}
        if thread is not None:
            opened, updates = await self._restore_settings(self._skip_opened()[:8], kept)
            return *opened, {"updates": updates}
        if chat_id is None:
            listed = await self.store.run(chats.list_chats, owner)
            chat_id = listed[0]["id"] if listed else None
        *opened, settings = await self._open(request, chat_id, more)
        opened, updates = await self._restore_settings(opened, settings or kept)
        return *opened, {"updates": updates}

    async def offer_models(self) -> Any:
        """Offer the models that are here now: one may have been fetched since the page was opened."""
        return gr.update(choices=[(name, name) for name in await self.models.list_here()])

    async def welcome(self, names: list[str]) -> Any:
        """Say in the empty chat which models answer."""
        text, examples = welcome(self.models, names)
        return gr.update(placeholder=text, examples=[{"text": example} for example in examples])

    async def offer_thinking(self, names: list[str], thinks: bool) -> tuple[Any, Any]:
        """Show the settings of reasoning that the chosen models take; one that is not loaded is not asked."""
        choices = ThinkingChoices()
        for name in names or [self.engine.model_name]:
            engine = self.models.find(name)
            choices |= ThinkingChoices() if engine is None else await self.find_choices(engine)
        return show_thinking(choices, thinks)

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
        names = await self.models.list_here()
        *before, listed, _, _, _ = opened
        if note := name_gone(kept, names):
            listed = listed if "id" in listed else report_problem("")
            listed |= {"problem": f"{listed.get('problem', '')} {note}".strip()}
        return [*before, listed, *opened[5:]], restore_settings(self.defaults, kept, names)

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

    def _connect_turns(self) -> None:
        chatbot, textbox, turn = self.chatbot, self.textbox, self.turn
        begun = [chatbot, textbox, self.growing, self.thread, turn, self.chats]
        asked = [self.thread, turn, *self.settings]
        sent = self.outbox.send(
            self.send_entered, [textbox, *asked], [*begun, self.outbox], js=READ_ENTERED, trigger_mode="multiple",
            **AT_ONCE,
        )
        sent.then(None, js="() => outbox.end()", **AT_ONCE)
        self.outbox.take_files(None, textbox, textbox, js="(typed) => outbox.takeFiles(typed)", **AT_ONCE)
        self.outbox.give_back(None, textbox, textbox, js="(typed) => outbox.giveBack(typed)", **AT_ONCE)
        for begin in (
            sent,
            chatbot.example_select(self.send_example, asked, begun, js=WAIT_UNTIL_OPEN, **AT_ONCE),
            chatbot.retry(self.retry, asked, begun, **AT_ONCE),
            chatbot.edit(self.edit, [chatbot, *asked], begun, **EACH, **AT_ONCE),
            self.branches.go_on(self.go_on, asked, begun, **AT_ONCE),
        ):
            self._finish(begin.then(self.watch, turn, self.growing, **EACH, **QUIET))
        textbox.change(None, textbox, None, js=NAME_FILES, **AT_ONCE)
        textbox.stop(self.stop, turn, None, **AT_ONCE)
        self.branches.behind(self.slow_down, turn, None, **AT_ONCE)

    def _connect_history(self, opened: list[gr.components.Component]) -> None:
        thread, turn, chats = self.thread, self.turn, self.chats
        taken_back = [self.chatbot, self.textbox, thread, self.branches, self.tokens, chats]
        self.chatbot.undo(self.undo, [thread, turn], taken_back, **AT_ONCE)
        self._go_on(chats.pick(self.pick, turn, opened, **AT_ONCE))
        chats.fresh(self.fresh, turn, opened, **AT_ONCE)
        chats.drop(self.drop, [thread, turn], opened, **AT_ONCE)
        self._go_on(chats.bring(self.bring, [thread, turn], opened, **AT_ONCE))
        chats.rename(self.rename, thread, opened, **AT_ONCE)
        chats.search(self.search, thread, opened, **AT_ONCE)
        chats.export(self.export, None, opened, **AT_ONCE)
        self.branches.turn(self.switch, [thread, turn], opened[:5], **AT_ONCE)

    def _go_on(self, opening: Any) -> None:
        """Watch the answer of a chat that was opened while it is generated."""
        self._finish(opening.then(self.watch, self.turn, self.growing, **QUIET))

    def _finish(self, watching: Any) -> None:
        # Not the turn, because another one may have begun meanwhile.
        shown = [self.chatbot, self.textbox, self.growing, self.tokens]
        ended = [*shown, self.thread, self.branches, self.chats]
        ending = watching.then(self.end, self.turn, ended, **EACH, **AT_ONCE)
        if self.models.has_choice:  # the answer may have loaded its model
            ending.then(self.offer_thinking, self.choosing, self.thinking, **AT_ONCE)


def show_chip(kind: str) -> str:
    """Return the note that a grammar shapes the answers, with a button that ends it; "" without one."""
    if kind == "none":
        return ""
    return (
        f"<p>Answers follow a {html.escape(kind)}{' grammar' if kind in ('regex', 'EBNF') else ''}. "
        '<button type="button">Switch it off</button></p>'
    )


def _leave(turn: Turn | None) -> None:
    """Detach the turn, so that its output does not reach the chat that is opened."""
    if turn is not None:
        turn.is_left = True
