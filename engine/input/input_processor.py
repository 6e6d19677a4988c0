"""InputProcessor: tokenises a request, checks it against the model's limits, and splits it into completions."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine.errors import InvalidRequest, PromptTooLong
from engine.input.chat_messages import read_messages
from engine.input.images.intake import ImageIntake, ImagePrompt
from engine.input.images.source import Source, read_source
from engine.input.tokenizer import Tokenizer
from engine.messages import AdapterRef, AddRequest, ImagePart, NewCompletion
from engine.sampling_params import SamplingParams, find_end_ids, is_unicode

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, object]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")

# Longer texts are tokenised in a thread: at about 1 us a character they would delay the event loop.
INLINE_CHARS = 2000
# Even longer texts share one thread, so that shorter texts never wait for them.
LONG_CHARS = 100_000
NO_IMAGES = "this model does not see images, or cannot with several ranks: send text only"
_CALL_CHARS = 10  # one call of the tokenizer costs as much as this many characters
# Limit over all bad words of a request, each in both forms: every step compares all of these tokens.
MAX_BAD_WORD_TOKENS = 2048
Result = TypeVar("Result")

_PLAIN = SamplingParams()
_long_lane = ThreadPoolExecutor(1, "troupe-long-texts")
# A handle names one completion for the lifetime of the process.
_handles = itertools.count()
_SEED_STEP = 0x9E3779B97F4A7C15  # odd and large: the completions of one request get unrelated seeds


@dataclass(slots=True)
class Options:
    """Options of a request beside its sampling parameters, see `Engine.generate`."""

    priority: int = 0
    cache_salt: str | None = None
    deadline_s: float | None = None
    generated_token_ids: Sequence[Sequence[int]] = ()
    prediction: str | Sequence[int] | None = None
    adapter: AdapterRef | None = None

    def check(self, params: object) -> None:
        """Check what does not depend on the model."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}", "sampling_params"
            )
        priority: object = self.priority
        deadline_s: Any = self.deadline_s
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise InvalidRequest(
                f"priority={priority!r} must be an integer from {-(2**31)} to {2**31 - 1}", "priority"
            )
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)
        if deadline_s is not None:
            is_number = isinstance(deadline_s, Real) and not isinstance(deadline_s, bool)
            if not is_number or not 0 < deadline_s <= 86400:
                raise InvalidRequest(
                    f"deadline_s={deadline_s!r} must be a number above 0 and at most 86400 seconds", "deadline_s"
                )


