"""Detokenizer: turns tokens into text and finds stop strings.

tokens ──▶ IncrementalText ──▶ StopStrings ──▶ TextDelta
           whole characters    withholds text that may become a stop string
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engine.core.incremental_text import NO_PIECES
from engine.core.stop_strings import StopStrings
from engine.core.text_group import TextStream
from engine.messages import Detail
from engine.outputs import FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams


class TextTokenizer(Protocol):
    """The part of a tokenizer that the detokenizer uses."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def make_text(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TextStream: ...

    def token_piece(self, token_id: int) -> str | bytes: ...


class TextDelta(NamedTuple):
    """Output of one completion in one step; with `finish_reason` it is the last one.

    A named tuple, because a frozen dataclass takes four times as long to make, and a step makes up to 256.
    """

    text: str
    token_ids: list[int]  # up to and including the token that completed a stop string
    logprobs: list[TokenLogprobs] | None = None  # one per token id, with texts
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # next part, as in Detail
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stopped_by_string: bool = False  # the scheduler is not informed yet; send it an abort


class NoText:
    """TextStream of an engine without a tokenizer: always empty."""

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
    """State of one completion."""

    params: SamplingParams
    text: TextStream
    feed: Callable[[Sequence[int]], str]  # text.feed, bound once
    stops: StopStrings | None
    num_tokens: int = 0  # tokens read; counted only with stop strings


class Detokenizer:
    """Turns the tokens of all running completions into text.

    Args:
        tokenizer: None: all texts are empty, and stop strings are not checked.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids) if tokenizer else frozenset()
        self._streams: dict[int, _Stream] = {}
        self._plain_texts: dict[int, TextStream] = {}  # completions without stop strings

    def add(
        self,
        handle: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        generated_token_ids: Sequence[int] = (),
    ) -> None:
        """Add a completion. The prompt determines how the first token is decoded.

        Args:
            generated_token_ids: tokens whose text was returned earlier; incomplete characters and possible stop strings
                at their end are continued.
        """
        text: TextStream = NoText()
        stops = None
        if self._tokenizer is not None and params.detokenize:
            text = self._tokenizer.make_text(prompt_token_ids, params.skip_special_tokens)
            if params.stop:
                stops = StopStrings(params.stop, params.include_stop_str_in_output, params.min_tokens)
        stream = self._streams[handle] = _Stream(params, text, text.feed, stops)
        self._read(stream, generated_token_ids)
        if stops is None:
            self._plain_texts[handle] = text

    def remove(self, handle: int) -> None:
        """Remove a completion. Unknown handles are ignored."""
        self._streams.pop(handle, None)
        self._plain_texts.pop(handle, None)

    def find_text(self, handle: int) -> TextStream | None:
        """Return the TextStream of a completion without stop strings, so that a TextGroup may feed it; else None."""
        return self._plain_texts.get(handle)

    def process(self, handle: int, token_ids: list[int], detail: Detail | None = None) -> TextDelta | None:
        """Return the text of these tokens, or None if the completion has already ended."""
        stream = self._streams.get(handle)
        if stream is None:
            return None
        if detail is None:
            detail = Detail(handle)
        finish_reason, stop_reason = detail.finish_reason, detail.stop_reason
        is_withheld = finish_reason == "stop" and self._ends_with_stop_token(
            stream.params, token_ids, stop_reason
        )
        text, num_kept, hit = self._read(stream, token_ids[:-1] if is_withheld else token_ids)
        if hit is None:
            num_kept = len(token_ids)
        if hit is None and finish_reason is not None:
            stream.num_tokens += is_withheld
            released, hit = self._read_end(stream)
            text += released
        end: int | str | None = stop_reason
        if hit is not None and detail.error is None:
            finish_reason, end = "stop", hit
        if finish_reason is not None:
            self.remove(handle)
        return TextDelta(
            text,
            token_ids if num_kept == len(token_ids) else token_ids[:num_kept],
            None if detail.logprobs is None else self._name_tokens(detail.logprobs[:num_kept]),
            None if detail.prompt_logprobs is None else self._name_tokens(detail.prompt_logprobs),
            finish_reason,
            end,
            detail.error,
            hit is not None,
        )

    def _read(self, stream: _Stream, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Return the text, the number of tokens read, and the stop string found."""
        stops = stream.stops
        if stops is None:
            return stream.feed(token_ids), len(token_ids), None
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            stream.num_tokens += 1
            released, hit = stops.feed(stream.feed((token_id,)), stream.num_tokens)
            text += released
            if hit is not None:
                return text, count, hit
        return text, len(token_ids), None

    def _read_end(self, stream: _Stream) -> tuple[str, str | None]:
        """Return the withheld text at the end of a completion, and the stop string found."""
        rest = stream.text.finish()
        if stream.stops is None:
            return rest, None
        released, hit = stream.stops.feed(rest, stream.num_tokens)
        return (released, hit) if hit is not None else (released + stream.stops.finish(), None)

    def _ends_with_stop_token(
        self, params: SamplingParams, token_ids: Sequence[int], stop_reason: int | None
    ) -> bool:
        """Whether the last token is a stop token that is left out of the text."""
        if not token_ids or params.include_stop_str_in_output:
            return False
        token_id, ends = token_ids[-1], (stop_reason, *params.stop_token_ids)
        return token_id in ends or token_id in self._eos_token_ids

    def _name_tokens(self, positions: list[Any]) -> list[Any]:
        """Write the text of each token into the positions, of which the first of a prompt is None."""
        if self._tokenizer is not None:
            name = self._tokenizer.token_piece
            for position in positions:
                for entry in () if position is None else (position.token, *position.top):
                    piece = name(entry.token_id)
                    if isinstance(piece, str):
                        entry.decoded_token = piece
                    else:
                        entry.decoded_token, entry.part = piece.decode(errors="replace"), piece
        return positions
