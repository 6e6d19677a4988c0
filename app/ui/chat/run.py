"""Handlers of the chat: a turn begins at once, streams its answer separately, and is added to the history at its end.

begin (send, retry, edit, example) ──▶ Turn ──▶ watch: only the growing messages travel ──▶ close: history, figures
The server writes the answer to its end, whatever the page does. The browser keeps the question from the beginning, what
it has shown of the answer, and the whole answer once the turn is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import gradio as gr

from app.reasoning import gate_grammar, prepare_prompt, supports_reasoning
from app.ui.chat.answers import Answer, Answers
from app.ui.chat.attachments import add_attachments, is_image, load_images
from app.ui.chat.branches import Thread, fork
from app.ui.chat.conversation import (
    History,
    answer_message,
    answer_messages,
    drop_answer,
    error_message,
    figures_message,
    list_image_paths,
    pending_message,
    read_pending,
    read_text,
    to_model_messages,
    user_message,
)
from app.ui.chat.history import describe_tokens, keep_chat, make_thread, report_problem
from app.ui.chat.settings import Settings, make_sampling_params
from app.ui.chat.side_by_side import join_streams
from app.ui.explain import explain
from app.ui.figures import describe_output, describe_position
from app.ui.pacing import pace
from engine import Engine, InvalidRequest, LoRARequest, RequestOutput

WAITING = "…"
# Number of an answer's first tokens that can be inspected.
MAX_INSPECTED = 1024

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
        has_refused: another turn was refused meanwhile, and the page has no notice of it yet.
    """

    history: History
    num_shown: int
    thread: Thread
    answer: Answer
    is_left: bool = False
    is_watched: bool = False
    is_shown: bool = False
    has_refused: bool = False

    @property
    def written(self) -> History:
        """Return the answer so far."""
        output = self.answer.output
        if output is None:
            return [answer_message(WAITING)]
        return answer_messages(output.outputs[0].text, self.answer.thinking)

    @property
    def growing(self) -> History:
        """Return the messages after the history: the question, if it is new, and the answer so far."""
        return [*self.history[self.num_shown :], *self.written]


