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


class PanicException(BaseException):
    """What libraries written in Rust raise."""


FAULT = ValueError("the engine has a fault")


class FaultyFiller:
    """The batch fill of an engine with a fault."""

    def fill(self, matchers: object, rows: object, bitmask: np.ndarray) -> None:
        raise FAULT


class FaultyMatcher:
    """A matcher that raises its fault, or names it as the limit it met."""

    filler = FaultyFiller()
    error: str | None = None

    def __init__(self, fault: BaseException | str) -> None:
        self._fault = fault

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token_id: int) -> bool:
        if isinstance(self._fault, str):
            self.error = self._fault
            return False
        raise self._fault


@pytest.mark.parametrize(("accepted", "allowed"), [("", "ny"), ("ye", "s"), ("no", None)])
def test_a_mask_holds_what_may_come_after_the_accepted_tokens(
    compiler: GrammarCompiler, accepted: str, allowed: str | None
) -> None:
    """A finished text allows only its end."""
    order = FillMasks(3, [("r", token) for token in ids(accepted)], [(0, "r")])
    gate, broken = make_manager(compiler, r=["yes", "no"]).fill(order, VOCAB)
    assert (gate.step_id, gate.indices.tolist(), broken) == (3, [0], [])
    assert read_mask(gate.bitmask[0]) == ([EOS] if allowed is None else ids(allowed))


def test_masks_stand_beside_the_places_of_their_requests(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, one=["ab"], other=["xy"])
    gate, _ = manager.fill(FillMasks(0, [], [(5, "other"), (2, "one")]), VOCAB)
    masks = {index: read_mask(row) for index, row in zip(gate.indices.tolist(), gate.bitmask, strict=True)}
    assert masks == {5: ids("x"), 2: ids("a")}


def test_a_dropped_request_gets_no_mask_and_breaks_nothing(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, gone=["ab"], here=["xy"])
    manager.drop(["gone", "never known"])
    accepted = [("gone", ids("a")[0])]
    gate, broken = manager.fill(FillMasks(0, accepted, [(0, "gone"), (1, "here")]), VOCAB)
    assert (gate.indices.tolist(), broken, len(manager)) == ([1], [], 1)


@pytest.mark.parametrize(
    ("fault", "accepted", "told"),
    [
        (None, [("bad", 26)], ("token 26 is not allowed by the grammar", "error")),
        (InvalidGrammar("out of fuel"), [("bad", 1)], ("out of fuel", "dead_end")),
        ("out of fuel", [("bad", 1)], ("out of fuel", "dead_end")),
        (FAULT, [], ("the engine has a fault", "error")),
        (FAULT, [("bad", 1)], ("the engine has a fault", "error")),
        (PanicException("it gave up"), [("bad", 1)], ("it gave up", "error")),
    ],
)
def test_a_failure_breaks_only_the_request_it_belongs_to(
    compiler: GrammarCompiler,
    fault: BaseException | str | None,
    accepted: list[tuple[str, int]],
    told: tuple[str, str],
) -> None:
    manager = make_manager(compiler, one=["ab"], bad=["ab"], other=["xy"])
    if fault is not None:
        manager.open("bad", FaultyMatcher(fault))  # type: ignore[arg-type]
    order = FillMasks(0, [*accepted, ("other", ids("x")[0])], [(0, "one"), (1, "bad"), (2, "other")])
    gate, (broken,) = manager.fill(order, VOCAB)
    assert (broken.request_id, broken.finish_reason) == ("bad", told[1]) and told[0] in broken.error
    assert gate.indices.tolist() == [0, 2] and len(manager) == 2
    assert [read_mask(row) for row in gate.bitmask] == [ids("a"), ids("y")]


def test_a_broken_request_is_reported_once(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, bad=["ab"])
    wrong = ("bad", ids("z")[0])
    _, broken = manager.fill(FillMasks(0, [wrong, wrong], []), VOCAB)
    assert len(broken) == 1
    gate, broken = manager.fill(FillMasks(1, [wrong], []), VOCAB)
    assert (gate.step_id, len(gate.indices), len(gate.bitmask), broken) == (1, 0, 0, [])


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
