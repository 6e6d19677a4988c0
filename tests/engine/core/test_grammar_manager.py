"""GrammarManager: matchers advance by accepted tokens, masks are filled by place, and a failure stays alone."""

import time

import numpy as np
import pytest

from engine.core.actor_messages import FillMasks, MaskTarget
from engine.core.grammar_manager import MAX_MASK_S, NUM_APART, SLOW_MASK_S, GrammarManager
from grammar import (
    GrammarCompiler,
    GrammarLimits,
    GrammarSpec,
    InvalidGrammar,
    Matcher,
    Usage,
    Vocabulary,
    fill_draft_bitmask,
)

EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = 1 + len(LETTERS)
ONE, BAD, OTHER = 11, 12, 13  # handles


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """One token per letter; token 0 ends a text."""
    return GrammarCompiler(Vocabulary([b"</s>", *(letter.encode() for letter in LETTERS)], (EOS,)))


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) + 1 for letter in text]


def make_matcher(compiler: GrammarCompiler, *choices: str) -> Matcher:
    return compiler.compile(GrammarSpec.choice(list(choices))).matcher()


def make_manager(compiler: GrammarCompiler, choices: dict[int, list[str]]) -> GrammarManager:
    """Handle -> the texts that it may become."""
    manager = GrammarManager(VOCAB)
    for handle, texts in choices.items():
        assert manager.open(handle, make_matcher(compiler, *texts)) == []
    return manager


def read_mask(row: np.ndarray) -> list[int]:
    """Allowed token ids of one bitmask row."""
    words = row.view(np.uint32)
    return [token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1]


class PanicException(BaseException):
    """What libraries written in Rust raise."""


FAULT = ValueError("the engine has a fault")


class FaultyMatcher:
    """A matcher that raises its fault, or names it as the limit it met."""

    error: str | None = None
    has_ended = False
    is_renewable = False

    def renew(self) -> bool:
        return False

    def __init__(self, fault: BaseException | str) -> None:
        self._fault = fault
        self.usage = Usage()

    def is_terminated(self) -> bool:
        return False

    def fill_row(self, *row: object) -> None:
        raise FAULT

    fill_draft = fill_row

    def accept_token(self, token_id: int) -> bool:
        if isinstance(self._fault, str):
            self.error = self._fault
            return False
        raise self._fault


@pytest.mark.parametrize(("accepted", "allowed"), [("", "ny"), ("ye", "s"), ("no", None)])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_mask_holds_what_may_come_after_the_accepted_tokens(
    compiler: GrammarCompiler, accepted: str, allowed: str | None, num_before: int
) -> None:
    """A finished text allows only its end. Some tokens may have been generated before the matcher was opened."""
    manager, tokens = GrammarManager(VOCAB), ids(accepted)
    assert manager.open(ONE, make_matcher(compiler, "yes", "no"), tokens[:num_before]) == []
    order = FillMasks(3, [(ONE, token) for token in tokens[num_before:]], [MaskTarget(0, ONE)])
    masks, failed, _ = manager.fill(order)
    assert (masks.step_id, masks.indices.tolist(), failed) == (3, [0], [])
    assert read_mask(masks.bitmask[0]) == ([EOS] if allowed is None else ids(allowed))


def test_tokens_generated_before_that_the_grammar_forbids_fail_at_once(compiler: GrammarCompiler) -> None:
    manager = GrammarManager(VOCAB)
    (failed,) = manager.open(BAD, make_matcher(compiler, "ab"), ids("ax"))
    assert (failed.handle, failed.finish_reason, len(manager)) == (BAD, "error", 0)


def test_masks_stand_beside_the_places_of_their_requests(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, {ONE: ["ab"], OTHER: ["xy"]})
    masks, _, _ = manager.fill(FillMasks(0, [], [MaskTarget(5, OTHER), MaskTarget(2, ONE)]))
    assert masks.counts.tolist() == [1, 1]
    found = {index: read_mask(row) for index, row in zip(masks.indices.tolist(), masks.bitmask, strict=True)}
    assert found == {5: ids("x"), 2: ids("a")}


def test_each_draft_has_a_mask_behind_it_and_leaves_the_matcher_where_it_is(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, {ONE: ["abc", "abd"], OTHER: ["xyz"]})
    targets = [MaskTarget(0, ONE, ids("ab")), MaskTarget(1, OTHER, ids("xx")), MaskTarget(2, BAD, ids("a"))]
    for _ in range(2):
        masks, failed, _ = manager.fill(FillMasks(0, [], targets))
        assert (masks.indices.tolist(), masks.counts.tolist(), failed) == ([0, 1], [3, 3], [])
        right = [read_mask(row) for row in masks.bitmask[:5]]
        assert right == [ids("a"), ids("b"), ids("cd"), ids("x"), ids("y")]