class ChatRun:
    """The handlers of one chat on one engine. Those that begin a turn end in: thread, turn, settings, open chat."""

    def __init__(self, engine: Engine, interval_s: float) -> None:
        self.engine = engine
        self.interval_s = interval_s
        self.answers = Answers(engine)

    @cached_property
    def knows_reasoning(self) -> bool:
        """Return whether the model's chat template supports reasoning."""
        return self.engine.tokenizer is not None and supports_reasoning(self.engine.tokenizer.apply_chat_template)

    async def send(
        self, typed: Mapping[str, Any], history: History, request: gr.Request, *rest: Any
    ) -> Begun:
        """Begin a turn with the typed text and attachments; do nothing while another turn runs.

        A file that cannot be read or does not fit the model is explained before anything is stored, and the text box
        keeps it.
        """
        thread, running, *others = rest
        if is_running(running):
            return _refuse(running)
        text = typed.get("text") or ""
        files = typed.get("files") or []
        images = [path for path in files if self.engine.sees_images and is_image(path)]
        try:
            text = await add_attachments(text, [path for path in files if path not in images])
            await self._check_length(text)
        except InvalidRequest as error:
            why = f"Not sent. {explain(error, self.engine.state)}"
            return *(gr.skip() for _ in range(5)), report_problem(others[-1], why)
        if not text and not images:
            return tuple(gr.skip() for _ in range(6))
        asked = [*add_missed(history, running), user_message(text, images)]
        return self._begin(asked, len(history), thread, request, others)

    async def send_example(
        self, history: History, data: gr.SelectData, request: gr.Request, *rest: Any
    ) -> Begun:
        """Begin a turn with the clicked example; do nothing while another turn runs."""
        thread, running, *others = rest
        if is_running(running):
            return _refuse(running)
        asked = [*add_missed(history, running), user_message(data.value["text"])]
        return self._begin(asked, len(history), thread, request, others)

    async def retry(self, history: History, data: gr.RetryData, request: gr.Request, *rest: Any) -> Begun:
        """Ask the same question again and keep the answer as another version. Does nothing while another turn runs."""
        thread, running, *others = rest
        if is_running(running):
            return _refuse(running)
        asked = drop_answer(history[: first_index(data.index) + 1])
        thread = fork(thread or make_thread(), history, len(asked))
        return asked, *self._begin(asked, len(asked), thread, request, others)[1:]

    async def edit(self, history: History, data: gr.EditData, request: gr.Request, *rest: Any) -> Begun:
        """Ask an edited question and keep the old one as another version. Does nothing while another turn runs."""
        index = first_index(data.index)
        # The page already has the new text; the earlier version needs the old one.
        images = list_image_paths(history[index]["content"])
        before = [
            *history[:index],
            user_message(read_text(data.previous_value), images),
            *history[index + 1 :],
        ]
        thread, running, *others = rest
        if is_running(running):
            return _refuse(running, before)
        asked = [*history[:index], user_message(read_text(data.value), images)]
        thread = fork(thread or make_thread(), before, index)
        return asked, *self._begin(asked, len(asked), thread, request, others)[1:]

    async def stop(self, turn: Turn | None) -> None:
        """End the running answer and keep its text."""
        if turn is not None:
            turn.answer.stop()

    async def watch(self, turn: Turn | None) -> AsyncGenerator[History, None]:
        """Show the answer. Only the growing messages are sent, because the whole history would be redrawn."""
        if turn is not None and turn.has_refused and is_running(turn):
            turn.has_refused = False
            # Here, because Gradio shows notices only for events in its queue.
            gr.Info("An answer is still being written. Stop it first.")
        async with aclosing(self.watch_again(turn)) as updates:
            async for growing in updates:
                yield growing

    async def watch_again(self, turn: Turn | None) -> AsyncGenerator[History, None]:
        """As `watch`, for a chat that was opened while its answer is generated."""
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
        history = conclude(turn)
        return history, open_composer(), [], inspect(history, turn)

    def resume(self, history: History, thread: Thread) -> tuple[History, Turn | None]:
        """Resume an opened chat: return its messages, and the turn whose answer the server still has."""
        answer_id = read_pending(history)
        if answer_id is None:
            return history, None
        answer = self.answers.find(answer_id)
        if answer is None:
            return [*history[:-1], figures_message("stopped", answer_id)], None
        asked = drop_answer(history)
        return asked, Turn(asked, len(asked), thread, answer)

    def _begin(
        self,
        asked: History,
        num_shown: int,
        thread: Thread | None,
        request: gr.Request,
        rest: Sequence[Any],
    ) -> Begun:
        *values, store = rest
        settings = Settings(*values)
        answer = self.answers.begin(
            lambda answer: self._generate(answer, asked, settings, str(request.session_hash))
        )
        thread = {**(thread or make_thread()), "settings": asdict(settings)}
        turn = Turn(asked, num_shown, thread, answer)
        busy = gr.update(value=None, submit_btn=False, stop_btn=True)
        # Store the question at the start, so that it is not lost if the page is left before the answer ends.
        kept = [*asked, answer_message(""), pending_message(answer.job_id)]
        turn.thread, change = keep_chat(store, thread, kept)
        return gr.skip(), busy, turn.growing, turn.thread, turn, change

    async def _check_length(self, text: str) -> None:
        if self.engine.tokenizer is None:
            return
        num_tokens, limit = len(await self.engine.encode(text)), self.engine.resolved.max_model_len
        if num_tokens >= limit:
            why = f"the message and its files have {num_tokens:,} tokens, and the model takes {limit:,} with the answer"
            raise InvalidRequest(why, "message")

    def list_models(self) -> list[str]:
        """Return the names of the model and its adapters; empty without adapters."""
        engine = self.engine
        names = [engine.model_name, *(ref.name for ref in engine.adapters.refs)]
        return names if engine.config.enable_lora else []

    async def _generate(
        self, answer: Answer, history: History, settings: Settings, session: str
    ) -> AsyncGenerator[RequestOutput | None, None]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer and has no chat")
        messages = to_model_messages(history, settings.system_prompt)
        if tokenizer.has_chat_template:
            messages = await asyncio.to_thread(load_images, messages)
            prompt_ids, answer.thinking = await prepare_prompt(self.engine, self.knows_reasoning, messages)
        else:
            prompt_ids = await self.engine.encode("\n\n".join(m["content"] for m in messages) + "\n\n")
        params = make_sampling_params(settings, len(prompt_ids), self.engine.resolved.max_model_len)
        if answer.thinking is not None:
            # The end mark of reasoning may be a special token, and a grammar begins after it.
            params = replace(params, skip_special_tokens=False)
            if params.grammar is not None:
                params = replace(params, grammar=gate_grammar(params.grammar, answer.thinking))
        # A separate cache salt, so that one visitor's prompts never show in another's cache timings.
        names = settings.models or [self.engine.model_name]
        streams = {
            name: self.engine.generate(
                prompt_ids,
                params,
                cache_salt=f"session-{session}",
                priority=int(settings.priority),
                lora_request=None if name == self.engine.model_name else LoRARequest(name),
            )
            for name in names
        }
        stream = join_streams(streams) if len(names) > 1 else streams[names[0]]
        async with aclosing(pace(stream, self.interval_s)) as outputs:
            async for output in outputs:
                yield output


