"""IncrementalText, WindowedText: the deltas join to the full decode and never split a character."""

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.input.incremental_text import REPLACEMENT, WindowedText
from engine.input.tokenizer import Tokenizer
from tests.engine.tokenizer_folders import (
    make_byte_fallback_folder,
    make_byte_level_folder,
    make_metaspace_folder,
    make_word_piece_folder,
)

MIXED = "Hello wörld, e\u0301 日本語 🙂👩‍👩‍👧 नमस्ते  two\n\nend "


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    makers = (make_byte_level_folder, make_byte_fallback_folder, make_metaspace_folder, make_word_piece_folder)
    names = ("byte_level", "byte_fallback", "metaspace", "word_piece")
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer(make(root / name)) for name, make in zip(names, makers, strict=True)}


@pytest.fixture(scope="module")
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


@pytest.fixture(scope="module")
def byte_fallback(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_fallback"]


@pytest.fixture(scope="module")
def word_piece(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["word_piece"]


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    """The deltas of one token at a time, and of the end."""
    text = tokenizer.make_text(prompt, skip_special_tokens)
    return [*(text.feed([token_id]) for token_id in ids), text.finish()]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    backend = tokenizer._backend
    return [backend.token_to_id(token) for token in tokens]


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_ids_join_to_the_decode(
    tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(stream(tokenizer, ids, (), skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=40)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_texts_and_tokens_join_to_the_decode_in_byte_fallback_tokens(
    byte_fallback: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    texts = st.text(max_size=6).map(lambda text: byte_fallback.encode(text, add_special_tokens=False))
    tokens = st.integers(259, byte_fallback.vocab_size + 3).map(lambda token_id: [token_id])
    ids = list(chain.from_iterable(data.draw(st.lists(texts | tokens, max_size=12))))
    assert "".join(stream(byte_fallback, ids, (), skip)) == byte_fallback.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
def test_any_ids_in_byte_fallback_tokens_give_each_broken_byte_one_replacement(
    byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(3, byte_fallback.vocab_size - 1), max_size=20))
    table = byte_fallback.token_bytes(byte_fallback.vocab_size)
    text = "".join(stream(byte_fallback, [*ids_of(byte_fallback, "▁▁"), *ids]))[1:]
    whole = b"".join(table[token_id] for token_id in ids).decode("utf-8", "surrogateescape")
    assert text == "".join(REPLACEMENT if "\udc80" <= char <= "\udcff" else char for char in whole)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_delta_holds_a_part_of_a_character_whatever_the_chunks(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    ids = tokenizers[name].encode(MIXED)
    for size in (1, 2, 3, 7, len(ids)):
        text = tokenizers[name].make_text()
        deltas = [text.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(deltas) + text.finish() == MIXED
        assert not any(REPLACEMENT in delta for delta in deltas)


@pytest.mark.parametrize(
    ("tokens", "deltas"),
    [
        (["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"] * 2, ["", "", "", "🙂"] * 2),
        (["<0xC3>", "<0xA9>", "<0xFF>"], ["", "é", "\ufffd"]),
    ],
)
def test_a_character_comes_out_with_its_last_byte_and_stays(
    byte_fallback: Tokenizer, tokens: list[str], deltas: list[str]
) -> None:
    assert stream(byte_fallback, ids_of(byte_fallback, *tokens)) == [*deltas, ""]


def test_a_replacement_character_in_the_text_is_not_held_back(byte_level: Tokenizer) -> None:
    text = byte_level.make_text()
    assert text.feed(byte_level.encode(REPLACEMENT)) == REPLACEMENT


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_the_first_space_is_kept_after_a_visible_prompt(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    prompt = tokenizers[name].encode("hello")
    hello = tokenizers[name].encode(" hello", add_special_tokens=False)[-1:]
    whole = tokenizers[name].decode([*prompt, *hello])
    assert "".join(stream(tokenizers[name], hello, prompt)) == whole[len("hello") :]


def test_the_first_space_is_dropped_after_a_prompt_of_special_tokens(byte_fallback: Tokenizer) -> None:
    output = byte_fallback.encode("hello", add_special_tokens=False)
    assert "".join(stream(byte_fallback, output, [1])) == "hello"
    assert "".join(stream(byte_fallback, output, [1], skip_special_tokens=False)) == " hello"


def test_a_character_begun_by_the_prompt_is_completed_by_the_output(byte_level: Tokenizer) -> None:
    first, *rest = ids_of(byte_level, "ð", "Ł", "Ļ", "Ĥ")
    prompt = [*byte_level.encode("hello"), first]
    assert stream(byte_level, rest, prompt) == ["", "", "🙂", ""]


def test_special_tokens_are_skipped_or_shown_and_other_added_ones_are_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<s>b</s><tool_call>   x日本語です")
    assert "".join(stream(byte_level, ids)) == "ab<tool_call>   x日本語です"
    assert "".join(stream(byte_level, ids, (), False)) == "a<s>b</s><tool_call>   x日本語です"


def test_another_decoder_streams_through_a_window(word_piece: Tokenizer) -> None:
    ids = [*word_piece.encode("hello worlds, hellos 日本"), *word_piece.encode("</s>hello")]
    assert isinstance(word_piece.make_text(), WindowedText)
    assert "".join(stream(word_piece, ids)) == word_piece.decode(ids)
    assert "".join(stream(word_piece, ids, (), False)) == word_piece.decode(ids, skip_special_tokens=False)
    assert stream(word_piece, word_piece.encode("world"), word_piece.encode("hello")) == [" world", ""]


@given(text=st.text(max_size=20))
def test_a_window_over_bytes_never_shows_a_part_of_a_character(text: str) -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    window = WindowedText(decode)
    deltas = [*(window.feed([byte]) for byte in text.encode()), window.finish()]
    assert "".join(deltas) == text
    assert all(delta in text for delta in deltas)


def test_a_window_forgets_skipped_tokens(word_piece: Tokenizer) -> None:
    hello, end = word_piece.encode("hello</s>")
    text = word_piece.make_text()
    assert text.feed([hello, *[end] * 500, hello]) == "hello hello"


def test_a_window_gives_up_on_bytes_that_never_become_a_character() -> None:
    window = WindowedText(lambda ids: bytes(ids).decode(errors="replace"))
    deltas = [window.feed([0xFF]) for _ in range(100)]
    assert sum(map(len, deltas)) >= 90
