"""Stream chunks of chat and text completions; the usual one is a template with only its text put in.

A chunk of plain text costs one JSON string and two joins. Chunks that carry more (logprobs, token ids,
running usage, an end) are built as dicts: they are rare, or their reader asked for the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from json.encoder import encode_basestring_ascii
from typing import Any

from app.api import replies
from app.api.call import Call
from app.api.sse import Emit, frame
from app.api.text_offsets import TextOffsets
from app.api.tools.calls import ToolParser
from app.api.tools.styled_calls import join_parts
from app.concurrency import gather_bounded
from engine import CompletionOutput, RequestOutput

Json = dict[str, Any]


class Chunks:
    """Writes the chunks of one request with all its choices.

    Args:
        kind: the value of `object`.
        is_chat: chat deltas, or the texts of a text completion.
    """

    def __init__(self, call: Call, kind: str, is_chat: bool) -> None:
        self.call = call
        self._is_chat = is_chat
        body = call.body
        # OpenAI's chunks before the one with the usage have it as null
        self._header = replies.header(call, kind) | ({"usage": None} if body.include_usage else {})
        self._is_plain = not (
            call.sampling.logprobs is not None or body.return_token_ids or body.continuous_usage
        )
        self._parsers: dict[int, ToolParser] = {}
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._num_tokens: dict[int, int] = {}
        self._offsets: dict[int, TextOffsets] = {}

    def first(self, index: int, output: RequestOutput, echo: str = "") -> bytes:
        """Return the chunk before a choice's own text: the role of a chat message, or an echoed prompt."""
        tools, reader = self.call.tools, self.call.make_reader()
        if reader is not None:
            self._parsers[index] = reader
        is_wordless = tools is not None and tools.spec is not None
        choice: Json = {"role": "assistant", "content": None if is_wordless else echo}
        more: Json = {}
        if self.call.body.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        if self.call.body.continuous_usage:
            more["usage"] = self._usage(index, output)
        if self._is_chat:
            return frame({**self._header, "choices": [self._choice(index, choice)], **more})
        entry = self._choice(index, echo)
        if self.call.sampling.logprobs is not None:
            self._offsets[index] = replies.output_offsets(self.call, output, len(echo))
            if echo and output.prompt_logprobs is not None:
                entry["logprobs"] = replies.echo_logprobs(self.call, output, echo)
        return frame({**self._header, "choices": [entry], **more}) if echo or more else b""

    def delta(self, index: int, choice: CompletionOutput, output: RequestOutput) -> bytes:
        """Return the chunk with what one choice has gained since the last one, b"" if there is nothing to show."""
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(choice.token_ids)
        if index in self._parsers:
            parts = join_parts(self._parsers[index].feed(choice.text))
            is_empty = not parts and (self._is_plain or not choice.token_ids)
            return b"" if is_empty else frame(self._rich(index, choice, output, parts))
        if self._is_plain:
            if not choice.text:
                return b""
            head, tail = self._templates.get(index) or self._make_template(index)
            return head + encode_basestring_ascii(choice.text).encode("ascii") + tail
        if not (choice.text or choice.token_ids):
            return b""
        content = {"content": choice.text} if self._is_chat else choice.text
        return frame(self._rich(index, choice, output, content))

    def last(self, index: int, choice: CompletionOutput, output: RequestOutput) -> bytes:
        """Return the withheld text of one choice, and the chunk of its end: nothing else, as clients stop there."""
        parser = self._parsers.get(index)
        held = {} if parser is None else join_parts(parser.close(not replies.is_own_end(choice)))
        before = frame({**self._header, "choices": [self._choice(index, held)]}) if held else b""
        entry = self._choice(index, {} if self._is_chat else "")
        tools, has_calls = self.call.tools, parser is not None and parser.num_calls > 0
        reason = replies.finish_reason(choice, tools.calls_field if tools and has_calls else None)
        entry |= {"finish_reason": reason, "stop_reason": choice.stop_reason}
        chunk = {**self._header, "choices": [entry], **replies.extras(self.call, [output], (index,))}
        if self.call.body.continuous_usage:
            chunk["usage"] = self._usage(index, output)
        return before + frame(chunk)

    def total(self, outputs: list[RequestOutput]) -> bytes:
        """The chunk without choices that carries the usage of the whole request."""
        usage = replies.usage_of(self.call, outputs, sum(self._num_tokens.values()))
        return frame({**self._header, "choices": [], "usage": usage})

    def _choice(self, index: int, content: Any) -> Json:
        name = "delta" if self._is_chat else "text"
        return {"index": index, name: content, "logprobs": None, "finish_reason": None}

    def _make_template(self, index: int) -> tuple[bytes, bytes]:
        mark = "\x00"
        content = {"content": mark} if self._is_chat else mark
        whole = frame({**self._header, "choices": [self._choice(index, content)]})
        head, tail = whole.split(encode_basestring_ascii(mark).encode("ascii"))
        self._templates[index] = (head, tail)
        return head, tail

    def _rich(self, index: int, choice: CompletionOutput, output: RequestOutput, content: Any) -> Json:
        entry = self._choice(index, content)
        if self._is_chat:
            entry["logprobs"] = replies.chat_logprobs(self.call, choice)
        elif self.call.sampling.logprobs is not None and choice.logprobs is not None:
            offsets = self._offsets[index].take(choice.token_ids)
            entry["logprobs"] = replies.completion_logprobs(
                self.call, choice.logprobs, choice.token_ids, offsets
            )
        if self.call.body.return_token_ids:
            entry["token_ids"] = list(choice.token_ids)
        chunk = {**self._header, "choices": [entry]}
        if self.call.body.continuous_usage:
            chunk["usage"] = self._usage(index, output)
        return chunk

    def _usage(self, index: int, output: RequestOutput) -> Json:
        return replies.usage(
            len(output.prompt_token_ids), self._num_tokens.get(index, 0), output.num_cached_tokens
        )


async def stream(chunks: Chunks, read_echo: Callable[[int, RequestOutput], str], emit: Emit) -> None:
    """Emit the chunks of every prompt as they come, then the usage.

    Args:
        read_echo: returns the text that the choices of a prompt begin with.
    """
    call = chunks.call
    last: dict[int, RequestOutput] = {}
    # Two prompts may have news at once, and their events must not mix.
    turn = asyncio.Lock()

    async def run(number: int) -> None:
        base = number * call.sampling.n
        async with aclosing(call.generate(number)) as outputs:
            async for output in outputs:
                parts = []
                if number not in last:
                    echo = read_echo(number, output)
                    parts += [chunks.first(base + index, output, echo) for index in range(call.sampling.n)]
                for choice in output.outputs:
                    if not is_scoring(call):
                        parts.append(chunks.delta(base + choice.index, choice, output))
                    if choice.is_finished:
                        parts.append(chunks.last(base + choice.index, without_hidden(call, choice), output))
                last[number] = output
                if data := b"".join(parts):
                    async with turn:
                        await emit(data)

    await gather_bounded(map(run, range(len(call.prompts))), len(call.prompts))
    if call.body.include_usage:
        await emit(chunks.total(list(last.values())))


def is_scoring(call: Call) -> bool:
    """Return whether a request only asks for the probabilities of its prompt: echo with max_tokens=0."""
    return call.body.max_tokens == 0


def without_hidden(call: Call, choice: CompletionOutput) -> CompletionOutput:
    """Return the choice without the token that a scored prompt must generate."""
    if not is_scoring(call):
        return choice
    reason = "length" if choice.finish_reason == "stop" else choice.finish_reason
    return replace(choice, text="", token_ids=[], finish_reason=reason, stop_reason=None)
