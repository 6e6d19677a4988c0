"""What the chat does: every handler that answers is one async generator over one engine request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import gradio as gr

from app.ui.attachments import add_attachments
from app.ui.branches import Thread, fork
from app.ui.chat_history import NO_TOKENS, make_thread
from app.ui.conversation import (
    History,
    answer_message,
    answer_messages,
    describe_output,
    drop_answer,
    error_message,
    figures_message,
    read_text,
    to_model_messages,
    user_message,
)
from app.ui.explain import EXPLAINED, explain
from app.ui.observatory.trace import describe_position
from app.ui.pacing import pace
from app.ui.settings import Settings, make_sampling_params
from app.ui.stops import StopKind, Stops
from engine import Engine, InvalidRequest, RequestOutput

# From that many messages on only the growing text is sent: Gradio would send, and draw, the whole history each time.
LONG_HISTORY = 30
WAITING = "…"
# A longer answer is shown without its tokens: thousands of them help nobody.
MAX_INSPECTED = 1024

Update = tuple[Any, Any, Any, Any, Any]  # chatbot, composer, tokens, thread, live text


class ChatRun:
    """The handlers of one chat on one engine."""

    def __init__(self, engine: Engine, interval_s: float) -> None:
        self.engine = engine
        self.interval_s = interval_s
        self.stops = Stops()

    async def send(
        self, typed: Mapping[str, Any], history: History, thread: Thread, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer what was typed and attached."""
        try:
            text = add_attachments(typed.get("text") or "", typed.get("files") or [])
        except InvalidRequest as error:
            problem = error_message(explain(error, self.engine.state))
            yield (
                [*history, user_message(typed.get("text") or ""), problem],
                open_composer(value=None),
                gr.skip(),
                thread,
                gr.skip(),
            )
            return
        if not text:
            yield gr.skip(), open_composer(), gr.skip(), gr.skip(), gr.skip()
            return
        async with aclosing(
            self._answer([*history, user_message(text)], thread, settings, request)
        ) as updates:
            async for update in updates:
                yield update

    async def send_example(
        self, history: History, thread: Thread, data: gr.SelectData, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer the example that was clicked."""
        asked = [*history, user_message(data.value["text"])]
        async with aclosing(self._answer(asked, thread, settings, request)) as updates:
            async for update in updates:
                yield update

    async def retry(
        self, history: History, thread: Thread, data: gr.RetryData, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer the same question again; the answer before stays as another version."""
        asked = drop_answer(history[: _first_index(data.index) + 1])
        forked = fork(thread or make_thread(), history, len(asked))
        async with aclosing(self._answer(asked, forked, settings, request)) as updates:
            async for update in updates:
                yield update

    async def edit(
        self, history: History, thread: Thread, data: gr.EditData, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer a question that was changed; what stood there stays as another version."""
        index = _first_index(data.index)
        # The page has the new words in place already; the version before must have the old ones.
        before = [*history[:index], user_message(read_text(data.previous_value)), *history[index + 1 :]]
        forked = fork(thread or make_thread(), before, index)
        asked = [*history[:index], user_message(read_text(data.value))]
        async with aclosing(self._answer(asked, forked, settings, request)) as updates:
            async for update in updates:
                yield update

    def undo(self, history: History, data: gr.UndoData) -> tuple[History, Any]:
        """Take the last turn back into the text box."""
        index = _first_index(data.index)
        text = read_text(history[index]["content"])
        return history[:index], open_composer(value={"text": text, "files": []})

    def stop(self, request: gr.Request) -> None:
        """End the running answer and keep what is there."""
        self.stops.ask(str(request.session_hash))

    def discard(self, request: gr.Request) -> None:
        """End the running answer of a chat that was cleared."""
        self.stops.ask(str(request.session_hash), "discard")

    def leave(self, request: gr.Request) -> None:
        """End the running answer of a chat that is no longer shown, and write nothing more of it."""
        self.stops.ask(str(request.session_hash), "leave")

    async def _answer(
        self, history: History, thread: Thread, settings: tuple[Any, ...], request: gr.Request
    ) -> AsyncGenerator[Update, None]:
        session = str(request.session_hash)
        busy = gr.update(value=None, submit_btn=False, stop_btn=True)
        is_long = len(history) >= LONG_HISTORY
        yield [*history, answer_message(WAITING)] if is_long else history, busy, NO_TOKENS, thread, ""
        shown, last = history, None
        try:
            stream = self._generate(history, Settings(*settings), session)
            with self.stops.running(session):
                # Leaving the block closes the stream, and that aborts the engine's request.
                async with aclosing(stream) as outputs:
                    async for output in outputs:
                        if output is not None:
                            shown, last = [*history, *answer_messages(output.outputs[0].text)], output
                        if self.stops.asked(session):
                            break
                        # Without news too: Gradio sees a closed tab only when a handler yields.
                        yield _grow(shown, last, is_long)
                if (asked := self.stops.asked(session)) == "leave":
                    yield gr.skip(), open_composer(), gr.skip(), gr.skip(), ""
                    return
                shown = _conclude(shown, last, asked)
            yield shown, open_composer(), describe_tokens(last), thread, ""
        except EXPLAINED as error:
            problem = error_message(explain(error, self.engine.state))
            yield [*shown, problem], open_composer(), gr.skip(), thread, ""

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


def describe_tokens(output: RequestOutput | None) -> dict[str, Any]:
    """Every token of an answer with its probability and its rivals, where they were recorded."""
    if output is None or not output.outputs[0].logprobs:
        return NO_TOKENS
    positions = output.outputs[0].logprobs[:MAX_INSPECTED]
    return {"steps": [describe_position(position) | {"is_forced": False} for position in positions]}


def _grow(history: History, output: RequestOutput | None, is_long: bool) -> Update:
    """What is sent while an answer is written: the history, or of a long one the new text alone."""
    rest = (gr.skip(), gr.skip(), gr.skip())
    if not is_long:
        return history, *rest, gr.skip()
    return gr.skip(), *rest, output.outputs[0].text if output is not None else gr.skip()


def _conclude(history: History, output: RequestOutput | None, stop: StopKind | None) -> History:
    """The history with the figures of the answer that just ended."""
    if stop == "discard":
        return []
    if output is None:
        return [*history, answer_message(""), figures_message("stopped")]
    figures = describe_output(output)
    return [*history, figures_message(figures if output.finished else f"{figures} · stopped")]


def open_composer(**more: Any) -> Any:
    """The text box ready for the next message."""
    return gr.update(submit_btn=True, stop_btn=False, **more)


def _first_index(index: int | tuple[int, int]) -> int:
    return index[0] if isinstance(index, tuple | list) else index
