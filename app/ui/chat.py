"""The chat tab: layout and handlers. Every handler that answers is one async generator over one engine request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import gradio as gr

from app.ui.conversation import (
    History,
    answer_message,
    describe_output,
    drop_answer,
    error_message,
    figures_message,
    read_text,
    to_model_messages,
    user_message,
)
from app.ui.explain import EXPLAINED, explain
from app.ui.pacing import UPDATE_INTERVAL_S, pace
from app.ui.settings import Settings, build_settings, make_sampling_params
from app.ui.stops import StopKind, Stops
from engine import Engine, InvalidRequest, RequestOutput

PLACEHOLDER = "Ask the model something"

Update = tuple[Any, Any]  # (chatbot, textbox)


class ChatTab:
    """One chat on one engine; the page's state is the history that travels with each event."""

    def __init__(
        self,
        engine: Engine,
        welcome: str,
        examples: list[str],
        defaults: Settings | None = None,
        interval_s: float = UPDATE_INTERVAL_S,
    ) -> None:
        self.defaults = defaults or Settings()
        self.engine = engine
        self.welcome = welcome
        self.examples = examples
        self.interval_s = interval_s
        self.stops = Stops()

    def build(self) -> None:
        """Put the tab's components on the page and connect them."""
        with gr.Column(elem_id="chat", elem_classes="fill"):
            chatbot = gr.Chatbot(
                elem_id="chatbot", show_label=False, container=False, height=None, layout="bubble",
                editable="user", buttons=["copy"], feedback_options=None, placeholder=self.welcome,
                examples=[{"text": text} for text in self.examples], allow_tags=False, scale=1,
            )  # fmt: skip
            textbox = gr.Textbox(
                show_label=False, container=False, placeholder=PLACEHOLDER, lines=1, max_lines=8, autofocus=True,
                elem_id="composer", submit_btn=True, stop_btn=False,
            )  # fmt: skip
        with gr.Sidebar(position="right", open=False, width=320, elem_id="settings"):
            gr.Markdown("#### Generation")
            settings = build_settings(self.defaults)
        self._connect(chatbot, textbox, settings)

    def _connect(
        self, chatbot: gr.Chatbot, textbox: gr.Textbox, settings: list[gr.components.Component]
    ) -> None:
        both = [chatbot, textbox]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        textbox.submit(self.send, [textbox, chatbot, *settings], both, **quiet)
        chatbot.example_select(self.send_example, [chatbot, *settings], both, **quiet)
        chatbot.retry(self.retry, [chatbot, *settings], both, **quiet)
        chatbot.edit(self.edit, [chatbot, *settings], both, **quiet)
        chatbot.undo(self.undo, chatbot, both, queue=False, **quiet)
        textbox.stop(self.stop, None, None, queue=False, **quiet)
        chatbot.clear(self.discard, None, None, queue=False, **quiet)

    async def send(
        self, text: str, history: History, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer what was typed."""
        if not text.strip():
            yield gr.skip(), open_composer()
            return
        async with aclosing(self._answer([*history, user_message(text)], settings, request)) as updates:
            async for update in updates:
                yield update

    async def send_example(
        self, history: History, data: gr.SelectData, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer the example that was clicked."""
        async with aclosing(
            self._answer([*history, user_message(data.value["text"])], settings, request)
        ) as updates:
            async for update in updates:
                yield update

    async def retry(
        self, history: History, data: gr.RetryData, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer the same question again."""
        index = _first_index(data.index)
        async with aclosing(self._answer(drop_answer(history[: index + 1]), settings, request)) as updates:
            async for update in updates:
                yield update

    async def edit(
        self, history: History, data: gr.EditData, request: gr.Request, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        """Answer a question that was changed; what followed it is dropped."""
        kept = [*history[: _first_index(data.index)], user_message(read_text(data.value))]
        async with aclosing(self._answer(kept, settings, request)) as updates:
            async for update in updates:
                yield update

    def undo(self, history: History, data: gr.UndoData) -> Update:
        """Take the last turn back into the text box."""
        index = _first_index(data.index)
        return history[:index], open_composer(value=read_text(history[index]["content"]))

    def stop(self, request: gr.Request) -> None:
        """End the running answer and keep what is there."""
        self.stops.ask(str(request.session_hash))

    def discard(self, request: gr.Request) -> None:
        """End the running answer of a chat that was cleared."""
        self.stops.ask(str(request.session_hash), "discard")

    async def _answer(
        self, history: History, settings: tuple[Any, ...], request: gr.Request
    ) -> AsyncGenerator[Update, None]:
        session = str(request.session_hash)
        yield history, gr.update(value="", submit_btn=False, stop_btn=True)
        shown, last = history, None
        try:
            stream = self._generate(history, Settings(*settings), session)
            with self.stops.running(session):
                # Leaving the block closes the stream, and that aborts the engine's request.
                async with aclosing(stream) as outputs:
                    async for output in outputs:
                        if output is not None:
                            shown, last = [*history, answer_message(output.outputs[0].text)], output
                        if self.stops.asked(session):
                            break
                        # Without news too: Gradio sees a closed tab only when a handler yields.
                        yield shown, gr.skip()
                shown = _conclude(shown, last, self.stops.asked(session))
            yield shown, open_composer()
        except EXPLAINED as error:
            yield [*shown, error_message(explain(error, self.engine.state))], open_composer()

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
        stream = self.engine.generate(prompt_ids, params, cache_salt=f"session-{session}")
        async with aclosing(pace(stream, self.interval_s)) as outputs:
            async for output in outputs:
                yield output


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
