"""Versions of a conversation: a question asked again or changed leaves what followed it as another version.

thread = {"id", "forks": [{"at", "active", "tails"}, ...]}    a fork stands before message `at`; its tails are what
can follow, each {"messages", "forks"}, and the active one is what the page shows, so its place holds None.
"""

from __future__ import annotations

import copy
from typing import Any

from app.ui.chat.conversation import History

Fork = dict[str, Any]
Thread = dict[str, Any]

MAX_VERSIONS = 20


def fork(thread: Thread, history: History, at: int) -> Thread:
    """The thread when everything from message `at` on is about to be written anew."""
    forks = copy.deepcopy(thread["forks"])
    deeper = [each for each in forks if each["at"] > at]
    kept = [each for each in forks if each["at"] < at]
    here = next((each for each in forks if each["at"] == at), None) or {
        "at": at,
        "active": 0,
        "tails": [None],
    }
    here["tails"][here["active"]] = {"messages": history[at:], "forks": deeper}
    # The oldest versions go first.
    here["tails"] = [*here["tails"][1 - MAX_VERSIONS :], None]
    here["active"] = len(here["tails"]) - 1
    return {**thread, "forks": [*kept, here]}


def switch(thread: Thread, history: History, at: int, to: int) -> tuple[Thread, History]:
    """The thread and the history with another version after message `at`; unchanged when there is none such."""
    forks = copy.deepcopy(thread["forks"])
    here = next((each for each in forks if each["at"] == at), None)
    if here is None or not 0 <= to < len(here["tails"]) or to == here["active"]:
        return thread, history
    deeper = [each for each in forks if each["at"] > at]
    kept = [each for each in forks if each["at"] < at]
    here["tails"][here["active"]] = {"messages": history[at:], "forks": deeper}
    tail = here["tails"][to]
    here["tails"][to], here["active"] = None, to
    return {**thread, "forks": [*kept, here, *tail["forks"]]}, [*history[:at], *tail["messages"]]


def prune(thread: Thread, history: History) -> Thread:
    """The thread without forks behind the end of the history, as after an undo."""
    return {**thread, "forks": [each for each in thread["forks"] if each["at"] < max(len(history), 1)]}


def describe(thread: Thread, history: History) -> list[dict[str, int]]:
    """What the page shows of each fork: which question, which version, of how many."""
    shown = []
    for each in thread["forks"]:
        turn = sum(message["role"] == "user" for message in history[: each["at"]])
        # A fork before a question is one of that question; a fork behind it, of its answer.
        is_question = each["at"] < len(history) and history[each["at"]]["role"] == "user"
        shown.append(
            {
                "at": each["at"],
                "turn": turn + is_question,
                "active": each["active"],
                "count": len(each["tails"]),
            }
        )
    return shown
