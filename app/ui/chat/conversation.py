"""The chat history in Gradio's format: reads it for the model, writes answers, figures and errors into it.

An answer is followed by a quiet line of figures, a message with a title; it, reasoning and failed turns are
not part of what the model reads. A question is followed by its files, folded messages whose titles are their names.
Where several models answer, each has three messages: its name with its reasoning, its answer, its figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.reasoning import Thinking, make_splitter
from app.ui.explain import Explanation

Message = dict[str, Any]
History = list[Message]
Written = tuple[str, str]  # the reasoning and the content of a model's answer

ERROR_ID = "error"
REASONING_ID = "reasoning"
FILE_ID = "file"
MODEL_ID = "model:"  # before the name of one of several models
MAX_SHOWN_CHARS = 4000  # of a file
MARKDOWN = re.compile(r"[\\`*_\[\]<>#$~|]")
# Code, formulas in brackets, and what may be a formula between single dollars.
FORMULA = re.compile(
    r"(?P<code>^[ \t>*+\-\d.]*(`{3,}|~{3,}).*?(?:^[ \t>]*\2|\Z)|(?<!`)(`{1,4})(?!`)[^\n]*?(?<!`)\3(?!`))"
    r"|(?P<indented>(?:\A|(?<=\n\n))(?: {4}|\t)[^\n]*(?:\n+(?: {4}|\t)[^\n]*)*)|\$\$.*?\$\$"
    r"|\\\((?:(?!\\\().)*?\\\)|\\\[(?:(?!\\\[).)*?\\\]"
    r"|(?<![\\$\w])\$(?P<formula>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])",
    re.DOTALL | re.MULTILINE,
)
UNINDENTED, LIST_ITEM = re.compile(r"^\S.*", re.MULTILINE), re.compile(r"(?:[-*+]|\d+[.)])\s")
# What would be read as HTML, and the references that stand for it; polish.js reads these, too. Nobody types them.
HTML_START = re.compile(r"<(?=[a-zA-Z/!?])(?!https?://|mailto:)|&(?=#?\w+;)")
REFERENCES = {"<": "&#0060;", "&": "&#0038;"}
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
JSON_TOKEN, INDENT = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{}:,]|[^\s\[\]{}:,"]+'), "  "


def user_message(text: str, image_paths: Sequence[str] = ()) -> Message:
    """Return a question, with its images before the text."""
    images = [{"path": path} for path in image_paths]
    return {"role": "user", "content": [*images, *([text] if text else [])] if images else text}


def file_message(name: str, text: str) -> Message:
    """Return a file of the question before it."""
    return {"role": "user", "content": text, "metadata": {"title": name, "id": FILE_ID, "status": "done"}}


def is_file(message: Message) -> bool:
    metadata = message.get("metadata") or {}
    return message["role"] == "user" and metadata.get("id") == FILE_ID and "title" in metadata


def list_image_paths(content: Any) -> list[str]:
    """Return the files of a message's images, in this app's form or in Gradio's."""
    if isinstance(content, list):
        return [path for block in content for path in list_image_paths(block)]
    found = content.get("file", content) if isinstance(content, dict) else {}
    return [str(found["path"])] if isinstance(found, dict) and found.get("path") else []


def read_with_names(content: Any) -> str:
    """Return the text of a message with the names of its images, as the browser keeps it."""
    names = [f"[image: {Path(path).name}]" for path in list_image_paths(content)]
    return "\n".join(filter(None, [*names, read_text(content)]))


def answer_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def answer_messages(text: str, thinking: Thinking | None = None) -> list[Message]:
    """Return an answer, with its reasoning in a separate message that is folded when complete, if it is shown."""
    # A model may begin with reasoning even if its template does not support it.
    thinking = thinking or Thinking(is_open=False)
    splitter = make_splitter(thinking)
    thought, content = map("".join, zip(splitter.feed(text), splitter.close(), strict=True))
    if not splitter.has_reasoning:
        return [answer_message(content)]
    if not thinking.is_shown:
        return [answer_message(content.lstrip())] if content.strip() else []
    # Bold, so that the style sheet can distinguish it from a line of figures.
    title = "**Reasoning**" if splitter.is_closed else "**Reasoning …**"
    folded = {"title": title, "id": REASONING_ID, "status": "done" if splitter.is_closed else "pending"}
    reasoning = {"role": "assistant", "content": thought.strip(), "metadata": folded}
    return [reasoning, answer_message(content.lstrip())] if splitter.is_closed else [reasoning]


