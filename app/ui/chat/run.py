"""Handlers of the chat: a turn begins at once, streams its answer separately, and is added to the history at its end.

begin (send, retry, edit, example) ──▶ Turn ──▶ watch: only the growing messages travel ──▶ close: history, figures
The question is in the store when the turn has begun; the server writes the answer to its end, whatever the page does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.store import Store, StoreError
from app.ui.chat import store as chats
from app.ui.chat.answers import Answer, Answers
from app.ui.chat.attachments import is_image, read_files
from app.ui.chat.branches import Node, find_place, join
from app.ui.chat.conversation import (
    History,
    answer_message,
    is_file,
    lay_out,
    list_image_paths,
    pending_message,
    read_answers,
    read_text,
    take_back,
    user_message,
)
from app.ui.chat.generation import Generation
from app.ui.chat.history import Thread, describe_chats, report_problem
from app.ui.chat.settings import Settings
from app.ui.chat.writing import conclude, inspect, write
from app.ui.explain import explain
from app.ui.model_choice import ModelChoice
from app.ui.owner import find_owner
from engine import Engine, InvalidRequest

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 2.0
REMOVED = "This chat was removed in another tab, so nothing was sent. Begin a new chat."

Begun = tuple[Any, ...]  # chatbot, composer, growing, thread, turn, chats
Closed = tuple[Any, ...]  # chatbot, composer, growing, tokens


@dataclass(slots=True)
class Turn:
    """One question and the answer to it, as one page shows them.

    Attributes:
        history: the messages up to and with the question.
        num_shown: how many of them are already in the page's history; the others are shown with the answer.
        thread: the chat and its version, even if the page shows another one at the end.
        is_left: the page now shows another chat, or went back to before this turn.
        is_watched: an event is showing the answer while it grows.
        is_shown: the answer is in the history that was sent to the page.
        pause_s: seconds between updates of a page that draws slower than the answer grows.
    """

    history: History
    num_shown: int
    thread: Thread
    answer: Answer
    is_left: bool = False
    is_watched: bool = False
    is_shown: bool = False
    pause_s: float = 0.0

    @property
    def growing(self) -> History:
        """Return the messages after the history: the question, if it is new, and the answer so far."""
        written = write(self.answer) or [answer_message(self.answer.waits_for)]
        return lay_out([*self.history[self.num_shown :], *written])


class ChatRun:
    """The handlers of one chat. Those that begin a turn end in: thread, turn, settings.

    Args:
        pool: further models that may answer.
    """

    def __init__(self, engine: Engine, store: Store, interval_s: float, pool: ModelPool | None = None) -> None:
        self.engine = engine
        self.models = ModelChoice(engine, pool)
        self.store = store
        self.generation = Generation(self.models, interval_s)
        self.answers = Answers(engine)

    async def send(self, typed: Mapping[str, Any], request: gr.Request, *rest: Any) -> Begun:
        """Begin a turn with the typed text and attachments; do nothing while another turn runs.

        A file that cannot be read or does not fit the model is explained before anything is stored, and the text box
        keeps it.
        """
        thread, running, *values = rest
        if is_running(running):
            return _refuse()
        text = typed.get("text") or ""
        files = typed.get("files") or []
        images = [path for path in files if is_image(path)]
        try:
            attached = await read_files(path for path in files if path not in images)
            whole = "".join([text, *(each["content"] for each in attached)])
            for name in self._name_models(Settings(*values)):
                if (engine := self.models.find(name)) is not None:  # another one is asked when it is loaded
                    await self._check_fit(engine, whole, images)
        except InvalidRequest as error:
            return _report(f"Not sent. {explain(error, self.engine.state)}")
        if not text.strip() and not files:
            return tuple(gr.skip() for _ in range(6))
        return await self._ask([user_message(text.strip(), images), *attached], thread, running, request, values)

    async def send_example(self, data: gr.SelectData, request: gr.Request, *rest: Any) -> Begun:
        """Begin a turn with the clicked example; do nothing while another turn runs."""
        thread, running, *values = rest
        if is_running(running):
            return _refuse()
        return await self._ask([user_message(data.value["text"])], thread, running, request, values)

    async def retry(self, data: gr.EventData, request: gr.Request, *rest: Any) -> Begun:
        """Ask the question of a turn again, as another version of its answer. Does nothing while another turn runs."""
        thread, running, *values = rest
        if is_running(running):
            return _refuse()
        path = await self._read_path(request, thread)
        if path is None:
            return _report(REMOVED)
        places = [place for place, node in enumerate(path) if node.is_question]
        asked = path[: places[int(data._data["turn"]) - 1] + 1]
        return await self._begin_again(asked, [], thread, request, values)

    async def go_on(self, request: gr.Request, *rest: Any) -> Begun:
        """Go on with an answer that was cut off, as another version of it. Does nothing while another turn runs."""
        thread, running, *values = rest
        if is_running(running):
            return _refuse()
        path = await self._read_path(request, thread)
        if not path:
            return _report(REMOVED)
        *path, last = path
        written, names = read_answers(last.messages), self._name_models(Settings(*values))
        before = {name: written.get(name) or written.get("") or ("", "") for name in names}
        answer = Answer(names=names, before=before)
        if (known := self.answers.find(last.id)) is not None:
            answer.starts, answer.thinking = known.make_starts(), dict(known.thinking)
        return await self._begin_again(path, [], thread, request, values, answer)

    async def edit(self, history: History, data: gr.EditData, request: gr.Request, *rest: Any) -> Begun:
        """Ask an edited question and keep the old one as another version. Does nothing while another turn runs."""
        index = first_index(data.index)
        thread, running, *values = rest
        if is_file(history[index]):  # Gradio reports each message of the bubble
            return tuple(gr.skip() for _ in range(6))
        images = list_image_paths(history[index]["content"])
        if is_running(running):
            # The page already has the new text, and gets the old one back.
            before = user_message(read_text(data.previous_value), images)
            return _refuse([*history[:index], before, *history[index + 1 :]])
        path = await self._read_path(request, thread)
        if path is None:
            return _report(REMOVED)
        place = find_place(path, index)
        before, *files = path[place].messages
        text = take_back(read_text(data.value), read_text(before["content"]))
        return await self._begin_again(path[:place], [user_message(text, images), *files], thread, request, values)

    async def stop(self, turn: Turn | None) -> None:
        """End the running answer and keep its text."""
        if turn is not None:
            turn.answer.stop()

    async def slow_down(self, turn: Turn | None) -> None:
        """Send fewer updates to a page that is behind; each has all of the answer so far."""
        if turn is not None:
            turn.pause_s = min(2 * turn.pause_s + FIRST_PAUSE_S, MAX_PAUSE_S)

    async def watch(self, turn: Turn | None) -> AsyncGenerator[History, None]:
        """Show the answer. Only the growing messages are sent, because the whole history would be redrawn."""
        if turn is None or turn.is_watched or turn.is_shown:
            yield gr.skip()
            return
        turn.is_watched = True
        try:
            yield turn.growing
            async with aclosing(turn.answer.watch()) as changes:
                async for _ in changes:
                    if turn.is_left:
                        break
                    yield turn.growing
                    await turn.answer.rest(turn.pause_s)
            yield gr.skip()
        finally:
            turn.is_watched = False

    def close(self, turn: Turn | None) -> Closed:
        """Add the turn to the history, with its figures or its error."""
        if is_running(turn):
            return tuple(gr.skip() for _ in range(4))
        if turn is None or turn.is_left or turn.is_shown:
            # A question may be asked while this event runs: its composer stays. An update that was on its way when
            # the turn was shown goes.
            return gr.skip(), gr.skip(), [], gr.skip()
        turn.is_shown = True
        history = lay_out([*turn.history, *conclude(turn.answer)])
        return history, open_composer(), [], inspect(history, turn.answer)

    async def _ask(
        self, question: History, thread: Thread | None, last: Turn | None, request: gr.Request, values: Sequence[Any]
    ) -> Begun:
        path = await self._read_path(request, thread)
        if path is None:
            return _report(REMOVED)
        # The end of the turn before may not have reached the page.
        is_missed = last is not None and not (last.is_left or last.is_shown)
        num_shown = last.num_shown if last is not None and is_missed else len(join(path))
        return await self._begin(path, question, num_shown, thread, request, values)

    async def _begin_again(
        self, path: list[Node], question: History, thread: Thread | None, request: gr.Request, values: Sequence[Any],
        answer: Answer | None = None,
    ) -> Begun:
        """Begin a turn in the place of an earlier one: the page gets the history up to the question."""
        asked = [*join(path), *question]
        begun = await self._begin(path, question, len(asked), thread, request, values, answer)
        return (lay_out(asked), *begun[1:]) if isinstance(begun[4], Turn) else begun

    async def _begin(
        self, path: Sequence[Node], question: History, num_shown: int, thread: Thread | None,
        request: gr.Request, values: Sequence[Any], answer: Answer | None = None,
    ) -> Begun:
        settings, owner = Settings(*values), find_owner(request)
        answer = answer or Answer(names=self._name_models(settings))
        chat_id = thread["id"] if thread is not None else chats.make_id()
        nodes = [Node(chats.make_id(), path[-1].id if path else None, question)] if question else []
        before = [*path, *nodes][-1].id
        pending = [answer_message(""), pending_message(answer.answer_id)]
        nodes.append(Node(answer.answer_id, before, pending))
        try:
            await self.store.run(chats.begin_turn, owner, chat_id, asdict(settings), nodes)
        except StoreError as error:
            return _report(f"Not sent: {error}.")

        def save() -> Any:
            messages = conclude(answer) if answer.is_over else [*write(answer), pending[1]]
            return self.store.start(chats.put_node, owner, chat_id, Node(answer.answer_id, before, messages))

        answer.write = save
        asked = [*join(path), *question]
        self.answers.begin(answer, self.generation.generate(answer, asked, settings, str(request.session_hash)))
        turn = Turn(asked, num_shown, {"id": chat_id, "leaf": answer.answer_id}, answer)
        busy = gr.update(submit_btn=False, stop_btn=True)
        listed = describe_chats(await self.store.run(chats.list_chats, owner), turn.thread)
        return gr.skip(), busy, turn.growing, turn.thread, turn, listed

    def _name_models(self, settings: Settings) -> list[str]:
        return settings.models or [self.engine.model_name]

    async def _read_path(self, request: gr.Request, thread: Thread | None) -> list[Node] | None:
        """Return what the page shows, as the store has it; None if another tab has removed it."""
        if thread is None or thread["leaf"] is None:
            return []
        found = await self.store.run(chats.read_chat, find_owner(request), thread["id"])
        return None if found is None else found[1].find_path(thread["leaf"]) or None

    async def _check_fit(self, engine: Engine, text: str, images: Sequence[str]) -> None:
        """Raise InvalidRequest if the model sees no images, or takes no text of this length."""
        if images and not engine.sees_images:
            name = Path(images[0]).name
            raise InvalidRequest(f"{name} is an image, and {engine.model_name} sees none", "attachment")
        if engine.tokenizer is None:
            return
        num_tokens, limit = len(await engine.encode(text)), engine.resolved.max_model_len
        if num_tokens >= limit:
            why = f"the message and its files have {num_tokens:,} tokens, and the model takes {limit:,} with the answer"
            raise InvalidRequest(why, "message")


def is_running(turn: Turn | None) -> bool:
    """Return whether the page shows a turn whose answer has not ended."""
    return turn is not None and not (turn.is_left or turn.answer.is_over)


def open_composer(**more: Any) -> Any:
    """Enable the text box for the next message."""
    return gr.update(submit_btn=True, stop_btn=False, **more)


def _refuse(chatbot: Any = None) -> Begun:
    """Begin nothing, because another turn runs; `chatbot` restores what the page has already changed."""
    return chatbot or gr.skip(), *(gr.skip() for _ in range(5))


def _report(problem: str) -> Begun:
    """Begin nothing, and show why."""
    return *(gr.skip() for _ in range(5)), report_problem(problem)


def first_index(index: int | tuple[int, int]) -> int:
    return index[0] if isinstance(index, tuple | list) else index
