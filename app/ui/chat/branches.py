"""Versions of a conversation: a repeated or edited question keeps the messages after it as another version.

thread = {"id", "forks": [{"at", "active", "tails"}, ...], "seen": ids of turns, "settings"}
A fork stands before message `at`; its tails are what can follow, each {"messages", "forks"}, and the active one is what
the page shows, so its place holds None. `seen` are the turns that this page knows: others came from another tab.
"""

from __future__ import annotations

import copy
from typing import Any

from app.ui.chat.conversation import REASONING_ID, History, read_pending, read_with_names

Fork = dict[str, Any]
Thread = dict[str, Any]
Chat = dict[str, Any]

MAX_VERSIONS = 20


def fork(thread: Thread, history: History, at: int) -> Thread:
    """Return the thread before everything from message `at` on is replaced."""
    forks = copy.deepcopy(thread["forks"])
    deeper = [each for each in forks if each["at"] > at]
    kept = [each for each in forks if each["at"] < at]
    here = next((each for each in forks if each["at"] == at), None) or {
        "at": at,
        "active": 0,
        "tails": [None],
    }
    here["tails"][here["active"]] = {"messages": history[at:], "forks": deeper}
    # Drop the oldest versions first.
    here["tails"] = [*here["tails"][1 - MAX_VERSIONS :], None]
    here["active"] = len(here["tails"]) - 1
    return {**thread, "forks": [*kept, here]}


def switch(thread: Thread, history: History, at: int, to: int) -> tuple[Thread, History]:
    """Return the thread and the history with another version after message `at`; unchanged if it does not exist."""
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


def merge(thread: Thread, history: History, stored: Chat | None) -> Thread:
    """Merge the turns that another tab added to the chat, as further versions where they differ."""
    thread = {**thread, "seen": sorted({*thread.get("seen", ()), *list_turn_ids(history)})}
    if stored is None:
        return thread
    at = _count_common(history, stored["messages"])
    theirs = [
        (at, {"messages": stored["messages"][at:], "forks": [f for f in stored["forks"] if f["at"] > at]})
    ]
    theirs += [(each["at"], tail) for each in stored["forks"] for tail in each["tails"] if tail is not None]
    forks = copy.deepcopy(thread["forks"])
    seen = set(thread["seen"])
    for place, tail in theirs:
        ids = list_turn_ids(tail["messages"])
        if not ids or list_turn_ids(history[place:])[:1] == ids[:1]:
            continue
        here = next((each for each in forks if each["at"] == place), None)
        ours = [] if here is None else here["tails"]
        known = next(
            (i for i, each in enumerate(ours) if each and list_turn_ids(each["messages"])[:1] == ids[:1]),
            None,
        )
        if known is not None:
            # The same version, of which another tab may have more.
            if len(tail["messages"]) > len(ours[known]["messages"]) or read_pending(ours[known]["messages"]):
                ours[known] = tail
        elif not set(ids) <= seen:
            if here is None:
                here = {"at": place, "active": 0, "tails": [None]}
                forks.append(here)
            here["tails"].insert(here["active"], tail)
            here["active"] += 1
        seen |= set(ids)
    return {**thread, "forks": forks, "seen": sorted(seen)}


def list_turn_ids(messages: History) -> list[str]:
    """Return the ids of the turns that end in these messages."""
    found = [(message.get("metadata") or {}) for message in messages]
    return [
        str(each["id"])
        for each in found
        if each.get("title") and each.get("id") not in (None, "", REASONING_ID)
    ]


def _count_common(one: History, other: History) -> int:
    pairs = zip(one, other, strict=False)
    same = [
        (a["role"], read_with_names(a["content"])) == (b["role"], read_with_names(b["content"]))
        for a, b in pairs
    ]
    return same.index(False) if False in same else len(same)


def prune(thread: Thread, history: History) -> Thread:
    """Drop forks after the end of the history, for example after an undo."""
    return {**thread, "forks": [each for each in thread["forks"] if each["at"] < max(len(history), 1)]}


def describe(thread: Thread, history: History) -> list[dict[str, Any]]:
    """Describe each fork for the page: its message, its version, and the number of versions."""
    shown = []
    for each in thread["forks"]:
        turn = sum(message["role"] == "user" for message in history[: each["at"]])
        # A fork before a question belongs to that question; a fork after it, to its answer.
        is_question = each["at"] < len(history) and history[each["at"]]["role"] == "user"
        shown.append(
            {
                "at": each["at"],
                "turn": turn + is_question,
                "is_question": is_question,
                "active": each["active"],
                "count": len(each["tails"]),
            }
        )
    return shown