def test_a_dropped_request_gets_no_mask_and_fails_nobody(compiler: GrammarCompiler) -> None:
    manager = make_manager(compiler, {ONE: ["ab"], OTHER: ["xy"]})
    manager.drop([ONE, 99])
    order = FillMasks(0, [(ONE, ids("a")[0])], [MaskTarget(0, ONE), MaskTarget(1, OTHER)])
    masks, failed, _ = manager.fill(order)
    assert (masks.indices.tolist(), masks.ended, failed, len(manager)) == ([1], [0], [], 1)


@pytest.mark.parametrize("drafts", ["", "ab"])
@pytest.mark.parametrize(
    ("fault", "accepted", "told"),
    [
        (None, [(BAD, 26)], ("token 26 is not allowed by the grammar", "fault")),
        (InvalidGrammar("out of fuel"), [(BAD, 1)], ("out of fuel", "limit")),
        ("out of fuel", [(BAD, 1)], ("out of fuel", "limit")),
        (FAULT, [], ("the engine has a fault", "fault")),
        (FAULT, [(BAD, 1)], ("the engine has a fault", "fault")),
        (PanicException("it gave up"), [(BAD, 1)], ("it gave up", "fault")),
    ],
)
def test_a_failure_ends_only_the_request_it_belongs_to(
    compiler: GrammarCompiler,
    fault: BaseException | str | None,
    accepted: list[tuple[int, int]],
    told: tuple[str, str],
    drafts: str,
) -> None:
    manager = make_manager(compiler, {ONE: ["ab"], BAD: ["ab"], OTHER: ["xy"]})
    if fault is not None:
        manager.open(BAD, FaultyMatcher(fault))  # type: ignore[arg-type]
    targets = [MaskTarget(0, ONE), MaskTarget(1, BAD, ids(drafts)), MaskTarget(2, OTHER)]
    masks, (failed,), _ = manager.fill(FillMasks(0, [*accepted, (OTHER, ids("x")[0])], targets))
    assert (failed.handle, failed.cause) == (BAD, told[1]) and told[0] in failed.error
    assert masks.indices.tolist() == [0, 2] and len(manager) == 2
    assert [read_mask(row) for row in masks.bitmask] == [ids("a"), ids("y")]