def end_reasoning(messages: list[Message]) -> list[Message]:
    """Return an answer that has ended: reasoning that it ended in is over, and an empty content follows it."""
    if not messages:
        return [answer_message("")]
    metadata = messages[-1].get("metadata")
    if metadata is None:
        return messages
    folded = {**metadata, "title": "**Reasoning**", "status": "done"}
    return [*messages[:-1], {**messages[-1], "metadata": folded}, answer_message("")]


def compared_messages(
    name: str, text: str, thinking: Thinking | None, figures: Message, is_over: bool
) -> list[Message]:
    """Return the answer of one of several models, always as three messages, which style.css sets below each other."""
    *reasoning, answer = answer_messages(text, thinking) or [answer_message("")]
    metadata = {"id": MODEL_ID + name, "status": "done"}
    if answer.get("metadata"):  # it ends in the reasoning
        reasoning, answer = [answer], answer_message("")
        metadata["status"] = "done" if is_over else "pending"
    title = MARKDOWN.sub(r"\\\g<0>", name)
    # Reasoning opens, so its title is bold; see answer_messages.
    metadata["title"] = f"**{title}: reasoning**" if reasoning else f"*{title}*"
    content = reasoning[0]["content"] if reasoning else ""
    return [{"role": "assistant", "content": content, "metadata": metadata}, answer, figures]


def read_answers(history: History) -> dict[str, Written]:
    """Return what each model wrote in the messages of one answer, by name; under "" what a model alone wrote."""
    answers, name, reasoning = {}, "", ""
    for message in history:
        metadata, text = message.get("metadata") or {}, read_text(message["content"])
        key = str(metadata.get("id"))
        if key == REASONING_ID or key.startswith(MODEL_ID):
            name, reasoning = key.removeprefix(MODEL_ID) if key != REASONING_ID else "", text
        elif not metadata:
            answers[name] = (reasoning, text)
    return answers


def lay_out(history: History) -> History:
    """Return the history as a page shows it: formulas in the brackets that it knows, JSON as a code block."""
    return list(map(_lay_out_message, history))


def _lay_out_message(message: Message) -> Message:
    content, metadata = message["content"], message.get("metadata") or {}
    if is_file(message):
        more = "\n…" if len(content) > MAX_SHOWN_CHARS else ""
        name = "**" + MARKDOWN.sub(r"\\\g<0>", metadata["title"]) + "**"  # bold, as reasoning
        return {**message, "content": fence(content[:MAX_SHOWN_CHARS] + more), "metadata": {**metadata, "title": name}}
    if message["role"] == "user":
        parts = content if isinstance(content, list) else [content]
        shown = [_lay_out_typed(part) if isinstance(part, str) else part for part in parts]
        return {**message, "content": shown if isinstance(content, list) else shown[0]}
    return {**message, "content": _lay_out(content)} if isinstance(content, str) and not metadata else message


def take_back(shown: str, written: str) -> str:
    """Return an edited question with HTML and formulas as they were written before `lay_out`."""
    for sign, reference in REFERENCES.items():
        shown = shown.replace(reference, sign)
    for match in FORMULA.finditer(written):
        shown = shown.replace(_bracket(match), match[0])
    return shown


def fence(text: str) -> str:
    """Return the text between fences that it does not contain itself."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    mark = "`" * (longest + 1)
    return f"{mark}\n{text.rstrip()}\n{mark}"


def _lay_out_typed(text: str) -> str:
    """Return a person's text as Markdown that shows HTML as it was typed."""
    shown, end, is_list = "", 0, False
    for match in FORMULA.finditer(text):
        before, part = text[end : match.start()], _bracket(match)
        if lines := UNINDENTED.findall(before):
            is_list = LIST_ITEM.match(lines[-1]) is not None
        # In a list, an indented line is text. Amounts of money are no formula.
        is_text = is_list if match["indented"] else match["formula"] and part == match[0]
        shown += _escape(before) + (_escape(part) if is_text else part)
        end = match.end()
    return shown + _escape(text[end:])


def _escape(text: str) -> str:
    return HTML_START.sub(lambda match: REFERENCES[match[0]], text)


def _lay_out(text: str) -> str:
    try:
        is_json = text.lstrip().startswith(("{", "[")) and json.loads(text) is not None
    except (ValueError, RecursionError):
        is_json = False
    if is_json:
        return _indent(text)
    # Gradio leaves out elements that it does not know, with their text.
    return TOOL_CALL.sub(_show_call, FORMULA.sub(_bracket, text))


