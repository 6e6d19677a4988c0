"""InputProcessor: all forms of prompts, invalid requests, and the n completions of a request."""

import asyncio
import math
import threading
import time
from typing import Any, cast

import numpy as np
import pytest

from engine import InvalidRequest, PromptTooLong, SamplingParams
from engine.input.input_processor import (
    INLINE_CHARS,
    LONG_CHARS,
    MAX_BAD_WORD_TOKENS,
    InputProcessor,
    Options,
)
from engine.messages import AddRequest
from grammar import GrammarSpec

VOCAB = 200


class LetterTokenizer:
    """One token per character, and a BOS where special tokens are asked for."""

    max_token_chars = 1

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []  # one for every text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        return [1] * add_special_tokens + [ord(char) for char in text]


def make_processor(max_model_len: int = 100, has_tokenizer: bool = True) -> InputProcessor:
    tokenizer: Any = LetterTokenizer() if has_tokenizer else None
    return InputProcessor(tokenizer, max_model_len, VOCAB)


async def make_request(params: SamplingParams, **options: Any) -> AddRequest:
    return (await make_processor().read("r", [1, 2], params, Options(**options), time.monotonic() - 4.5))[1]


async def make_seeds(params: SamplingParams) -> list[int]:
    message = await make_request(params)
    return [completion.seed for completion in message.completions]


LONG_TEXT = "ab" * INLINE_CHARS


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("ab", "ab", [1, 97, 98]), (LONG_TEXT, LONG_TEXT, [1, *map(ord, LONG_TEXT)]),
        ([5, 6], None, [5, 6]), ((5, 6), None, [5, 6]), (range(3), None, [0, 1, 2]),
        (np.array([5, 6]), None, [5, 6]), ([np.int64(5), 6], None, [5, 6]),
        ({"prompt_token_ids": np.array([5, 6])}, None, [5, 6]), ({"prompt_token_ids": [5, 6]}, None, [5, 6]),
        ({"prompt": "ab"}, "ab", [1, 97, 98]), ({"prompt": "ab", "prompt_token_ids": [5]}, None, [5]),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
async def test_a_prompt_comes_in_several_forms(prompt: Any, text: str | None, ids: list[int]) -> None:
    found = await make_processor().encode(prompt)
    assert found == (text, ids) and found[1] is not prompt, "the caller's list stays the caller's"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [1.0], ["a"], [True], [[1, 2]], {}, {"ids": [1]}, {"prompt": 5}, {"prompt_token_ids": "ab"}, {1, 2},
     b"ab", bytearray(b"ab"), np.array([1.0]), np.array([[1, 2]]), np.array(5), [np.bool_(True)], [np.float32(1)]],
)  # fmt: skip
async def test_anything_else_is_refused_with_the_forms_there_are(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be text, a list of token ids, or") as caught:
        await make_processor().encode(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("content", [{"prompt": "ab"}, {"prompt_token_ids": [5]}])
async def test_a_key_that_nobody_would_read_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="unknown key 'multi_modal_uuids'") as caught:
        await make_processor().encode({**content, "multi_modal_uuids": {}})
    assert caught.value.param == "prompt"


async def test_long_texts_take_turns_and_short_ones_wait_for_none_of_them() -> None:
    input_processor = make_processor(max_model_len=10 * LONG_CHARS)
    assert input_processor._tokenizer is not None
    gate, encode = threading.Event(), input_processor._tokenizer.encode
    begun: list[int] = []

    def wait(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > LONG_CHARS:
            begun.append(len(text))
            assert gate.wait(30)
        return encode(text, add_special_tokens)

    cast(Any, input_processor._tokenizer).encode = wait
    long = [asyncio.ensure_future(input_processor.encode("a" * (LONG_CHARS + i))) for i in range(1, 40)]
    try:
        for _ in range(5):
            await input_processor.encode("b" * (INLINE_CHARS + 1))
        for task in long[1:]:
            task.cancel()  # nobody waits for these any more
        await asyncio.wait(long[1:])
    finally:
        gate.set()
    await long[0]
    await input_processor.encode("c" * (LONG_CHARS + 50))
    assert begun == [LONG_CHARS + 1, LONG_CHARS + 50]


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
async def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenised(is_chat: bool) -> None:
    input_processor = make_processor(max_model_len=100)
    text = "a" * (LONG_CHARS + 1)
    with pytest.raises(
        PromptTooLong, match=rf"prompt is too long: \d+ tokens > 99 maximum; .*{len(text)} characters"
    ):
        if is_chat:
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": text[1:]}]
            await input_processor.encode_chat([{"role": "user", "content": parts}], {})
        else:
            await input_processor.encode(text)
    assert cast(Any, input_processor._tokenizer).threads == []


def test_a_prompt_has_a_token_and_leaves_room_for_one() -> None:
    input_processor = make_processor(max_model_len=100)
    input_processor.check([5] * 99, SamplingParams())
    for length, told in (
        (0, "is empty"),
        (100, "is too long: 100 tokens > 99 maximum; this model's maximum context length is 100 tokens"),
    ):
        with pytest.raises(InvalidRequest, match=f"prompt {told}"):
            input_processor.check([5] * length, SamplingParams())


@pytest.mark.parametrize("token_id", [-1, VOCAB, 10**30])
def test_a_prompt_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"prompt: token id {token_id} is outside .* \(0 to 199\)"):
        make_processor().check([0, VOCAB - 1, token_id], SamplingParams())


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [VOCAB]), ("allowed_token_ids", [3, VOCAB]), ("logit_bias", {VOCAB: 1.0})],
)
def test_a_parameters_id_outside_the_vocabulary_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: token id 200 is outside") as caught:
        make_processor().check([1], SamplingParams(**{field: value}))
    assert caught.value.param == field