def is_running(turn: Turn | None) -> bool:
    """Return whether the page shows a turn whose answer has not ended."""
    return turn is not None and not (turn.is_left or turn.answer.is_over)


def add_missed(history: History, turn: Turn | None) -> History:
    """Return the page's history, with a turn that has ended, but whose end had not reached the page."""
    is_missed = turn is not None and not turn.is_left and len(history) <= turn.num_shown
    return conclude(turn) if turn is not None and is_missed else history


def conclude(turn: Turn) -> History:
    """Return the history with the turn's result."""
    output, problem = turn.answer.output, turn.answer.problem
    written = [] if output is None else turn.written
    if problem is not None:
        return [*turn.history, *written, error_message(problem)]
    if output is None:
        return [*turn.history, answer_message(""), figures_message("stopped", turn.answer.job_id)]
    figures = describe_output(output)
    line = figures if output.finished else f"{figures} · stopped"
    return [*turn.history, *written, figures_message(line, turn.answer.job_id)]


def inspect(history: History, turn: Turn) -> dict[str, Any]:
    """Return every token of the new answer with its probability and alternatives, where recorded.

    As text, because Gradio traverses lists and dictionaries on the event loop: 70 ms for a thousand tokens.
    """
    shown, output = describe_tokens(history), turn.answer.output
    if output is None or not output.outputs[0].logprobs:
        return shown
    positions = output.outputs[0].logprobs[:MAX_INSPECTED]
    steps = list(map(describe_position, positions))
    return shown | {"id": turn.answer.job_id, "steps": json.dumps(steps, ensure_ascii=False)}


def open_composer(**more: Any) -> Any:
    """Enable the text box for the next message."""
    return gr.update(submit_btn=True, stop_btn=False, **more)


def _refuse(running: Turn, chatbot: Any = None) -> Begun:
    """Begin nothing, because another turn runs; `chatbot` restores what the page has already changed."""
    running.has_refused = True
    return chatbot or gr.skip(), *(gr.skip() for _ in range(5))


def first_index(index: int | tuple[int, int]) -> int:
    return index[0] if isinstance(index, tuple | list) else index
