"""Detokenizer: the machine behind the DetokenizerActor. Tokens in, text out, stop strings found.

RequestTokens ──▶ IncrementalText ──▶ StopStrings ──▶ TextDelta
                  whole characters    nothing that may still become a stop string
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.core.incremental_text import NO_PIECES
from engine.core.stop_strings import StopStrings
from engine.core.text_group import TextStream
from engine.messages import RequestTokens
from engine.outputs import FinishReason, Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams


class TextTokenizer(Protocol):
    """What the machine needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def make_text(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TextStream: ...

    def token_piece(self, token_id: int) -> str | bytes: ...


class TextDelta(NamedTuple):
    """What one request got in one step, as text; with `finish_reason` it is the request's last delta.

    A named tuple because 256 of them are made per step: a frozen dataclass costs four times as much.
    """

    request_id: str
    text: str
    token_ids: list[int]  # up to and including the token that completed a stop string
    logprobs: list[TokenLogprobs] | None = None  # beside token_ids, decoded
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # a part, as in RequestTokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stopped_by_string: bool = False  # the scheduler does not know yet: abort the request there


class NoText:
    """The text of an engine without a tokenizer."""

    pieces = NO_PIECES
    is_settled = True

    def feed(self, token_ids: Sequence[int]) -> str:
        return ""

    def feed_token(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(slots=True)
class _Stream:
    """One request on its way through."""

    params: SamplingParams
    text: TextStream
    feed: Callable[[Sequence[int]], str]  # text.feed, bound once
    stops: StopStrings | None
    num_tokens: int = 0  # read so far; counted only beside stop strings


class Detokenizer:
    """Turns the tokens of every running request into text; one instance for the engine.

    Args:
        tokenizer: None leaves every text empty, and stop strings unseen.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids) if tokenizer else frozenset()
        self._streams: dict[str, _Stream] = {}
        self._plain_texts: dict[str, TextStream] = {}  # of the streams without stop strings

    def add(self, request_id: str, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Open a stream; the prompt decides how the first token is written."""
        text: TextStream = NoText()
        stops = None
        if self._tokenizer is not None:
            text = self._tokenizer.make_text(prompt_token_ids, params.skip_special_tokens)
            if params.stop:
                stops = StopStrings(params.stop, params.include_stop_str_in_output, params.min_tokens)
        self._streams[request_id] = _Stream(params, text, text.feed, stops)
        if stops is None:
            self._plain_texts[request_id] = text

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._streams.pop(request_id, None)
        self._plain_texts.pop(request_id, None)

    def find_text(self, request_id: str) -> TextStream | None:
        """The text of a running request whose tokens may be fed past `process`; None when it has stop strings."""
        return self._plain_texts.get(request_id)

    def process(self, item: RequestTokens) -> TextDelta | None:
        """The text of these tokens; None when the request has ended already."""
        request_id = item.request_id
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        token_ids = item.token_ids
        if stream.stops is not None or item.finish_reason is not None:
            return self._process_with_care(stream, item)
        return TextDelta(
            request_id,
            stream.feed(token_ids),
            token_ids,
            None if item.logprobs is None else self._name_tokens(item.logprobs),
            None if item.prompt_logprobs is None else self._name_prompt(item.prompt_logprobs),
        )

    def _process_with_care(self, stream: _Stream, item: RequestTokens) -> TextDelta:
        """The general case: stop strings, and the end of a request."""
        text, num_kept, hit = self._read(stream, item)
        finish_reason, stop_reason = item.finish_reason, item.stop_reason
        if hit is not None and item.error is None:
            finish_reason, stop_reason = "stop", hit
        if finish_reason is not None:
            self.remove(item.request_id)
        logprobs = None if item.logprobs is None else self._name_tokens(item.logprobs[:num_kept])
        return TextDelta(
            item.request_id,
            text,
            item.token_ids if hit is None else item.token_ids[:num_kept],
            logprobs,
            None if item.prompt_logprobs is None else self._name_prompt(item.prompt_logprobs),
            finish_reason,
            stop_reason,
            item.error,
            hit is not None,
        )

    def _read(self, stream: _Stream, item: RequestTokens) -> tuple[str, int, str | None]:
        """The text, how many tokens count, and the stop string hit."""
        token_ids = item.token_ids
        is_last = item.finish_reason is not None
        shown_ids = (
            token_ids[:-1] if is_last and self._ends_with_stop_token(stream.params, item) else token_ids
        )
        stops = stream.stops
        if stops is None:
            text = stream.feed(shown_ids)
            return text + stream.text.finish() if is_last else text, len(token_ids), None
        text = ""
        for count, token_id in enumerate(shown_ids, 1):
            released, hit = stops.feed(stream.feed((token_id,)), stream.num_tokens + count)
            text += released
            if hit is not None:
                return text, count, hit
        stream.num_tokens += len(token_ids)
        if is_last:
            released, hit = stops.feed(stream.text.finish(), stream.num_tokens)
            text += released if hit is not None else released + stops.finish()
            return text, len(token_ids), hit
        return text, len(token_ids), None

    def _ends_with_stop_token(self, params: SamplingParams, item: RequestTokens) -> bool:
        """Whether the last token ended the request and is therefore kept out of the text."""
        if item.finish_reason != "stop" or not item.token_ids or params.include_stop_str_in_output:
            return False
        token_id = item.token_ids[-1]
        ends = (item.stop_reason, *params.stop_token_ids)
        return token_id in ends or token_id in self._eos_token_ids

    def _name_tokens(self, positions: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """The same positions with each token's text beside its id."""
        if self._tokenizer is None:
            return list(positions)
        return [
            TokenLogprobs(self._name(position.token), tuple(self._name(top) for top in position.top))
            for position in positions
        ]

    def _name_prompt(self, positions: Sequence[TokenLogprobs | None]) -> list[TokenLogprobs | None]:
        return [None if position is None else self._name_tokens([position])[0] for position in positions]

    def _name(self, entry: Logprob) -> Logprob:
        assert self._tokenizer is not None, "an engine without a tokenizer names no tokens"
        piece = self._tokenizer.token_piece(entry.token_id)
        text, part = (piece, None) if isinstance(piece, str) else (piece.decode(errors="replace"), piece)
        return Logprob(entry.token_id, entry.logprob, entry.rank, text, entry.masked_logprob, part)