async def test_words_and_texts_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="started without a tokenizer: send token ids"):
        await make_processor(has_tokenizer=False).encode("ab")
    for field in ("stop", "bad_words"):
        params = SamplingParams(**{field: ["word"]})  # type: ignore[arg-type]
        make_processor().check([1], params)
        with pytest.raises(InvalidRequest, match=f"{field} needs a tokenizer"):
            make_processor(has_tokenizer=False).check([1], params)


async def test_one_completion_keeps_what_its_request_was_checked_with() -> None:
    params = SamplingParams(seed=9, logit_bias={3: 1.0})
    message = await make_request(params, priority=3, cache_salt="salt")
    params.logit_bias[10**6] = 1.0  # type: ignore[index]
    assert (message.request_id, message.priority, message.cache_salt) == ("r", 3, "salt")
    assert (round(message.age_s, 1), message.prompt_token_ids) == (4.5, [1, 2])
    assert [(each.seed, each.generated_token_ids) for each in message.completions] == [(9, [])]
    assert message.params.logit_bias == {3: 1.0}


async def test_every_completion_of_every_request_has_a_handle_of_its_own() -> None:
    """Also of requests of the same name, and of other engines in the process."""
    requests = [await make_request(SamplingParams(n=3)) for _ in range(4)]
    handles = [completion.handle for message in requests for completion in message.completions]
    assert len(set(handles)) == len(handles) == 12


@pytest.mark.parametrize(
    ("generated", "told"),
    [
        ([[5]], "has 1 lists; there must be n=2"),
        ([[5], [VOCAB]], f"token id {VOCAB} is outside the vocabulary"),
        ([[5], [5] * 8], "has 8 tokens; at most 7 leave room for one more"),
    ],
)
def test_generated_tokens_that_do_not_fit_their_request_are_refused(generated: list[list[int]], told: str) -> None:
    processor, params = make_processor(max_model_len=10), SamplingParams(n=2, max_tokens=20)
    with pytest.raises(InvalidRequest, match=told) as refusal:
        processor.check_generated(generated, [1, 2], params)
    assert refusal.value.param == "generated_token_ids"
    processor.check_generated([[5], [5] * 7], [1, 2], params)
    processor.check_generated([], [1, 2], params)


async def test_the_seeds_of_all_completions_differ_and_are_deterministic() -> None:
    """Also those of neighbouring seeds, and those of no seed; each is one of 63 bits."""
    seeds = [seed for start in range(-1, 20) for seed in await make_seeds(SamplingParams(n=64, seed=start))]
    assert seeds[8 * 64] == 7 and len(set(seeds)) == len(seeds)
    for start in (-(2**63), 2**63 - 1):
        seeds += await make_seeds(SamplingParams(n=3, seed=start))
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[8 * 64 : 9 * 64] == await make_seeds(SamplingParams(n=64, seed=7))
    assert await make_seeds(SamplingParams()) != await make_seeds(SamplingParams())


async def test_a_bad_word_is_banned_at_the_start_and_inside_a_text_once_each() -> None:
    message = await make_request(SamplingParams(bad_words=("ab", " ab", "ab")))
    assert message.bad_word_ids == [[97, 98], [32, 97, 98]]


