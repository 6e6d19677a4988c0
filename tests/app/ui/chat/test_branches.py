"""Versions of a conversation: no fork or switch loses a version, and each is restored unchanged."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.ui.chat.branches import MAX_VERSIONS, describe, fork, prune, switch
from app.ui.chat.conversation import answer_message, user_message

EMPTY: Any = {"id": "t", "forks": []}


def turn(question: str, answer: str) -> list[dict[str, Any]]:
    return [user_message(question), answer_message(answer)]


def test_a_retry_makes_a_second_version_and_both_can_be_seen() -> None:
    first = turn("q", "a1")
    thread = fork(EMPTY, first, 1)
    second = turn("q", "a2")
    assert describe(thread, second) == [{"at": 1, "turn": 1, "is_question": False, "active": 1, "count": 2}]
    back, history = switch(thread, second, 1, 0)
    assert history == first
    assert switch(back, history, 1, 1)[1] == second


def test_versions_below_a_version_come_back_with_it() -> None:
    first = turn("q", "a") + turn("r", "b1")
    thread = fork(EMPTY, first, 3)  # the second answer again
    second = turn("q", "a") + turn("r", "b2")
    thread = fork(thread, second, 0)  # then the first question changed
    third = turn("q!", "c")
    assert [each["at"] for each in thread["forks"]] == [0]
    thread, history = switch(thread, third, 0, 0)
    assert history == second and [each["at"] for each in thread["forks"]] == [0, 3]
    assert switch(thread, history, 3, 0)[1] == first


def test_what_is_not_there_changes_nothing() -> None:
    thread = fork(EMPTY, turn("q", "a"), 1)
    for at, to in ((0, 0), (1, 1), (1, 2), (1, -1)):
        assert switch(thread, turn("q", "b"), at, to) == (thread, turn("q", "b"))


def test_an_undo_takes_the_forks_behind_it_along() -> None:
    thread = fork(EMPTY, turn("q", "a") + turn("r", "b"), 3)
    assert prune(thread, turn("q", "a"))["forks"] == []


def test_the_oldest_versions_go_first() -> None:
    thread = EMPTY
    for number in range(MAX_VERSIONS + 5):
        thread = fork(thread, turn("q", str(number)), 1)
    assert len(thread["forks"][0]["tails"]) == MAX_VERSIONS
    assert switch(thread, turn("q", "last"), 1, 0)[1] == turn("q", "6")


moves = st.tuples(st.sampled_from(["retry", "switch", "add"]), st.integers(0, 5), st.integers(0, 3))


@given(st.lists(moves, max_size=25))
def test_every_version_that_was_ever_shown_can_be_shown_again(moves: list[tuple[str, int, int]]) -> None:
    thread, history, seen = EMPTY, turn("q0", "a0"), []
    for number, (kind, place, to) in enumerate(moves, 1):
        if kind == "add":
            history = history + turn(f"q{number}", f"a{number}")
        elif kind == "retry":
            at = 2 * (place % (len(history) // 2)) + 1
            seen.append(history)
            thread, history = fork(thread, history, at), [*history[:at], answer_message(f"a{number}")]
        elif thread["forks"]:
            chosen = thread["forks"][place % len(thread["forks"])]
            thread, history = switch(thread, history, chosen["at"], to % len(chosen["tails"]))
    reachable = list(walk(thread, history, depth=0))
    # A version that was asked further since is there in its longer form.
    assert all(any(other[: len(old)] == old for other in reachable) for old in seen)


def walk(thread: Any, history: list[Any], depth: int) -> Any:
    """Every version, by trying all switches at and behind each fork."""
    yield history
    for each in thread["forks"][depth:]:
        for to in range(len(each["tails"])):
            if to != each["active"]:
                other, text = switch(thread, history, each["at"], to)
                index = [fork["at"] for fork in other["forks"]].index(each["at"])
                yield from walk(other, text, index + 1)
