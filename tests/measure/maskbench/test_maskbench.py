"""What MaskBench counts, and that engines are measured token by token."""

import base64

import pytest

from tests.measure.maskbench.run import Tally, make_table
from tests.measure.maskbench.token_ranks import TokenRanks
from tests.measure.maskbench.worker import LLGuidancePeer, TroupePeer, measure, measure_rows

CASE = {"name": "case", "schema": {}, "tests": [{"valid": True, "data": 1}, {"valid": False, "data": 2}]}
MERGES = [b"ab", b"abc", b" It", b' "', b'["', b'", "', b" the", b" old", b" house", b" was"]


@pytest.fixture
def ranks(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return TokenRanks(path)


@pytest.mark.parametrize("text", ["abc ab", '["It was", "é"]', "日本 abcab 12345"])
def test_the_tokens_of_a_text_spell_it_and_pairs_of_low_rank_are_merged_first(ranks, text):
    ids = ranks.encode(text)
    assert b"".join(ranks.token_bytes[token_id] for token_id in ids) == text.encode()
    assert ranks.encode("abc") == [ranks.ranks[b"abc"]]


@pytest.mark.parametrize(
    ("verdicts", "right", "loose", "tight"),
    [([True, False], 1, 0, 0), ([True, True], 0, 1, 0), ([False, False], 0, 0, 1), ([False, True], 0, 1, 1)],
)
def test_a_schema_is_right_when_all_its_instances_are(verdicts, right, loose, tight):
    tally = Tally()
    tally.add(CASE, {"compile_ms": 1.0, "fill_us": [2.0], "step_us": [3.0], "verdicts": verdicts}, 10.0)
    assert (tally.num_right, tally.num_invalid_accepted, tally.num_valid_refused) == (right, loose, tight)


def test_refusals_and_timeouts_are_not_right_and_timeouts_cost_their_limit():
    tally = Tally()
    tally.add(CASE, {"refused": "no", "compile_ms": 1.0}, 10.0)
    tally.add(CASE, None, 10.0)
    figures = tally.summarise()
    assert (figures["right"], figures["schemas refused"], figures["timeouts"]) == (0, 1, 1)
    assert figures["compile p100 ms"] == 10_000


@pytest.mark.parametrize("make_peer", [TroupePeer, LLGuidancePeer])
def test_an_engine_is_measured_token_by_token(ranks, make_peer):
    peer = make_peer(ranks)
    answer = measure(peer, ranks, {"schema": {"type": "integer", "minimum": 5}, "texts": ["7", "3"]})
    assert answer["verdicts"] == [True, False]
    assert len(answer["fill_us"]) == len(answer["step_us"]) == 2
    assert "refused" in measure(peer, ranks, {"schema": {"$ref": "#/nowhere"}, "texts": []})
    assert measure_rows(peer, ranks, 3)["plain"] > 0


def test_what_an_engine_refused_has_no_figure_in_the_table():
    table = make_table({"one": {"right": 3, "mask us": 1.5}, "two": {"right": 2}}, 5)
    assert table.split("\n")[2].split() == ["mask", "us", "1.50", "-"]