class InputProcessor:
    """Turns prompts into AddRequest messages; raises InvalidRequest for what the model cannot serve."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int,
        eos_token_ids: tuple[int, ...] = (), images: ImageIntake | None = None, max_logprobs: int = 20,
        uses_predictions: bool = False, saves_blocks: bool = False, refusal: str = "",
    ) -> None:
        self._refusal = refusal  # why the model generates no text; "": it does
        self._max_logprobs = max_logprobs
        self._tokenizer = tokenizer
        self._uses_predictions = uses_predictions
        self._saves_blocks = saves_blocks
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._images = images

    async def encode(self, prompt: Prompt, params: SamplingParams = _PLAIN) -> tuple[str | None, list[int]]:
        """Return (text, token ids) of a prompt given as text, as ids, or as {"prompt_token_ids": ids}.

        With images the ids are an ImagePrompt.
        """
        count = params.truncate_prompt_tokens
        text, ids = await self._encode(prompt, count is not None)
        if count is None:
            return text, ids
        if isinstance(ids, ImagePrompt):
            raise InvalidRequest("truncate_prompt_tokens does not work with images", "truncate_prompt_tokens")
        return text, ids[-(count if count > 0 else self._max_model_len - (params.pooling is None)) :]

    async def _encode(self, prompt: Prompt, is_cut: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, await (self.encode_text(prompt) if is_cut else self._encode_prompt(prompt))
        unknown: list[object] = []
        content: object = prompt
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in PROMPT_KEYS]
            text, content = prompt.get("prompt"), prompt.get("prompt_token_ids")
            sources = list_sources(prompt.get("multi_modal_data"))
            if content is None and isinstance(text, str) and not unknown:
                return text, await self._insert(await self._encode_prompt(text), sources)
            if sources and (given := _read_ids(content)) is not None:
                return None, await self._insert(given, sources)
        if isinstance(content, ImagePrompt):
            return None, content
        ids = None if unknown else _read_ids(content)
        if ids is None:
            more = f"; it has the unknown key {unknown[0]!r}" if unknown else ""
            raise InvalidRequest(
                f"prompt must be text, a list of token ids, or {{'prompt_token_ids': [...]}}{more}", "prompt"
            )
        return None, ids

    async def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; a long text is tokenised in a thread."""
        if self._tokenizer is None:
            raise InvalidRequest("this engine was started without a tokenizer: send token ids", "prompt")
        work = partial(self._tokenizer.encode, text, add_special_tokens)
        return work() if len(text) <= INLINE_CHARS else await run_aside(work, len(text))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        """Return the token ids of a conversation under the model's chat template; the work is done in a thread."""
        tokenizer = self._tokenizer
        self._check_text()
        if tokenizer is None:
            raise InvalidRequest(
                "this engine was started without a tokenizer: it cannot render messages", "messages"
            )
        num_chars = count_chars(messages)
        self._check_length(num_chars, "messages")

        def render() -> tuple[list[int], list[Source]]:
            read, sources = read_messages(messages)
            if sources and self._images is None:
                raise InvalidRequest(NO_IMAGES, "messages")
            return tokenizer.encode_chat(read, **options), sources

        return await self._insert(*await run_aside(render, num_chars))

    async def _insert(self, token_ids: list[int], sources: Sequence[Source]) -> list[int]:
        """Return the prompt with its images, if there are any."""
        if not sources:
            return token_ids
        if self._images is None:
            raise InvalidRequest(NO_IMAGES, "prompt")
        return await self._images.insert(token_ids, sources)

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise InvalidRequest if the request does not fit this model."""
        if params.pooling is None:
            self._check_text()
        num_tokens = len(prompt_token_ids)
        if num_tokens == 0:
            raise InvalidRequest("prompt is empty: it must have at least one token", "prompt")
        if params.pooling is not None:  # a vector needs no room for an output
            if num_tokens > self._max_model_len:
                message = f"prompt has {num_tokens} tokens; this model takes at most {self._max_model_len}"
                raise PromptTooLong(message, "prompt")
        elif num_tokens >= self._max_model_len:
            raise PromptTooLong(
                _say_too_long(num_tokens, self._max_model_len) + ", of which at least one is for the output",
                "prompt",
            )
        for name in ("logprobs", "prompt_logprobs"):
            count, limit = getattr(params, name), self._max_logprobs
            if count is not None and limit >= 0 and not 0 <= count <= limit:
                raise InvalidRequest(
                    f"{name}={count} must be an integer from 0 to {limit}; the setting max_logprobs raises it, and -1 "
                    "is the whole vocabulary",
                    name,
                )
        if params.saves_blocks and not self._saves_blocks:
            raise InvalidRequest(
                "kv_transfer_params.do_remote_decode needs a server whose kv_transfer_config saves blocks",
                "kv_transfer_params",
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

    def _check_text(self) -> None:
        if self._refusal:
            raise InvalidRequest(self._refusal, "model")

    async def encode_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of each bad word, without and with a leading space.

        Raises:
            InvalidRequest: the bad words have too many tokens in total.
        """
        forms = dict.fromkeys(form for word in params.bad_words for form in (word, " " + word.lstrip()))
        if sum(len(form) + _CALL_CHARS for form in forms) <= INLINE_CHARS:
            return self._encode_forms(forms)
        return await asyncio.to_thread(self._encode_forms, forms)

    async def encode_prediction(self, prediction: str | Sequence[int]) -> list[int]:
        """Return the token ids of the expected output, at most as many as the model can generate."""
        if isinstance(prediction, str):
            self._check_length(len(prediction), "prediction")
            ids: list[int] | None = await self.encode_text(prediction, add_special_tokens=False)
        else:
            ids = _read_ids(prediction)
        if ids is None:
            raise InvalidRequest("prediction must be text or a list of token ids", "prediction")
        self._check_ids("prediction", ids)
        return ids[: self._max_model_len]

    def check_choice(self, params: SamplingParams, bad_word_ids: Sequence[Sequence[int]]) -> None:
        """Raise InvalidRequest if the parameters forbid every first token."""
        forbidden = {word[0] for word in bad_word_ids if len(word) == 1}
        fields = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
        # With a grammar, min_tokens yields where the grammar allows only EOS.
        if params.min_tokens > 0 and params.grammar is None:
            forbidden |= find_end_ids(params, self._eos_token_ids)
            fields.append("min_tokens")
        allowed = params.allowed_token_ids or range(self._vocab_size)
        if all(token_id in forbidden for token_id in allowed):
            raise InvalidRequest(
                f"{' and '.join(fields)} leave no token to begin with; at least one must be allowed",
                fields[0],
            )

    def check_generated(
        self, generated: Sequence[Sequence[int]], prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Hold the tokens that completions have produced before to the request."""
        if not generated:
            return
        if len(generated) != params.n:
            raise InvalidRequest(
                f"generated_token_ids has {len(generated)} lists; there must be n={params.n}",
                "generated_token_ids",
            )
        room = self._max_model_len - len(prompt_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        for ids in generated:
            self._check_ids("generated_token_ids", ids)
            if len(ids) >= limit:
                raise InvalidRequest(
                    f"generated_token_ids has {len(ids)} tokens; at most {limit - 1} leave room for one more",
                    "generated_token_ids",
                )

    async def read(
        self, request_id: str, prompt: Prompt, params: SamplingParams, options: Options, arrival_time: float
    ) -> tuple[str | None, AddRequest]:
        """Return the text of a prompt, if it has one, and the request.

        Its n completions share the prompt's blocks through the prefix cache.

        Raises:
            InvalidRequest: the request cannot be served.
        """
        text, token_ids = await self.encode(prompt, params)
        self.check(token_ids, params)
        if options.generated_token_ids:
            self.check_generated(options.generated_token_ids, token_ids, params)
        bad_word_ids = await self.encode_bad_words(params) if params.bad_words else []
        if bad_word_ids or params.allowed_token_ids is not None or params.min_tokens:
            self.check_choice(params, bad_word_ids)
        prediction_ids = []
        if options.prediction is not None and self._uses_predictions:
            prediction_ids = await self.encode_prediction(options.prediction)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        generated = options.generated_token_ids or [[]] * params.n
        request = AddRequest(
            request_id,
            token_ids,
            self._fix_params(params),
            [
                NewCompletion(next(_handles), (seed + index * _SEED_STEP) % 2**63, list(generated[index]))
                for index in range(params.n)
            ],
            time.monotonic() - arrival_time,
            options.priority,
            options.cache_salt,
            bad_word_ids,
            prediction_ids,
            options.adapter,
            [salt_image(each, options.cache_salt) for each in getattr(token_ids, "images", ())],
        )
        return text, request

    def _fix_params(self, params: SamplingParams) -> SamplingParams:
        """Return them with -1 as the number of all tokens, and a copy of logit_bias, which the caller could change."""
        if params.logprobs != -1 != params.prompt_logprobs and not params.logit_bias:
            return params
        counts = [self._vocab_size if each == -1 else each for each in (params.logprobs, params.prompt_logprobs)]
        return replace(params, logprobs=counts[0], prompt_logprobs=counts[1])

    async def _encode_prompt(self, text: str) -> list[int]:
        self._check_length(len(text), "prompt")
        return await self.encode_text(text)

    def _check_length(self, num_chars: int, name: str) -> None:
        """Reject a text before tokenising it if no tokenisation could fit the model."""
        if num_chars <= LONG_CHARS or self._tokenizer is None:
            return
        limit = self._max_model_len * self._tokenizer.max_token_chars
        if num_chars > limit:
            raise PromptTooLong(
                _say_too_long(-(-num_chars // self._tokenizer.max_token_chars), self._max_model_len)
                + f": {name} has {num_chars} characters, and they hold at most {limit}",
                name,
            )

    def _encode_forms(self, forms: Iterable[str]) -> list[list[int]]:
        found: dict[tuple[int, ...], None] = {}
        num_tokens = 0
        for form in forms:
            assert self._tokenizer is not None, "checked above"
            ids = tuple(self._tokenizer.encode(form, add_special_tokens=False))
            if not ids or ids in found:
                continue
            found[ids] = None
            num_tokens += len(ids)
            if num_tokens > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words: the first {len(found)} forms (each word without and with a leading space) "
                    f"have {num_tokens} tokens; all forms together may have at most {MAX_BAD_WORD_TOKENS}",
                    "bad_words",
                )
        return [list(ids) for ids in found]

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"{name}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})", name
            )


def list_sources(data: object) -> list[Source]:
    """Return the images of a prompt's multi_modal_data, which is vLLM's {"image": image or list of images}."""
    if data is None:
        return []
    if not isinstance(data, Mapping) or any(key != "image" for key in data):
        raise InvalidRequest(
            'multi_modal_data must be {"image": ...}; other media are not supported', "prompt"
        )
    given = data.get("image", [])
    found = list(given) if isinstance(given, list | tuple) else [given]
    return [read_source("multi_modal_data", {"type": "image", "image": each}) for each in found]


def salt_image(image: ImagePart, salt: str | None) -> ImagePart:
    """Return the image with a digest that depends on the salt, so that caches do not show it to other tenants."""
    if salt is None:
        return image
    digest = hashlib.sha256(image.digest + salt.encode()).digest()
    return msgspec.structs.replace(image, digest=digest)


async def run_aside(work: Callable[[], Result], num_chars: int) -> Result:
    """Run work proportional to text length in a thread. Long work is skipped if it is cancelled before it starts."""
    if num_chars <= LONG_CHARS:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_long_lane, work)


def count_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the characters of all message contents; the messages need not be valid."""
    num_chars = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        num_chars += sum(len(text) for text in texts if isinstance(text, str))
    return num_chars


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt must be a string, not {type(salt).__name__}", "cache_salt")
    if not 1 <= len(salt) <= 1024:
        raise InvalidRequest(f"cache_salt must have 1 to 1024 characters, not {len(salt)}", "cache_salt")
    if not is_unicode(salt):
        raise InvalidRequest(f"cache_salt={salt[:40]!r} is not valid Unicode", "cache_salt")


def _read_ids(ids: object) -> list[int] | None:
    """Copy token ids given as a sequence or an array; None for anything else."""
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    # bytes are a sequence of integers, but never meant as token ids
    if isinstance(ids, bytes | bytearray) or not isinstance(ids, Sequence):
        return None
    if all(type(each) is int for each in ids):
        return list(ids)
    copied = [each.item() if isinstance(each, np.integer) else each for each in ids]
    return copied if all(type(each) is int for each in copied) else None


def _say_too_long(num_tokens: int, max_model_len: int) -> str:
    """Return the sentence by which OpenAI's and Anthropic's clients know that they have to shorten a conversation."""
    return (
        f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum; "
        f"this model's maximum context length is {max_model_len} tokens"
    )
