"""Completion: tokens in, text out, and StopStrings: no part of one is ever shown."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.front.completion import Completion
from engine.front.stop_strings import StopStrings
from engine.input.tokenizer import Tokenizer
from engine.messages import Detail, NewCompletion
from engine.outputs import CompletionOutput, Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams
from tests.engine.tokenizer_folders import make_byte_fallback_folder, make_byte_level_folder

EOS = 1  # </s>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def make_completion(
    tokenizer: Tokenizer | None, prompt: Sequence[int] = (), earlier: Sequence[int] = (), **params: Any
) -> Completion:
    return Completion(0, NewCompletion(0, 0, list(earlier)), SamplingParams(**params), prompt, tokenizer)


def send(completion: Completion, token_ids: list[int], **fields: Any) -> CompletionOutput:
    """Give it the tokens of a step, and return its next delta."""
    completion.token_ids += token_ids
    if fields:
        completion.take(Detail(0, **fields), len(token_ids))
    elif completion.has_stops and (stop := completion.find_stop()) is not None:
        completion.end("stop", stop)
    return completion.make_output(is_delta=True)


def send_each(completion: Completion, token_ids: list[int]) -> list[CompletionOutput]:
    """One token at a time, as long as the request lives."""
    return [send(completion, [each]) for each in token_ids if completion.finish_reason is None]


def make_position(*token_ids: int) -> TokenLogprobs:
    entries = [Logprob(token_id, -0.5 * rank, rank) for rank, token_id in enumerate(token_ids, 1)]
    return TokenLogprobs(entries[0], entries)


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte."""
    table = tokenizer.token_bytes(tokenizer.vocab_size)
    return [table.index(bytes([byte])) for byte in text.encode()]


@pytest.mark.parametrize("more", [{}, {"finish_reason": "length"}])
def test_a_stop_string_inside_a_run_of_tokens_keeps_the_tokens_up_to_it(
    tokenizer: Tokenizer, more: dict[str, Any]
) -> None:
    """Also in the last one, whose own reason it overrides."""
    completion, ids = make_completion(tokenizer, stop=["END"], logprobs=0), spell(tokenizer, "abENDxyz")
    delta = send(completion, ids, logprobs=[make_position(token_id) for token_id in ids], **more)
    assert (delta.text, delta.token_ids) == ("ab", ids[:5])
    assert (delta.finish_reason, delta.stop_reason, completion.token_ids) == ("stop", "END", ids[:5])
    assert delta.logprobs is not None and delta.cumulative_logprob == -2.5
    assert [position.token.token_id for position in delta.logprobs] == ids[:5]


def test_a_stop_string_counts_only_from_min_tokens_and_is_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, stop=".", min_tokens=3, include_stop_str_in_output=True)
    deltas = send_each(completion, spell(tokenizer, ".a.b"))
    assert "".join(delta.text for delta in deltas) == ".a."
    assert deltas[-1].stop_reason == "."


def test_a_stop_string_may_begin_in_tokens_that_were_returned_before(tokenizer: Tokenizer) -> None:
    """An earlier one that is complete was ignored by whoever goes on."""
    earlier = spell(tokenizer, "xENDyE")
    completion = make_completion(tokenizer, earlier=earlier, stop="END")
    delta = send(completion, spell(tokenizer, "ND"))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("", spell(tokenizer, "ND"), "END")
    assert completion.token_ids[: len(earlier)] == earlier


def test_text_held_back_for_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, stop="END")
    assert send(completion, tokenizer.encode("aEN")).text == "a"
    delta = send(completion, [EOS], finish_reason="stop")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("EN", "stop", None)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_an_open_character_is_released_at_the_end(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    completion = make_completion(tokenizer, stop=stop)
    assert send(completion, spell(tokenizer, "🙂")[:1]).text == ""
    completion.end("abort")
    assert completion.make_output(is_delta=True).text == "\ufffd"


STOP = 40  # "F"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize(
    ("params", "fields", "last", "text"),
    [
        ({}, {}, EOS, ""), ({"skip_special_tokens": False}, {}, EOS, ""),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, {}, EOS, "</s>"),
        ({"stop_token_ids": [STOP]}, {"stop_reason": STOP}, STOP, ""), ({}, {}, STOP, "F"),
    ],
)
def test_a_token_that_ends_a_text_is_kept_out_of_it_unless_asked_for(
    tokenizer: Tokenizer, params: dict[str, Any], fields: dict[str, Any], last: int, text: str, stop: Any
) -> None:
    """The last token of a grammar that is finished is text as any other."""
    ids = [*tokenizer.encode("bye"), last]
    delta = send(make_completion(tokenizer, stop=stop, **params), ids, finish_reason="stop", **fields)
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("bye" + text, ids, fields.get("stop_reason"))


