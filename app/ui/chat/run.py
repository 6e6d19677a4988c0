"""What the chat does: a turn begins at once, grows as one stream of its own, and ends in the history.

begin (send, retry, edit, example) ──▶ Turn ──▶ answer: only the growing messages travel ──▶ close: history, figures
the browser keeps the question from the beginning, and the answer once it is closed
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import gradio as gr

from app.ui.chat.attachments import add_attachments
from app.ui.chat.branches import Thread, fork
from app.ui.chat.conversation import (
    History,
    answer_message,
    answer_messages,
    drop_answer,
    error_message,
    figures_message,
    read_text,
    to_model_messages,
    user_message,
)
from app.ui.chat.history import describe_tokens, keep_chat, make_thread
from app.ui.chat.settings import Settings, make_sampling_params
from app.ui.chat.store import make_chat_id
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.figures import describe_output
from app.ui.observatory.trace import describe_position
from app.ui.pacing import pace
from app.ui.stops import StopKind, Stops
from engine import Engine, InvalidRequest, RequestOutput

WAITING = "…"
# Number of an answer's first tokens that can be inspected.
MAX_INSPECTED = 1024

Begun = tuple[Any, ...]  # chatbot, composer, growing, thread, turn, chats
Closed = tuple[Any, ...]  # chatbot, composer, growing, tokens, turn


@dataclass(slots=True)
class Turn:
    """One question and the answer that is written to it; the session's state while it runs."""

    history: History  # up to and with the question
    num_shown: int  # messages that the page has in its history already; the others are shown with the answer
    thread: Thread  # the chat and its version, whatever the page shows by the end
    turn_id: str = field(default_factory=make_chat_id)
    answer: History = field(default_factory=list)
    output: RequestOutput | None = None
    problem: Explanation | None = None
    asked: StopKind | None = None
    phase: Literal["new", "running", "over"] = "new"

    @property
    def growing(self) -> History:
        """What stands under the history: the question, if it is new, and the answer so far."""
        return [*self.history[self.num_shown :], *self.answer]


