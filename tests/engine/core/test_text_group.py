"""TextGroup: the same text as feeding each of its texts alone, whatever the tokens and whatever is open."""

from __future__ import annotations

import random

import pytest

from engine.core.incremental_text import IncrementalText, WindowedText
from engine.core.text_group import TextGroup, TextStream
from engine.core.token_pieces import TextRule, TokenPieces

PIECES = ["a", " b", "é", "日本", ""]
# Pieces of characters: two bytes of four, the other two, a byte that begins nothing.
BYTES = [b"\xf0\x9f", b"\x98\x80", b"\xff", b"\xe6\x97"]


class Table(TokenPieces):
    """Whole pieces first, then broken ones."""

    def __init__(self) -> None:
        super().__init__(TextRule(is_byte_level=True), lambda token_id: "x")
        self.update(enumerate([*PIECES, *BYTES]))


def make_texts(count: int) -> list[TextStream]:
    """The first continues a prompt that ends in the middle of a character; every fourth reads a window."""
    table = Table()
    texts: list[TextStream] = [IncrementalText(table, [0, 5]) for _ in range(count)]
    texts[3::4] = [WindowedText(lambda ids: "".join(chr(97 + i) for i in ids)) for _ in texts[3::4]]
    return texts


@pytest.mark.parametrize("seed", range(20))
def test_a_group_says_what_its_texts_say_alone(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 9)
    group, alone = TextGroup(make_texts(count)), make_texts(count)
    num_kinds = len(PIECES) + (len(BYTES) if seed % 3 else 0)
    for _ in range(60):
        token_ids = [chance.randrange(num_kinds) for _ in range(count)]
        expected = [text.feed_token(token) for text, token in zip(alone, token_ids, strict=True)]
        assert group.feed(token_ids) == expected


def test_a_group_leaves_its_texts_as_they_would_be_alone() -> None:
    texts, alone = make_texts(4), make_texts(4)
    group = TextGroup(texts)
    for token_ids in ([0, 5, 7, 1], [5, 1, 6, 2]):
        group.feed(token_ids)
        for text, token in zip(alone, token_ids, strict=True):
            text.feed_token(token)
    assert [text.finish() for text in texts] == [text.finish() for text in alone]