def test_a_matcher_that_hits_a_limit_loses_its_row_and_says_why(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(compiler, {BAD: ["ab"], OTHER: ["xy"]})
    monkeypatch.setattr(type(manager._matchers[BAD]), "error", None, raising=False)
    manager._matchers[BAD].error = "out of fuel"  # type: ignore[misc]
    masks, failed, _ = manager.fill(FillMasks(0, [], [MaskTarget(0, BAD), MaskTarget(1, OTHER)]))
    assert masks.indices.tolist() == [1]
    assert read_mask(masks.bitmask[0]) == ids("x")
    assert [(each.handle, each.error, each.finish_reason) for each in failed] == [
        (BAD, "the grammar could not go on: out of fuel", "dead_end")
    ]


class SlowMatcher:
    """A matcher whose masks take time; they hold how many tokens it has accepted."""

    error: str | None = None
    has_ended = is_renewable = False

    def __init__(self, usage: Usage | None = None) -> None:
        self.usage = usage or Usage()
        self.delay_s = 2 * SLOW_MASK_S
        self.accepted: list[int] = []

    def fill_row(self, words: np.ndarray, address: int) -> None:
        end = time.thread_time() + self.delay_s
        while time.thread_time() < end:
            pass
        words[:] = len(self.accepted)

    def is_terminated(self) -> bool:
        return False

    def accept_token(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True

    accept_allowed = accept_token

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens == 0

    def renew(self) -> bool:
        return False


def find_slow(compiler: GrammarCompiler) -> tuple[GrammarManager, SlowMatcher]:
    """A manager that knows by now which of its two matchers is slow."""
    manager, matcher = make_manager(compiler, {ONE: ["ab"]}), SlowMatcher()
    manager.open(OTHER, matcher)  # type: ignore[arg-type]
    masks, _, begun = manager.fill(FillMasks(0, [], [MaskTarget(0, ONE), MaskTarget(1, OTHER)]))
    assert (masks.indices.tolist(), begun) == ([0, 1], [])
    return manager, matcher


def test_a_slow_program_is_found_and_its_masks_are_filled_apart_from_then_on(compiler: GrammarCompiler) -> None:
    """Its tokens wait for its masks: nobody else may touch it meanwhile."""
    manager, matcher = find_slow(compiler)
    order = FillMasks(2, [(OTHER, 7), (ONE, ids("a")[0])], [MaskTarget(0, ONE), MaskTarget(1, OTHER)])
    masks, failed, (apart,) = manager.fill(order)
    assert (masks.indices.tolist(), masks.ended, failed, matcher.accepted) == ([0], [], [], [])
    assert read_mask(masks.bitmask[0]) == ids("b")
    apart.fill()
    masks, failed, following = manager.finish(apart)
    assert (masks.step_id, masks.indices.tolist(), masks.counts.tolist(), failed) == (2, [1], [1], [])
    assert matcher.accepted == [7] and (masks.bitmask == 1).all() and following is None


def test_masks_of_one_program_are_filled_one_after_the_other(compiler: GrammarCompiler) -> None:
    """Its matchers share a lexer, whose lock would stop two threads."""
    manager, matcher = find_slow(compiler)
    manager.open(BAD, SlowMatcher(matcher.usage))  # type: ignore[arg-type]
    _, _, begun = manager.fill(FillMasks(2, [], [MaskTarget(0, OTHER), MaskTarget(1, BAD)]))
    assert [each.target.handle for each in begun] == [OTHER]
    begun[0].fill()
    _, _, following = manager.finish(begun[0])
    assert following is not None and following.target.handle == BAD


def test_a_program_that_has_become_quick_joins_the_others_again(compiler: GrammarCompiler) -> None:
    manager, matcher = find_slow(compiler)
    matcher.delay_s = 0.0
    for _ in range(NUM_APART):
        _, _, (apart,) = manager.fill(FillMasks(2, [(OTHER, 7)], [MaskTarget(1, OTHER)]))
        apart.fill()
        manager.finish(apart)
    masks, _, begun = manager.fill(FillMasks(3, [(OTHER, 8)], [MaskTarget(1, OTHER)]))
    assert (masks.indices.tolist(), begun) == ([1], [])
    assert matcher.accepted == [7] * NUM_APART + [8]


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_slow_matcher_that_fails_or_ends_meanwhile_gets_no_mask(
    compiler: GrammarCompiler, is_dropped: bool
) -> None:
    """A request that was aborted before its mask is begun uses no processor time any more."""
    manager, matcher = find_slow(compiler)
    _, _, (apart,) = manager.fill(FillMasks(2, [], [MaskTarget(1, OTHER)]))
    if is_dropped:
        manager.drop([OTHER])
    matcher.usage.longest_s, matcher.delay_s = 0.0, MAX_MASK_S + 0.01
    apart.fill()
    masks, failed, _ = manager.finish(apart)
    assert (masks.indices.tolist(), masks.ended, len(masks.bitmask)) == ([], [1], 0)
    assert [each.cause for each in failed] == ([] if is_dropped else ["slow"])
    assert len(manager) == 1 and (matcher.usage.longest_s == 0.0) is is_dropped


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_full_lexer_ends_no_request_and_changes_no_mask(num_drafts: int) -> None:
    """Its row is filled apart, where the matcher gets another lexer and takes its tokens again."""
    tokens = [b"</s>", *(letter.encode() for letter in LETTERS)]
    spec = GrammarSpec.regex("(a[bz]{9}|e[fz]{9}|i[jz]{9}|m[nz]{9})")
    small = GrammarCompiler(Vocabulary(tokens, (EOS,)), GrammarLimits(max_lexer_states=38)).compile(spec)
    large = GrammarCompiler(Vocabulary(tokens, (EOS,))).compile(spec)
    manager, num_apart = GrammarManager(VOCAB), 0
    for handle, text in enumerate(("abbbbzbbbb", "efffffzfff", "ijjjzzjjjj", "mnnnnnnnzz")):
        expected = large.matcher()
        manager.open(handle, small.matcher())
        for step, token_id in enumerate(ids(text)):
            accepted = [(handle, ids(text)[step - 1])] if step else []
            drafts = ids(text)[step : step + num_drafts]
            masks, failed, begun = manager.fill(FillMasks(step, accepted, [MaskTarget(0, handle, drafts)]))
            for apart in begun:
                apart.fill()
                masks, failed, _ = manager.finish(apart)
            num_apart += len(begun)
            right = np.zeros((1 + len(drafts), 1), np.int32)
            fill_draft_bitmask([expected], [drafts], [0], right)
            assert failed == [] and masks.bitmask.tolist() == right.tolist()
            assert expected.accept_token(token_id)
        manager.drop([handle])
    assert num_apart > 0
