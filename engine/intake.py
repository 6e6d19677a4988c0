"""Intake: what happens to a request before it is accepted. It is tokenised, checked against the model, and split."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.errors import InvalidRequest
from engine.messages import AddRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]

# Longer texts are tokenised in a thread: at about 1 us a character the loop would feel them.
INLINE_CHARS = 2000
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, far from 0: siblings of one request get unrelated seeds


class Intake:
    """Turns prompts into AddRequest messages, or into InvalidRequest."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    async def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt given as text, as ids, or as {"prompt_token_ids": ids}."""
        if isinstance(prompt, str):
            return prompt, await self._encode_text(prompt)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, Mapping) and ids is None and isinstance(prompt.get("prompt"), str):
            return await self.encode(str(prompt["prompt"]))
        is_bytes = isinstance(ids, bytes | bytearray)  # a sequence of integers, and never meant as ids
        if is_bytes or not isinstance(ids, Sequence) or not all(type(each) is int for each in ids):
            raise InvalidRequest(
                "prompt must be text, a list of token ids, or {'prompt_token_ids': [...]}", "prompt"
            )
        return None, list(ids)

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise InvalidRequest where the request does not fit this model."""
        num_tokens = len(prompt_token_ids)
        if num_tokens == 0:
            raise InvalidRequest("prompt is empty: it must have at least one token", "prompt")
        if num_tokens >= self._max_model_len:
            raise InvalidRequest(
                f"prompt has {num_tokens} tokens; this model takes at most {self._max_model_len - 1} "
                f"(max_model_len {self._max_model_len}, one of them for the answer)",
                "prompt",
            )
        self._check_ids("prompt", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", tuple(params.logit_bias))
        if self._tokenizer is None:
            for name in ("stop", "bad_words", "grammar"):
                if getattr(params, name):
                    raise InvalidRequest(
                        f"{name} needs a tokenizer; this engine was started without one", name
                    )

    def split(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        arrival_time: float | None = None,
    ) -> list[AddRequest]:
        """One message per completion; they share the prompt's blocks through the prefix cache."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        single = params if params.n == 1 else replace(params, n=1)
        bad_word_ids = self._encode_bad_words(params)
        return [
            AddRequest(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prompt_token_ids,
                params=single,
                seed=(seed + index * _SEED_STEP) % 2**63,
                arrival_time=time.monotonic() if arrival_time is None else arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                bad_word_ids=bad_word_ids,
            )
            for index in range(params.n)
        ]

    async def _encode_text(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("this engine was started without a tokenizer: give token ids", "prompt")
        if len(text) <= INLINE_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the start of a text and, with a space before it, inside one."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            assert self._tokenizer is not None, "checked above"
            for form in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(form, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"{name}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})", name
            )
