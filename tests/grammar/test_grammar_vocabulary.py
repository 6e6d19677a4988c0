"""Vocabulary: ids, widths, EOS."""

import dataclasses

import numpy as np
import pytest

from grammar import Vocabulary, allocate_bitmask


def test_size_counts_padding_and_words_cover_it():
    vocabulary = Vocabulary([b"a"] * 33 + [b""], [33])
    assert (vocabulary.size, vocabulary.num_words) == (34, 2)


def test_eos_bytes_are_ignored():
    assert Vocabulary([b"a", b"</s>"], [1]).token_bytes == (b"a", b"")


def test_equal_tokens_give_equal_hashes_and_other_borders_do_not():
    assert Vocabulary([b"ab", b"c", b""], [2]) == Vocabulary((b"ab", b"c", b"x"), (2, 2))
    assert Vocabulary([b"ab", b"c", b""], [2]).hash != Vocabulary([b"a", b"bc", b""], [2]).hash


def test_a_vocabulary_cannot_be_changed():
    vocabulary = Vocabulary([b"a", b""], [1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        vocabulary.eos_token_ids = (0,)
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.eos_mask[0] = 0


@pytest.mark.parametrize("eos", [[], [2], [-1]])
def test_eos_ids_must_exist(eos):
    with pytest.raises(ValueError, match="EOS"):
        Vocabulary([b"a", b""], eos)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
def test_a_fresh_bitmask_allows_exactly_the_vocabulary(size):
    bitmask = allocate_bitmask(2, size)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
    assert bitmask.dtype == np.int32
    assert bits[:, :size].all()
    assert not bits[:, size:].any()


def test_special_tokens_are_named_and_are_no_text():
    vocabulary = Vocabulary([b"a", b"", b""], [2], {"<call>": 1, "<eos>": 2})
    assert dict(vocabulary.special_tokens) == {"<call>": 1}
    assert vocabulary != Vocabulary([b"a", b"", b""], [2])
    with pytest.raises(ValueError, match="also has the bytes"):
        Vocabulary([b"a", b""], [1], {"<a>": 0})
    with pytest.raises(ValueError, match="ids are 0"):
        Vocabulary([b"a", b""], [1], {"<b>": 7})
