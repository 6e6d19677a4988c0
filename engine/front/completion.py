"""Completion: the tokens of one completion, the only copy in the front, and their text.

    core ──token ids──▶ token_ids ──▶ decoder ──▶ StopStrings ──▶ text ──▶ OutputStream
                                      whole       withholds text that
                                      characters  may become a stop string

A text without stop strings is decoded when its reader takes it, so that a step adds only the ids.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from engine.front.stop_strings import StopStrings
from engine.input.incremental_text import IncrementalText, WindowedText
from engine.input.tokenizer import Tokenizer
from engine.messages import Detail, NewCompletion
from engine.outputs import CompletionOutput, FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams

NOTHING: frozenset[int] = frozenset()


class NoText:
    """Decoder of an engine without a tokenizer: the text is always empty."""

    is_settled = False

    def find_quiet(self, characters: frozenset[str]) -> set[int]:
        return set()

    def feed(self, token_ids: Sequence[int]) -> str:
        return ""

    def feed_token(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


Decoder = IncrementalText | WindowedText | NoText


class Completion:
    """One of the n completions of a request. After appending to `token_ids`, call `find_stop` if `has_stops`.

    Args:
        tokenizer: None: the text is empty, and stop strings are not looked for.

    Attributes:
        quiet_ids: a next token that is one of these begins no stop string, and may wait for a later call.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_decoder",
        "_is_end_seen",
        "_is_open",
        "_logprobs",
        "_num_withheld",
        "_params",
        "_quiet",
        "_start",
        "_stops",
        "_texts",
        "_tokenizer",
        "error",
        "finish_reason",
        "has_stops",
        "index",
        "num_decoded",
        "num_seen",
        "quiet_ids",
        "stop_reason",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self, index: int, new: NewCompletion, params: SamplingParams, prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.token_ids = list(new.generated_token_ids)  # with those that it generated before it came here
        self.num_seen = len(self.token_ids)  # tokens that the reader has got
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        is_text = tokenizer is not None and params.detokenize
        self.has_stops = is_text and bool(params.stop)
        self._params = params
        self._tokenizer = tokenizer
        self._start = self.num_seen  # index of the first token of the next output
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []  # from _start on
        self._cumulative_logprob = 0.0
        self._texts: list[str] = []  # of the next output
        self.num_decoded = 0
        self._num_withheld = 0  # tokens at the end that are left out of the text
        self._is_end_seen = False
        self._is_open = True  # the decoder may still hold a part of a character
        self._stops = (
            StopStrings(params.stop, params.include_stop_str_in_output, params.min_tokens)
            if self.has_stops
            else None
        )
        self._decoder: Decoder = NoText()
        if tokenizer is not None and is_text:
            self._decoder = tokenizer.make_text(prompt_token_ids, params.skip_special_tokens)
        self._quiet: set[int] = set() if self._stops is None else self._decoder.find_quiet(self._stops.first_chars)
        self.quiet_ids: Set[int] = NOTHING  # `_quiet` while no text is held back
        for count, token_id in enumerate(self.token_ids, 1):  # their text was returned before
            text = self._decoder.feed_token(token_id)
            if self._stops is not None:
                self._stops.feed(text, count)
        self.num_decoded = self._start

    @property
    def has_news(self) -> bool:
        """Whether there are tokens, or an end, that the reader has not got."""
        return len(self.token_ids) != self.num_seen or (self.finish_reason is not None and not self._is_end_seen)

    def find_stop(self, num_withheld: int = 0) -> str | None:
        """Decode new tokens, and drop those after a stop string. Returns the stop string.

        Args:
            num_withheld: tokens at the end that belong to no text.
        """
        stops, token_ids, decoder, quiet = self._stops, self.token_ids, self._decoder, self._quiet
        assert stops is not None, "only then are they looked for"
        is_idle = stops.is_idle and decoder.is_settled
        start, end = self.num_decoded, len(token_ids) - num_withheld
        if is_idle and end - start > 1 and quiet.issuperset(waiting := token_ids[start : end - 1]):
            self._texts.append(decoder.feed(waiting))
            start = end - 1
        for count in range(start + 1, end + 1):
            token_id = token_ids[count - 1]
            text = decoder.feed_token(token_id)
            if is_idle and (token_id in quiet or stops.first_chars.isdisjoint(text)):
                self._texts.append(text)
                is_idle = decoder.is_settled
                if is_idle:
                    quiet.add(token_id)
                continue
            text, hit = stops.feed(text, count)
            is_idle = stops.is_idle and decoder.is_settled
            if text:
                self._texts.append(text)
            if hit is not None:
                del token_ids[count:]
                self.num_decoded, self._is_open = count, False
                return hit
        self.num_decoded = max(self.num_decoded, end)
        self.quiet_ids = quiet if is_idle else NOTHING
        return None

    def take(self, detail: Detail, num_new: int) -> None:
        """Take what a step said beside the token ids."""
        num_before = len(self.token_ids) - num_new
        if detail.finish_reason is None:
            if self._stops is not None and (hit := self.find_stop()) is not None:
                self.end("stop", hit)
        else:
            self._num_withheld = int(num_new > 0 and self._ends_with_stop_token(detail))
            hit = None if self._stops is None else self.find_stop(self._num_withheld) or self._release()
            if hit is not None and detail.error is None:
                self.end("stop", hit)
            else:
                self.end(detail.finish_reason, detail.stop_reason, detail.error)
        if detail.logprobs is not None and self._logprobs is not None:
            kept = detail.logprobs[: len(self.token_ids) - num_before]
            self._logprobs += self.name_tokens(kept)
            self._cumulative_logprob += sum(each.token.logprob for each in kept)

    def end(
        self, finish_reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        self.finish_reason, self.stop_reason, self.error = finish_reason, stop_reason, error
        if self._stops is not None and self._is_open:
            self.find_stop(self._num_withheld)
            self._release()

    def decode(self, max_tokens: int) -> None:
        """Decode at most as many tokens of a text without stop strings."""
        start, end = self.num_decoded, len(self.token_ids) - self._num_withheld
        if self._stops is None and start < end:
            self.num_decoded = min(end, start + max_tokens)
            self._texts.append(self._decoder.feed(self.token_ids[start : self.num_decoded]))

    def make_output(self, is_delta: bool) -> CompletionOutput:
        """Return all output, or that since the last delta."""
        if self._stops is None:
            self.decode(len(self.token_ids))
        elif self._is_open:
            self.find_stop(self._num_withheld)
        if self.finish_reason is not None and self._is_open:
            self._texts.append(self._decoder.finish())
            self._is_open = False
        text = "".join(self._texts)
        self._texts = [] if is_delta else [text]
        output = CompletionOutput(
            self.index, text, self.token_ids[self._start :],
            None if self._logprobs is None else self._logprobs[:],
            None if self._logprobs is None else self._cumulative_logprob, self.finish_reason,
            self.stop_reason, self.error,
        )
        self.num_seen, self._is_end_seen = len(self.token_ids), self.finish_reason is not None
        if is_delta:
            self._start = self.num_seen
            if self._logprobs is not None:
                self._logprobs.clear()
        return output

    def name_tokens(self, positions: list[Any]) -> list[Any]:
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

    def _release(self) -> str | None:
        """Release the text that was withheld, at the end. Returns the stop string that it completes."""
        if self._stops is None or not self._is_open:
            return None
        self._is_open = False
        text, hit = self._stops.feed(self._decoder.finish(), len(self.token_ids))
        self._texts.append(text if hit is not None else text + self._stops.finish())
        return hit

    def _ends_with_stop_token(self, detail: Detail) -> bool:
        """Whether the last token is a stop token that is left out of the text."""
        if detail.finish_reason != "stop" or self._params.include_stop_str_in_output:
            return False
        token_id = self.token_ids[-1]
        ends = self._tokenizer.eos_token_ids if self._tokenizer is not None else ()
        return token_id == detail.stop_reason or token_id in self._params.stop_token_ids or token_id in ends