def test_tokens_are_named_in_logprobs(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    delta = send(make_completion(tokenizer, logprobs=2), [a], logprobs=[make_position(a, EOS)])
    assert delta.logprobs is not None
    assert [top.decoded_token for top in delta.logprobs[0].top] == ["a", "</s>"]
    assert delta.logprobs[0].token == Logprob(a, -0.5, 1, "a")


def test_a_part_of_a_character_is_named_with_its_bytes(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "🙂")
    delta = send(make_completion(tokenizer, logprobs=0), ids, logprobs=[make_position(each) for each in ids])
    assert delta.text == "🙂" and delta.logprobs is not None
    tokens = [position.token for position in delta.logprobs]
    assert b"".join(token.part or b"" for token in tokens) == "🙂".encode()
    assert {token.decoded_token for token in tokens} == {"\ufffd"}


def test_the_prompt_decides_about_the_first_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_byte_fallback_folder(tmp_path))
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert send(make_completion(tokenizer, tokenizer.encode("hello")), hello).text == " hello"
    assert send(make_completion(tokenizer), hello).text == "hello"


def test_without_a_tokenizer_tokens_pass_and_text_stays_empty() -> None:
    completion = make_completion(None, stop="END", logprobs=0)
    delta = send(completion, [3, 4], logprobs=[make_position(3), make_position(4)])
    assert (delta.text, delta.token_ids) == ("", [3, 4])
    assert delta.logprobs == [make_position(3), make_position(4)]
    assert send(completion, [5], finish_reason="length").finish_reason == "length"


LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(stops: StopStrings, chunks: Iterable[str]) -> tuple[list[str], str | None]:
    """The released pieces and the hit."""
    released = []
    for num_tokens, chunk in enumerate(chunks, 1):
        text, hit = stops.feed(chunk, num_tokens)
        released.append(text)
        if hit is not None:
            return released, hit
    return [*released, stops.finish()], None


def find_first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The obvious way: (start, stop string) of the one that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(text=LETTERS, stops=STOPS, data=st.data())
def test_any_chunking_cuts_at_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    released, hit = cut(StopStrings(stops), chunks)
    first = find_first(text, stops)
    expected = (text, None) if first is None else (text[: first[0]], first[1])
    assert ("".join(released), hit) == expected


@given(text=LETTERS, stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    if find_first(text, stops) is not None:
        return
    released, _ = StopStrings(stops).feed(text)
    prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
    longest = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
    assert released == text[: len(text) - longest]


@pytest.mark.parametrize(
    ("stops", "min_tokens", "chunks", "expected"),
    [
        (["."], 3, ["a.", "b.", "c.", "d."], ("a.b.c", ".")),
        (["abc"], 3, ["a", "b", "c"], ("", "abc")),  # although it began before
        (["ab", "xabyz"], 2, ["xab", "y", "q"], ("xabyq", None)),  # complete before: never
    ],
)
def test_a_stop_string_counts_when_it_is_complete_at_min_tokens(
    stops: list[str], min_tokens: int, chunks: list[str], expected: tuple[str, str | None]
) -> None:
    released, hit = cut(StopStrings(stops, min_tokens=min_tokens), chunks)
    assert ("".join(released), hit) == expected


def test_long_stop_strings_cost_nothing_until_the_text_follows_them() -> None:
    stops = StopStrings(["a" * 1023 + "b"] * 16)
    released, hit = cut(stops, ["a" * 4000, "b"])
    assert ("".join(released), hit) == ("a" * (4000 - 1023), "a" * 1023 + "b")


@pytest.mark.parametrize("reason", ["stop string", "abort", "length"])
def test_tokens_that_begin_no_stop_string_wait_and_are_in_the_text(tokenizer: Tokenizer, reason: str) -> None:
    completion = make_completion(tokenizer, stop=["<end>"])
    words = spell(tokenizer, "a < b\u00e9, ")
    send_each(completion, words)
    quiet = [token_id for token_id in words if token_id in completion.quiet_ids]
    assert tokenizer.decode(quiet) == "a  b, ", "neither the stop string's first character nor parts of characters"
    completion.token_ids += quiet
    if reason == "abort":
        completion.end("abort")
    elif reason == "length":
        completion.take(Detail(0, finish_reason="length"), 0)
    rest = "" if reason != "stop string" else "<"
    text = send(completion, spell(tokenizer, rest)).text
    assert text == "a  b, " and (completion.quiet_ids == frozenset()) is (reason == "stop string")
