"""Intake: prompts in every form, what is refused at the door, and how n completions are told apart."""

from __future__ import annotations

from typing import Any

import pytest

from engine import InvalidRequest, SamplingParams
from engine.intake import INLINE_CHARS, Intake

VOCAB = 200


class LetterTokenizer:
    """One token per character, and a BOS where special tokens are asked for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(char) for char in text]


def make_intake(max_model_len: int = 100, has_tokenizer: bool = True) -> Intake:
    tokenizer: Any = LetterTokenizer() if has_tokenizer else None
    return Intake(tokenizer, max_model_len, VOCAB)


def split_seeds(params: SamplingParams) -> list[int]:
    return [message.seed for message in make_intake().split("r", [1, 2], params, 0, None)]


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("ab", "ab", [1, 97, 98]),
        ([5, 6], None, [5, 6]),
        ((5, 6), None, [5, 6]),
        (range(3), None, [0, 1, 2]),
        ({"prompt_token_ids": [5, 6]}, None, [5, 6]),
        ({"prompt": "ab"}, "ab", [1, 97, 98]),
        ({"prompt": "ab", "prompt_token_ids": [5]}, None, [5]),
    ],
)
async def test_a_prompt_comes_in_several_forms(prompt: Any, text: str | None, ids: list[int]) -> None:
    assert await make_intake().encode(prompt) == (text, ids)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [1.0], ["a"], [True], [[1, 2]], {}, {"ids": [1]}, {"prompt": 5}, {"prompt_token_ids": "ab"}, {1, 2},
     b"ab", bytearray(b"ab")],
)  # fmt: skip
async def test_anything_else_is_refused_with_the_forms_there_are(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be text, a list of token ids, or") as caught:
        await make_intake().encode(prompt)
    assert caught.value.param == "prompt"


async def test_a_long_text_is_encoded_the_same_way_in_a_thread() -> None:
    text = "ab" * INLINE_CHARS
    assert (await make_intake().encode(text))[1] == LetterTokenizer().encode(text)


async def test_the_callers_list_is_copied() -> None:
    ids = [5, 6]
    _, kept = await make_intake().encode(ids)
    ids.append(7)
    assert kept == [5, 6]


async def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="started without a tokenizer: give token ids"):
        await make_intake(has_tokenizer=False).encode("ab")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        make_intake().check([], SamplingParams())


def test_a_prompt_must_leave_room_for_one_token() -> None:
    intake = make_intake(max_model_len=100)
    intake.check([5] * 99, SamplingParams())
    with pytest.raises(InvalidRequest, match="prompt has 100 tokens; this model takes at most 99"):
        intake.check([5] * 100, SamplingParams())


@pytest.mark.parametrize("token_id", [-1, VOCAB, 10**30])
def test_a_prompt_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"prompt: token id {token_id} is outside .* \(0 to 199\)"):
        make_intake().check([0, VOCAB - 1, token_id], SamplingParams())


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [VOCAB]), ("allowed_token_ids", [3, VOCAB]), ("logit_bias", {VOCAB: 1.0})],
)
def test_a_parameters_id_outside_the_vocabulary_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: token id 200 is outside") as caught:
        make_intake().check([1], SamplingParams(**{field: value}))
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_words_need_a_tokenizer(field: str) -> None:
    params = SamplingParams(**{field: ["word"]})  # type: ignore[arg-type]
    make_intake().check([1], params)
    with pytest.raises(InvalidRequest, match=f"{field} needs a tokenizer"):
        make_intake(has_tokenizer=False).check([1], params)


def test_one_completion_keeps_the_name_of_its_request() -> None:
    (message,) = make_intake().split("r", [1, 2], SamplingParams(seed=9), 3, "salt", 4.5)
    assert (message.request_id, message.priority, message.cache_salt) == ("r", 3, "salt")
    assert (message.arrival_time, message.seed, message.prompt_token_ids) == (4.5, 9, [1, 2])


def test_n_completions_have_names_of_their_own() -> None:
    messages = make_intake().split("r", [1, 2], SamplingParams(n=3), 0, None, 4.5)
    assert [message.request_id for message in messages] == ["r#0", "r#1", "r#2"]
    assert all(message.params.n == 1 for message in messages)


def test_the_seeds_of_n_completions_differ_and_are_deterministic() -> None:
    seeds = split_seeds(SamplingParams(n=64, seed=7))
    assert seeds[0] == 7
    assert len(set(seeds)) == 64
    assert seeds == split_seeds(SamplingParams(n=64, seed=7))


def test_neighbouring_seeds_share_no_completion() -> None:
    seeds = [seed for start in range(20) for seed in split_seeds(SamplingParams(n=64, seed=start))]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_every_seed_becomes_one_of_63_bits(seed: int) -> None:
    assert all(0 <= each < 2**63 for each in split_seeds(SamplingParams(n=3, seed=seed)))


def test_without_a_seed_every_request_gets_a_fresh_one() -> None:
    assert split_seeds(SamplingParams()) != split_seeds(SamplingParams())


def test_a_bad_word_is_banned_at_the_start_and_inside_a_text() -> None:
    (message,) = make_intake().split("r", [1], SamplingParams(bad_words=("ab",)), 0, None)
    assert message.bad_word_ids == ((97, 98), (32, 97, 98))


def test_the_forms_of_bad_words_are_told_once() -> None:
    (message,) = make_intake().split("r", [1], SamplingParams(bad_words=("a", " a", "a")), 0, None)
    assert message.bad_word_ids == ((97,), (32, 97))
