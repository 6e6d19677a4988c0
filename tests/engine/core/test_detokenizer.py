"""Detokenizer: tokens of many requests in, text deltas out, stop strings found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core.detokenizer import Detokenizer, TextDelta
from engine.messages import RequestTokens
from engine.outputs import Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.engine.tokenizer_folders import make_byte_fallback_folder, make_byte_level_folder

EOS = 1  # </s>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def make_detokenizer(tokenizer: Tokenizer | None, *request_ids: str, **params: Any) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer)
    for request_id in request_ids or ("r",):
        detokenizer.add(request_id, SamplingParams(**params), [])
    return detokenizer


def send(detokenizer: Detokenizer, token_ids: list[int], **fields: Any) -> TextDelta:
    delta = detokenizer.process(RequestTokens(fields.pop("request_id", "r"), token_ids, **fields))
    assert delta is not None
    return delta


def send_each(detokenizer: Detokenizer, token_ids: list[int]) -> list[TextDelta]:
    """One token at a time, as long as the request lives."""
    deltas = (detokenizer.process(RequestTokens("r", [token_id])) for token_id in token_ids)
    return [delta for delta in deltas if delta is not None]


def make_position(*token_ids: int) -> TokenLogprobs:
    entries = [Logprob(token_id, -0.5 * rank, rank) for rank, token_id in enumerate(token_ids, 1)]
    return TokenLogprobs(entries[0], tuple(entries))


def test_deltas_carry_text_and_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer)
    ids = tokenizer.encode("hello wörld 🙂")
    deltas = [send(detokenizer, [token_id]) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "hello wörld 🙂"
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in ids]
    assert {delta.finish_reason for delta in deltas} == {None}


def test_requests_do_not_mix(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, "a", "b")
    first, *rest = tokenizer.encode("é", add_special_tokens=False) + tokenizer.encode("🙂")
    assert send(detokenizer, [first], request_id="a").text in ("é", "")
    assert send(detokenizer, tokenizer.encode("x"), request_id="b").text == "x"
    assert send(detokenizer, rest, request_id="a").text.endswith("🙂")


def test_unknown_and_removed_requests_are_ignored(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer)
    detokenizer.remove("r")
    detokenizer.remove("never seen")
    assert detokenizer.process(RequestTokens("r", [5])) is None


def test_a_finished_request_is_forgotten(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer)
    assert send(detokenizer, tokenizer.encode("end"), finish_reason="length").finish_reason == "length"
    assert detokenizer.process(RequestTokens("r", [5])) is None


def test_a_stop_string_over_several_tokens_ends_the_request(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop="#END#")
    ids = [tokenizer.encode(char)[0] for char in "ab#END#more"]
    deltas = send_each(detokenizer, ids)
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "", "", ""]
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason, last.stopped_by_string) == ("stop", "#END#", True)
    assert last.token_ids == [ids[6]]


def test_a_stop_string_inside_a_run_of_tokens_keeps_the_tokens_up_to_it(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop=["END"], logprobs=0)
    ids = [tokenizer.encode(char)[0] for char in "abENDxyz"]
    delta = send(detokenizer, ids, logprobs=[make_position(token_id) for token_id in ids])
    assert (delta.text, delta.token_ids) == ("ab", ids[:5])
    assert delta.logprobs is not None
    assert [position.token.token_id for position in delta.logprobs] == ids[:5]


def test_the_stop_string_stays_in_the_text_when_asked_for(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop="END", include_stop_str_in_output=True)
    assert send(detokenizer, tokenizer.encode("aEND more")).text == "aEND"


def test_a_stop_string_counts_only_from_min_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop=".", min_tokens=3)
    ids = [tokenizer.encode(char)[0] for char in ".a.b"]
    deltas = send_each(detokenizer, ids)
    assert "".join(delta.text for delta in deltas) == ".a"
    assert deltas[-1].stop_reason == "."


def test_a_stop_string_in_the_last_token_overrides_length(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop="END")
    delta = send(detokenizer, tokenizer.encode("aEND"), finish_reason="length")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "END")


def test_text_held_back_for_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop="END")
    assert send(detokenizer, tokenizer.encode("aEN")).text == "a"
    delta = send(detokenizer, [EOS], finish_reason="stop")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("EN", "stop", None)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_an_open_character_is_released_at_the_end(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    detokenizer = make_detokenizer(tokenizer, stop=stop)
    first_byte = tokenizer.token_bytes(tokenizer.vocab_size).index(b"\xf0")
    assert send(detokenizer, [first_byte]).text == ""
    assert send(detokenizer, [], finish_reason="abort").text == "\ufffd"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_end_of_sequence_token_is_kept_out_of_the_text(
    tokenizer: Tokenizer, skip_special_tokens: bool
) -> None:
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    ids = [*tokenizer.encode("bye"), EOS]
    delta = send(detokenizer, ids, finish_reason="stop")
    assert (delta.text, delta.token_ids) == ("bye", ids)


def test_the_end_of_sequence_token_is_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False, include_stop_str_in_output=True)
    assert send(detokenizer, [*tokenizer.encode("bye"), EOS], finish_reason="stop").text == "bye</s>"


def test_a_stop_token_is_kept_out_of_the_text(tokenizer: Tokenizer) -> None:
    stop_id = tokenizer.encode("!")[0]
    detokenizer = make_detokenizer(tokenizer, stop_token_ids=[stop_id])
    ids = [*tokenizer.encode("bye"), stop_id]
    delta = send(detokenizer, ids, finish_reason="stop", stop_reason=stop_id)
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("bye", ids, stop_id)


def test_an_ordinary_last_token_of_a_finished_grammar_is_text(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer)
    assert send(detokenizer, tokenizer.encode('{"a"}'), finish_reason="stop").text == '{"a"}'


def test_tokens_are_named_in_logprobs_and_prompt_logprobs(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, logprobs=2, prompt_logprobs=1)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    delta = send(detokenizer, [a], logprobs=[make_position(a, EOS)], prompt_logprobs=[None, make_position(b)])
    assert delta.logprobs is not None and delta.prompt_logprobs is not None
    assert [top.decoded_token for top in delta.logprobs[0].top] == ["a", "</s>"]
    assert delta.logprobs[0].token == Logprob(a, -0.5, 1, "a")
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1] is not None and delta.prompt_logprobs[1].token.decoded_token == "b"


def test_a_part_of_a_character_is_named_with_its_bytes(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, logprobs=0)
    table = tokenizer.token_bytes(tokenizer.vocab_size)
    ids = [table.index(bytes([byte])) for byte in "🙂".encode()]
    delta = send(detokenizer, ids, logprobs=[make_position(token_id) for token_id in ids])
    assert delta.text == "🙂" and delta.logprobs is not None
    tokens = [position.token for position in delta.logprobs]
    assert b"".join(token.part or b"" for token in tokens) == "🙂".encode()
    assert {token.decoded_token for token in tokens} == {"\ufffd"}


def test_an_error_passes_through(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer, stop="END")
    delta = send(detokenizer, tokenizer.encode("aEND"), finish_reason="error", error="broke")
    assert (delta.text, delta.finish_reason, delta.error) == ("a", "error", "broke")


def test_the_prompt_decides_about_the_first_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_byte_fallback_folder(tmp_path))
    detokenizer = Detokenizer(tokenizer)
    detokenizer.add("r", SamplingParams(), tokenizer.encode("hello"))
    detokenizer.add("first", SamplingParams(), [])
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert send(detokenizer, hello).text == " hello"
    assert send(detokenizer, hello, request_id="first").text == "hello"


def test_without_a_tokenizer_tokens_pass_and_text_stays_empty() -> None:
    detokenizer = make_detokenizer(None, stop="END", logprobs=0)
    delta = send(detokenizer, [3, 4], logprobs=[make_position(3), make_position(4)])
    assert (delta.text, delta.token_ids) == ("", [3, 4])
    assert delta.logprobs == [make_position(3), make_position(4)]
    assert send(detokenizer, [5], finish_reason="length").finish_reason == "length"
