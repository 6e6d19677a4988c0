"""What a page shows of an answer: its messages while it is written, its figures or its error at the end, its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.extraction.choices import describe_position
from app.ui.chat import store as chats
from app.ui.chat.answers import Answer, is_looping
from app.ui.chat.branches import Node, join
from app.ui.chat.conversation import (
    History,
    Message,
    answer_messages,
    compared_messages,
    end_reasoning,
    error_message,
    figures_message,
    lay_out,
)
from app.ui.chat.history import describe_tokens
from app.ui.figures import describe_output

# Number of an answer's first tokens that can be inspected.
MAX_INSPECTED = 1024


def write(answer: Answer) -> History:
    """Return the messages of an answer so far; none before its first token."""
    texts = {name: answer.read(name) for name in answer.names}
    if len(texts) > 1:
        return [
            message
            for name, text in texts.items()
            for message in compared_messages(
                name, text, answer.thinking.get(name), describe(answer, name), answer.is_over
            )
        ]
    ((name, text),) = texts.items()
    return answer_messages(text, answer.thinking.get(name)) if text or name in answer.outputs else []


def conclude(answer: Answer) -> History:
    """Return the messages of an answer that has ended, with its figures or its error."""
    is_compared = len(answer.names) > 1
    written = write(answer) if is_compared else end_reasoning(write(answer))
    if answer.problem is not None:
        return [*written, error_message(answer.problem)]
    return written if is_compared else [*written, describe(answer, answer.names[0])]


def describe(answer: Answer, name: str) -> Message:
    """Return the figures of one model."""
    output = answer.outputs.get(name)
    if output is None:
        return figures_message("stopped" if answer.is_over else "waiting", _make_id(answer, name))
    line = describe_output(output)
    if answer.is_over and not output.finished:
        line += " · stopped"
    if answer.is_over and not line.endswith("complete") and is_looping(output.outputs[0].text):
        line += ": it repeated itself"
    return figures_message(line, _make_id(answer, name))


def show(path: Sequence[Node]) -> History:
    """Return the history of a path whose last answer is not being written."""
    return lay_out(chats.end_pending(join(path)))


def inspect(history: History, answer: Answer | None) -> dict[str, Any]:
    """Return every token of the last answer with its probability and alternatives, where recorded.

    Those of each model are under the id of its figures. As text, because Gradio traverses lists and dictionaries on the
    event loop: 70 ms for a thousand tokens.
    """
    shown = describe_tokens(history)
    if answer is None:
        return shown
    steps = {}
    for name, output in answer.outputs.items():
        if positions := output.outputs[0].logprobs:
            described = list(map(describe_position, positions[:MAX_INSPECTED]))
            steps[_make_id(answer, name)] = json.dumps(described, ensure_ascii=False)
    return shown | {"steps": steps} if steps else shown


def _make_id(answer: Answer, name: str) -> str:
    """Return the id of one model's figures, under which the browser keeps its tokens."""
    at = answer.names.index(name)
    return f"{answer.answer_id}/{at}" if at else answer.answer_id