class ChatRun:
    """The handlers of one chat on one engine."""

    def __init__(self, engine: Engine, interval_s: float) -> None:
        self.engine = engine
        self.interval_s = interval_s
        self.stops = Stops()

    async def send(
        self, typed: Mapping[str, Any], history: History, thread: Thread | None, running: Turn | None
    ) -> Begun:
        """Begin a turn with what was typed and attached; nothing while another one runs."""
        if is_running(running):
            return _begin_nothing()
        text, problem = typed.get("text") or "", None
        try:
            text = await add_attachments(text, typed.get("files") or [])
        except InvalidRequest as error:
            problem = explain(error, self.engine.state)
        if not text and problem is None:
            return (*(gr.skip() for _ in range(4)), None, gr.skip())
        turn = Turn([*history, user_message(text)], len(history), thread or make_thread(), problem=problem)
        return _begin(gr.skip(), turn)

    def send_example(
        self, history: History, thread: Thread | None, running: Turn | None, data: gr.SelectData
    ) -> Begun:
        """Begin a turn with the example that was clicked; nothing while another one runs."""
        if is_running(running):
            return _begin_nothing()
        turn = Turn([*history, user_message(data.value["text"])], len(history), thread or make_thread())
        return _begin(gr.skip(), turn)

    def retry(
        self, history: History, thread: Thread | None, running: Turn | None, data: gr.RetryData
    ) -> Begun:
        """Ask the same question again; the answer before stays as another version. Nothing while another turn runs."""
        if is_running(running):
            return _begin_nothing()
        asked = drop_answer(history[: first_index(data.index) + 1])
        return _begin(asked, Turn(asked, len(asked), fork(thread or make_thread(), history, len(asked))))

    def edit(self, history: History, thread: Thread | None, running: Turn | None, data: gr.EditData) -> Begun:
        """Ask a changed question; what stood there stays as another version. Nothing while another turn runs."""
        index = first_index(data.index)
        # The page has the new words in place already; the version before must have the old ones.
        before = [*history[:index], user_message(read_text(data.previous_value)), *history[index + 1 :]]
        if is_running(running):
            return _begin_nothing(before)
        asked = [*history[:index], user_message(read_text(data.value))]
        return _begin(asked, Turn(asked, len(asked), fork(thread or make_thread(), before, index)))

    def stop(self, turn: Turn | None) -> None:
        """End the running answer and keep what is there."""
        if turn is not None:
            turn.asked = "keep"

    def leave(self, turn: Turn | None) -> None:
        """End the running answer of a chat that is no longer shown, and write nothing more of it."""
        if turn is not None:
            turn.asked = "leave"

    def leave_removed(self, turn: Turn | None, data: gr.EventData) -> None:
        """The same when it is the chat that was removed; of another one nothing ends."""
        if turn is not None and turn.thread["id"] == str(data._data.get("id")):
            self.leave(turn)

    async def answer(
        self, turn: Turn | None, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[History, None]:
        """Write the answer. Nothing but the growing messages is sent: the history would be sent, and drawn, whole."""
        if turn is None or turn.phase != "new":
            if is_running(turn):
                # Here and not where it was refused: Gradio shows no notice of an event without its queue.
                gr.Info("An answer is still being written. Stop it first.")
            yield gr.skip()
            return
        turn.phase = "running"
        try:
            if turn.problem is None:
                async with aclosing(self._write(turn, request, Settings(*settings))) as updates:
                    async for growing in updates:
                        yield growing
        except EXPLAINED as error:
            turn.problem = explain(error, self.engine.state)
        finally:
            turn.phase = "over"
        yield gr.skip()

    def close(self, turn: Turn | None) -> Closed:
        """Put the turn into the history, with its figures or what went wrong."""
        if turn is not None and turn.phase == "running":
            return tuple(gr.skip() for _ in range(5))
        if turn is None or turn.asked == "leave":
            return gr.skip(), open_composer(), [], gr.skip(), None
        history = conclude(turn)
        return history, open_composer(), [], inspect(history, turn), None

    async def _write(
        self, turn: Turn, request: gr.Request, settings: Settings
    ) -> AsyncGenerator[History, None]:
        turn.answer = [answer_message(WAITING)]
        yield turn.growing
        session = str(request.session_hash)
        with self.stops.running(session) as flag:
            # Leaving the block closes the stream, and that aborts the engine's request.
            async with aclosing(self._generate(turn.history, settings, session)) as outputs:
                async for output in outputs:
                    if output is not None:
                        turn.output, turn.answer = output, answer_messages(output.outputs[0].text)
                    if turn.asked or flag.asked:
                        return
                    # Without news too: Gradio sees a closed tab only when a handler yields.
                    yield turn.growing

    async def _generate(
        self, history: History, settings: Settings, session: str
    ) -> AsyncGenerator[RequestOutput | None, None]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer and has no chat")
        messages = to_model_messages(history, settings.system_prompt)
        if tokenizer.has_chat_template:
            prompt_ids = await self.engine.render_chat(messages)
        else:
            prompt_ids = await self.engine.encode("\n\n".join(m["content"] for m in messages) + "\n\n")
        params = make_sampling_params(settings, len(prompt_ids), self.engine.resolved.max_model_len)
        # Its own salt: what one person wrote never shows in another's cache timings.
        stream = self.engine.generate(
            prompt_ids, params, cache_salt=f"session-{session}", priority=int(settings.priority)
        )
        async with aclosing(pace(stream, self.interval_s)) as outputs:
            async for output in outputs:
                yield output


def is_running(turn: Turn | None) -> bool:
    """Whether a turn has begun and its answer has not ended."""
    return turn is not None and turn.phase != "over"


def conclude(turn: Turn) -> History:
    """The history with what became of the turn."""
    output = turn.output
    if turn.problem is not None:
        half = turn.answer if output is not None else []
        return [*turn.history, *half, error_message(turn.problem)]
    if output is None:
        return [*turn.history, answer_message(""), figures_message("stopped", turn.turn_id)]
    figures = describe_output(output)
    line = figures if output.finished else f"{figures} · stopped"
    return [*turn.history, *turn.answer, figures_message(line, turn.turn_id)]


def inspect(history: History, turn: Turn) -> dict[str, Any]:
    """Every token of the new answer with its probability and its rivals, where they were recorded.

    As text: through lists and dictionaries Gradio walks on the event loop, 70 ms for a thousand tokens.
    """
    shown = describe_tokens(history)
    if turn.output is None or not turn.output.outputs[0].logprobs:
        return shown
    positions = turn.output.outputs[0].logprobs[:MAX_INSPECTED]
    steps = [describe_position(position) | {"is_forced": False} for position in positions]
    return shown | {"id": turn.turn_id, "steps": json.dumps(steps, ensure_ascii=False)}


def open_composer(**more: Any) -> Any:
    """The text box ready for the next message."""
    return gr.update(submit_btn=True, stop_btn=False, **more)


def _begin_nothing(chatbot: Any = None) -> Begun:
    """Another turn runs: all stays as it is, but for what the page has changed in the history already."""
    return chatbot or gr.skip(), *(gr.skip() for _ in range(5))


def _begin(chatbot: Any, turn: Turn) -> Begun:
    busy = gr.update(value=None, submit_btn=False, stop_btn=True)
    # Kept as if it were stopped: who leaves the chat, or the page, before the answer ends finds the question again.
    kept = keep_chat(None, turn.thread, conclude(turn))
    return chatbot, busy, turn.growing, turn.thread, turn, kept


def first_index(index: int | tuple[int, int]) -> int:
    return index[0] if isinstance(index, tuple | list) else index