def _show_call(match: re.Match[str]) -> str:
    call = match[1].strip()
    return f"**Tool call**\n{_indent(call) if call.startswith('{') else fence(call)}"


def _indent(text: str) -> str:
    """Return JSON as a code block, token by token, because a number is shown as it was written."""
    lines, depth = "", 0
    for token in JSON_TOKEN.findall(text):
        if token in ("{", "["):
            depth += 1
            lines += f"{token}\n{INDENT * depth}"
        elif token in ("}", "]"):
            depth -= 1
            is_empty = lines.rstrip().endswith(("{", "["))
            lines = lines.rstrip() + ("" if is_empty else f"\n{INDENT * depth}") + token
        else:
            lines += {",": f",\n{INDENT * depth}", ":": ": "}.get(token, token)
    return f"```json\n{lines}\n```"


def _bracket(match: re.Match[str]) -> str:
    """Put a formula between single dollars into brackets; between amounts of money there are words."""
    formula = match["formula"]
    if formula is None or (re.search(r"\s", formula) and not re.search(r"[\\^_=+<>{}]", formula)):
        return match[0]
    return f"\\({formula}\\)"


def figures_message(line: str, turn_id: str = "") -> Message:
    """Return the line of figures under an answer; the turn's id links it to the answer's tokens."""
    metadata = {"title": line, "status": "done"} | ({"id": turn_id} if turn_id else {})
    return {"role": "assistant", "content": "", "metadata": metadata}


def pending_message(turn_id: str) -> Message:
    """Return the placeholder of the figures while the answer is generated."""
    message = figures_message("not finished", turn_id)
    return message | {"metadata": {**message["metadata"], "status": "pending"}}


def read_pending(history: History) -> str | None:
    """Return the id of the last turn if its answer was incomplete when the history was stored."""
    metadata = (history[-1].get("metadata") if history else None) or {}
    is_pending = metadata.get("status") == "pending" and metadata.get("id") != REASONING_ID
    return str(metadata["id"]) if is_pending and metadata.get("id") else None


def list_titles(history: History) -> list[str]:
    """Return the ids of all messages with a title, in order; empty for a message without an id."""
    found = [message.get("metadata") or {} for message in history]
    return [str(metadata.get("id") or "") for metadata in found if metadata.get("title")]


def error_message(explanation: Explanation) -> Message:
    return {"role": "assistant", "content": explanation.as_markdown(), "metadata": {"id": ERROR_ID}}


def read_text(content: Any) -> str:
    """Return the text of a message, which Gradio gives as a string or a list of blocks."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        return str(content.get("text", ""))
    return "".join(read_text(block) for block in content or [])


def to_model_messages(history: History, system_prompt: str, name: str = "") -> list[dict[str, Any]]:
    """Return the messages for the model, without figures and failed turns; images as {"type", "path"}.

    Args:
        name: the model; where several have answered, it reads its own answer, or the first one.
    """
    messages: list[dict[str, Any]] = []
    other = ""  # the model of several whose answer comes
    for message in history:
        metadata = message.get("metadata") or {}
        if message["role"] == "user":
            other = ""
        elif str(metadata.get("id")).startswith(MODEL_ID):
            other = metadata["id"].removeprefix(MODEL_ID)
        if metadata.get("id") == ERROR_ID:
            # Drop its question too, because a template may require alternating turns.
            if messages and messages[-1]["role"] == "user":
                messages.pop()
        elif is_file(message) and messages and messages[-1]["role"] == "user":
            _attach(messages, f"{metadata['title']}\n{fence(message['content'])}")
        elif not metadata.get("title"):
            if other and messages and messages[-1]["role"] == "assistant":
                if other != name:
                    continue
                messages.pop()
            text = read_text(message["content"])
            images = [{"type": "image", "path": path} for path in list_image_paths(message["content"])]
            content = [*images, {"type": "text", "text": text}] if images else text
            messages.append({"role": message["role"], "content": content})
    system = [{"role": "system", "content": system_prompt.strip()}] if system_prompt.strip() else []
    return system + messages


def _attach(messages: list[dict[str, Any]], text: str) -> None:
    """Put the text of a file behind its question."""
    *images, last = parts if isinstance(parts := messages[-1]["content"], list) else [{"type": "text", "text": parts}]
    text = f"{last['text']}\n\n{text}".strip()
    messages[-1]["content"] = [*images, {"type": "text", "text": text}] if images else text
