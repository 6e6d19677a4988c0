"""The host's sources propose what slow, obvious searches propose, and learn only from the right requests."""

import random

import pytest

from engine.core.request import Request
from engine.spec import ngram
from engine.spec.ngram import NgramProposer
from engine.spec.prediction import PredictionProposer
from engine.spec.suffix import AnswerMemory, SuffixProposer
from engine.speculative_config import SpeculativeConfig
from tests.engine.core.harness import make_record, make_request


def make(prompt: list[int], name: str = "r", salt: str | None = None) -> Request:
    return make_record(make_request(name, prompt, 50, salt=salt))


def look_up(token_ids: list[int], low: int, high: int, limit: int) -> list[int]:
    """The longest match, the latest of equals, by looking everywhere."""
    for size in range(high, low - 1, -1):
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == token_ids[-size:]:
                rest = token_ids[start + size :]
                return (rest * limit)[:limit]
    return []


def test_ngrams_are_those_of_a_search_through_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_PLACES", 10**6)
    chance = random.Random(0)
    for low, high in ((1, 3), (2, 2), (3, 6)):
        request, proposer = make(chance.choices(range(4), k=30)), NgramProposer(low, high)
        for _ in range(80):
            limit = chance.randrange(1, 6)
            assert list(proposer.propose(request, limit)) == look_up(request.token_ids, low, high, limit)
            request.token_ids += chance.choices(range(4), k=chance.randrange(1, 4))


def test_a_long_prompt_is_indexed_over_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 10)
    request, proposer = make([1, 2, 3, 4, *range(10, 40), 1, 2, 3]), NgramProposer(3, 3)
    found = [list(proposer.propose(request, 2)) for _ in range(5)]
    assert found == [[], [], [], [4, 10], [4, 10]]


def test_a_prediction_is_followed_over_replaced_inserted_and_removed_tokens() -> None:
    proposer = PredictionProposer()
    request = make([1, 2])
    request.prediction = list(range(100, 130))
    assert proposer.propose(request, 3) == [100, 101, 102]
    request.token_ids += [100, 101, 55]  # 102 is replaced
    assert proposer.propose(request, 2) == [103, 104]
    request.token_ids += [103, 77, 78, 104, 105]  # two tokens more
    assert proposer.propose(request, 2) == [106, 107]
    request.token_ids += [120, 121]  # many fewer
    assert proposer.propose(request, 2) == [122, 123]
    request.token_ids += [50] * 5
    assert proposer.propose(request, 2) == ()
    assert PredictionProposer().propose(make([1, 2]), 2) == ()


def test_suffixes_vote_and_stop_where_nothing_is_likely() -> None:
    config = SpeculativeConfig(
        method=("suffix",), suffix_decoding_max_spec_factor=4, suffix_decoding_min_token_prob=0.6
    )
    token_ids = [9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3, 4, 6, 1, 2]
    # After (1, 2) always 3, then 4 in two of three places.
    assert SuffixProposer(config).propose(make(token_ids), 2) == [3, 4]
    strict = SpeculativeConfig(
        method=("suffix",), suffix_decoding_max_spec_factor=4, suffix_decoding_min_token_prob=0.9
    )
    assert SuffixProposer(strict).propose(make(token_ids), 2) == [3]


def test_a_tenant_learns_from_its_own_answers_only() -> None:
    proposer = SuffixProposer(SpeculativeConfig(method=("suffix",), suffix_decoding_max_spec_factor=4))
    first = make([7, 8, 9], "a", salt="tenant")
    first.token_ids += [20, 21, 22, 23]
    proposer.propose(first, 1)
    proposer.forget(first)
    assert proposer.propose(make([1, 20, 21], "b", salt="tenant"), 2) == [22, 23]
    assert list(proposer.propose(make([1, 20, 21], "c", salt="other"), 2)) == []
    assert list(proposer.propose(make([1, 20, 21], "d"), 2)) == []


def test_answers_of_salts_that_never_repeat_are_bounded() -> None:
    proposer = SuffixProposer(
        SpeculativeConfig(
            method=("suffix",), suffix_decoding_max_spec_factor=4, suffix_decoding_max_cached_requests=3
        )
    )
    for number in range(20):
        for salt in (f"salt {number}", "faithful"):
            request = make([7, 8, 9], f"{number} {salt}", salt=salt)
            request.token_ids += [20, 21, 22, 23]
            proposer.propose(request, 1)
            proposer.forget(request)
    assert sum(map(len, proposer._memories.values())) == 3
    assert len(proposer._memories) <= 3
    assert proposer.propose(make([1, 20, 21], "b", salt="faithful"), 2) == [22, 23]


def test_the_oldest_answers_are_forgotten_completely() -> None:
    memory = AnswerMemory()
    for number in range(5):
        memory.add([number, number + 1, number + 2])
        memory.learn()
        if len(memory) > 2:
            memory.drop_oldest()
    assert memory.find((3, 4)) == [([3, 4, 5], 2)]
    assert memory.find((4, 5)) == [([3, 4, 5], 3), ([4, 5, 6], 2)]
    assert memory.find((1, 2)) == []
    assert len(memory._places) == 3
