"""GrammarManager: matchers advance by accepted tokens, masks are filled by place, and a failure stays alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.grammar_manager import GrammarManager
from engine.messages import FillMasks
from grammar import GrammarCompiler, GrammarSpec, InvalidGrammar, Matcher, Vocabulary

EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = 1 + len(LETTERS)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """One token per letter; token 0 ends a text."""
    return GrammarCompiler(Vocabulary([b"</s>", *(letter.encode() for letter in LETTERS)], (EOS,)))


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) + 1 for letter in text]


def make_matcher(compiler: GrammarCompiler, *choices: str) -> Matcher:
    return compiler.compile(GrammarSpec.choice(list(choices))).matcher()


def make_manager(compiler: GrammarCompiler, **choices: list[str]) -> GrammarManager:
    manager = GrammarManager()
    for name, texts in choices.items():
        manager.open(name, make_matcher(compiler, *texts))
    return manager


def read_mask(row: np.ndarray) -> list[int]:
    """Allowed token ids of one bitmask row."""
    words = row.view(np.uint32)
    return [token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1]


class FailingMatcher:
    """A matcher whose engine gave up."""

    def accept_token(self, token_id: int) -> bool:
        raise InvalidGrammar("the engine ran out of fuel")


class ExhaustedMatcher:
    """A matcher that met one of its limits and accepts nothing any more."""

    error = "the engine ran out of fuel"

    def accept_token(self, token_id: int) -> bool:
        return False


class FaultyFiller:
    """The batch fill of an engine with a fault."""

    def fill(self, matchers: object, rows: object, bitmask: np.ndarray) -> None:
        raise ValueError("the engine has a fault")


class PanicException(BaseException):
    """What libraries written in Rust raise."""


class FaultyMatcher:
    """A matcher of an engine with a fault."""

    filler = FaultyFiller()
    error = None

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token_id: int) -> bool:
        raise ValueError("the engine has a fault")


class PanickingMatcher(FaultyMatcher):
    """A matcher whose library gives up."""

    def accept_token(self, token_id: int) -> bool:
        raise PanicException("the engine has a fault")


def test_a_mask_holds_what_may_come_next(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, r=["yes", "no"])
    gate, broken = manager.fill(FillMasks(3, [], [(0, "r")]), VOCAB)
    assert (gate.step_id, gate.indices.tolist(), broken) == (3, [0], [])
    assert read_mask(gate.bitmask[0]) == sorted(ids("yn"))


def test_accepted_tokens_come_before_the_masks(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, r=["yes", "no"])
    accepted = [("r", token) for token in ids("ye")]
    gate, _ = manager.fill(FillMasks(0, accepted, [(0, "r")]), VOCAB)
    assert read_mask(gate.bitmask[0]) == ids("s")


def test_masks_stand_beside_the_places_of_their_requests(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, one=["ab"], other=["xy"])
    gate, _ = manager.fill(FillMasks(0, [], [(5, "other"), (2, "one")]), VOCAB)
    masks = {index: read_mask(row) for index, row in zip(gate.indices.tolist(), gate.bitmask, strict=True)}
    assert masks == {5: ids("x"), 2: ids("a")}


def test_a_finished_text_allows_only_its_end(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, r=["ab"])
    gate, _ = manager.fill(FillMasks(0, [("r", token) for token in ids("ab")], [(0, "r")]), VOCAB)
    assert read_mask(gate.bitmask[0]) == [EOS]


def test_a_dropped_request_gets_no_mask_and_breaks_nothing(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, gone=["ab"], here=["xy"])
    manager.drop(["gone", "never known"])
    accepted = [("gone", ids("a")[0])]
    gate, broken = manager.fill(FillMasks(0, accepted, [(0, "gone"), (1, "here")]), VOCAB)
    assert (gate.indices.tolist(), broken, len(manager)) == ([1], [], 1)


def test_a_refused_token_breaks_only_its_request(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, bad=["ab"], good=["xy"])
    accepted = [("bad", ids("z")[0]), ("good", ids("x")[0])]
    gate, broken = manager.fill(FillMasks(0, accepted, [(0, "bad"), (1, "good")]), VOCAB)
    assert [(report.request_id, report.error, report.finish_reason) for report in broken] == [
        ("bad", f"token {ids('z')[0]} is not allowed by the grammar", "error")
    ]
    assert gate.indices.tolist() == [1]
    assert read_mask(gate.bitmask[0]) == ids("y")


@pytest.mark.parametrize("failing", [FailingMatcher, ExhaustedMatcher])
def test_a_matcher_that_gives_up_breaks_only_its_request(compiler: GrammarCompiler, failing: type) -> None:
    manager = make_manager(compiler, good=["xy"])
    manager.open("bad", failing())
    gate, broken = manager.fill(FillMasks(0, [("bad", 1), ("good", ids("x")[0])], [(1, "good")]), VOCAB)
    assert [(report.request_id, report.error, report.finish_reason) for report in broken] == [
        ("bad", "the engine ran out of fuel", "dead_end")
    ]
    assert read_mask(gate.bitmask[0]) == ids("y")


@pytest.mark.parametrize("faulty", [FaultyMatcher, PanickingMatcher])
@pytest.mark.parametrize("accepted", [[], [("bad", 1)]])
def test_an_exception_breaks_only_the_request_that_raised_it(
    compiler: GrammarCompiler, accepted: list[tuple[str, int]], faulty: type
) -> None:
    manager = make_manager(compiler, one=["ab"], other=["xy"])
    manager.open("bad", faulty())
    gate, broken = manager.fill(FillMasks(0, accepted, [(0, "one"), (1, "bad"), (2, "other")]), VOCAB)
    assert [(report.request_id, report.finish_reason) for report in broken] == [("bad", "error")]
    assert "the engine has a fault" in broken[0].error
    assert gate.indices.tolist() == [0, 2] and len(manager) == 2
    assert [read_mask(row) for row in gate.bitmask] == [ids("a"), ids("x")]


def test_a_broken_request_is_reported_once(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, bad=["ab"])
    wrong = ("bad", ids("z")[0])
    _, broken = manager.fill(FillMasks(0, [wrong, wrong], []), VOCAB)
    assert len(broken) == 1
    assert manager.fill(FillMasks(1, [wrong], []), VOCAB)[1] == []


def test_an_order_without_targets_is_an_empty_gate(compiler: GrammarCompiler) -> None:
    gate, _ = make_manager(compiler).fill(FillMasks(7, [], []), VOCAB)
    assert (gate.step_id, len(gate.indices), len(gate.bitmask)) == (7, 0, 0)


def test_a_matcher_that_hits_a_limit_loses_its_row_and_says_why(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(compiler, tired=["ab"], fresh=["xy"])
    monkeypatch.setattr(type(manager._matchers["tired"]), "error", None, raising=False)
    manager._matchers["tired"].error = "out of fuel"  # type: ignore[misc]
    gate, broken = manager.fill(FillMasks(0, [], [(0, "tired"), (1, "fresh")]), VOCAB)
    assert gate.indices.tolist() == [1]
    assert read_mask(gate.bitmask[0]) == ids("x")
    assert [(each.request_id, each.error, each.finish_reason) for each in broken] == [
        ("tired", "the grammar could not go on: out of fuel", "dead_end")
    ]