LETTER_A, END = 97, 1
CHOICES: list[tuple[dict[str, Any], str | None]] = [
    ({"allowed_token_ids": [LETTER_A], "bad_words": ["a"]}, "allowed_token_ids and bad_words"),
    ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids and min_tokens"),
    ({"allowed_token_ids": [END, 5], "stop_token_ids": [5], "min_tokens": 2}, "allowed_token_ids and min_tokens"),
    (
        {"allowed_token_ids": [END, LETTER_A], "bad_words": ["a"], "min_tokens": 1},
        "allowed_token_ids and bad_words and min_tokens",
    ),
    ({}, None),
    ({"bad_words": ["a"]}, None),
    ({"allowed_token_ids": [LETTER_A], "bad_words": ["ab", "aa"]}, None),
    ({"allowed_token_ids": [LETTER_A, 5], "bad_words": ["a"]}, None),
    ({"allowed_token_ids": [END]}, None),
    ({"allowed_token_ids": [END], "min_tokens": 1, "ignore_eos": True}, None),
    ({"allowed_token_ids": [END], "min_tokens": 1, "grammar": GrammarSpec.choice(["x"])}, None),
]


@pytest.mark.parametrize(("fields", "names"), CHOICES)
async def test_parameters_that_leave_no_token_are_refused(fields: dict[str, Any], names: str | None) -> None:
    input_processor, params = (
        InputProcessor(cast(Any, LetterTokenizer()), 100, VOCAB, (END,)),
        SamplingParams(**fields),
    )
    bad_word_ids = await input_processor.encode_bad_words(params)
    if names is None:
        input_processor.check_choice(params, bad_word_ids)
        return
    with pytest.raises(InvalidRequest, match=f"^{names} leave no token") as caught:
        input_processor.check_choice(params, bad_word_ids)
    assert caught.value.param == "allowed_token_ids"


def test_a_vocabulary_that_is_forbidden_as_a_whole_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens leave no token"):
        InputProcessor(None, 100, 3, (0,)).check_choice(SamplingParams(stop_token_ids=(1, 2), min_tokens=1), ())


@pytest.mark.parametrize(("num_words", "is_inline"), [(9, True), (10, False)])
async def test_many_bad_words_are_encoded_in_a_thread(num_words: int, is_inline: bool) -> None:
    tokenizer: Any = LetterTokenizer()
    params = SamplingParams(bad_words=tuple(f"{number:02}" + "x" * 88 for number in range(num_words)))
    found = await InputProcessor(tokenizer, 100, VOCAB).encode_bad_words(params)
    assert len(found) == 2 * num_words
    assert {thread is threading.main_thread() for thread in tokenizer.threads} == {is_inline}


async def test_all_bad_words_together_have_a_limit_of_tokens() -> None:
    """Two forms each, the second with a space in front; nothing is encoded beyond the limit."""
    tokenizer: Any = LetterTokenizer()
    input_processor = InputProcessor(tokenizer, 100, VOCAB)
    words = ["x" * 1023, " ", *(f"{number}" * 100 for number in range(9))]
    assert (sum(map(len, await input_processor.encode_bad_words(SamplingParams(bad_words=tuple(words[:2]))))) == 2048)
    tokenizer.threads.clear()
    with pytest.raises(InvalidRequest, match=f"have 2148 tokens; .* at most {MAX_BAD_WORD_TOKENS}") as caught:
        await input_processor.encode_bad_words(SamplingParams(bad_words=tuple(words)))
    assert caught.value.param == "bad_words"
    assert len(tokenizer.threads) == 4


@pytest.mark.parametrize(
    ("field", "message", "values"),
    [
        ("sampling_params", "must be a SamplingParams, not dict", [{"max_tokens": 3}]),
        ("priority", "must be an integer", ["high", True, 2**31]),
        ("cache_salt", "1 to 1024 characters, not", ["", "x" * 1025]),
        ("cache_salt", "must be a string, not (int|bytes)", [5, b"ab"]),
        ("cache_salt", r"'a\\ud800' is not valid Unicode", ["a\ud800"]),
        ("deadline_s", "must be a number above 0", ["5", True, 0, math.nan]),
        ("deadline_s", "at most 86400 seconds", [86401]),
    ],
)
def test_an_option_of_a_wrong_type_or_value_is_refused_by_name(field: str, message: str, values: Any) -> None:
    Options(-(2**31), "x" * 1024, cast(Any, np.float32(0.5))).check(SamplingParams())
    Options(2**31 - 1, "\N{DESERT}", 86400).check(SamplingParams())
    for value in values:
        params, options = SamplingParams(), {field: value}
        if field == "sampling_params":
            params, options = value, {}
        with pytest.raises(InvalidRequest, match=message) as caught:
            Options(**options).check(params)
        assert caught.value.param == field
