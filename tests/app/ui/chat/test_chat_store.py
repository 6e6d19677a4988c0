"""Chats in the browser: saved, found, removed, imported, and limited in size."""

import json
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.ui.chat import history as memory
from app.ui.chat.conversation import answer_message, figures_message, user_message
from app.ui.chat.history import make_thread
from app.ui.chat.store import (
    StoreError,
    empty_store,
    find_chat,
    import_chats,
    list_changes,
    make_title,
    remove_chat,
    save_chat,
)
from app.ui.chat.tab import ChatTab
from tests.fakes import FakeEngine

TAB = ChatTab(FakeEngine(), "welcome", [])
MESSAGES = [user_message("hello  there"), answer_message("hi"), figures_message("3 tokens")]


def save(store: Any, chat_id: str) -> Any:
    return save_chat(store, {"id": chat_id, "forks": []}, MESSAGES, clock=lambda: 7.0)


def test_the_chat_that_was_saved_last_is_first_and_current() -> None:
    store = save(save(save(empty_store(), "a"), "b"), "a")
    assert [chat["id"] for chat in store["chats"]] == ["a", "b"] and store["current"] == "a"
    assert store["chats"][0]["messages"] == MESSAGES and store["chats"][0]["title"] == "hello there"


def test_a_chat_is_kept_as_plain_text_under_its_first_question() -> None:
    assert save_chat(save(empty_store(), "a"), {"id": "a", "forks": []}, [])["chats"] == []
    block = [{"role": "user", "content": [{"type": "text", "text": "hello"}], "options": None}]
    assert save_chat(empty_store(), {"id": "a", "forks": []}, block)["chats"][0]["messages"] == [
        user_message("hello")
    ]
    assert make_title([user_message("x" * 99)]) == "x" * 59 + "…" and make_title([]) == ""
    thread, branches, _, change = memory.keep(MESSAGES, make_thread(), None)
    assert change["current"] == thread["id"] and branches == []
    assert [(chat["id"], chat["messages"]) for chat in change["put"]] == [(thread["id"], MESSAGES)]


def test_the_page_opens_with_the_chat_it_was_left_with() -> None:
    """Without one it is left alone: a person may type before the page has asked."""
    store, kept = save(empty_store(), "a"), {"temperature": 1.5}
    history, thread, branches, _, change, growing, _, turn, settings = TAB.restore(None, kept, store)
    assert history == MESSAGES and (thread["id"], thread["seen"]) == ("a", []) and branches == growing == []
    assert change["put"] == [] and turn is None and settings["updates"][1] == 1.5
    assert all(each == gr.skip() for each in TAB.restore(None, None, None)[:8])


def test_a_page_that_opens_leaves_a_chat_that_was_begun_meanwhile_alone() -> None:
    *opened, settings = TAB.restore(make_thread(), {"temperature": 1.5}, save(empty_store(), "a"))
    assert all(each == gr.skip() for each in opened) and settings["updates"][1] == 1.5


def test_a_removed_chat_is_gone_and_no_longer_current() -> None:
    store = remove_chat(save(save(empty_store(), "a"), "b"), "b")
    assert store["current"] is None and find_chat(store, "b") is None and find_chat(store, "a") is not None


def test_what_was_exported_can_be_imported() -> None:
    exported = json.dumps({"chats": save(empty_store(), "a")["chats"]})
    store = import_chats(save(empty_store(), "b"), exported)
    assert [chat["id"] for chat in store["chats"]] == ["a", "b"] and store["current"] == "b"
    assert import_chats(store, exported) == store


def chat_of(message: str) -> str:
    return f'{{"chats": [{{"messages": [{message}]}}]}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "not JSON"),
        ("[]", 'no list "chats"'),
        ('{"chats": [{"messages": []}]}', "chat 1 has no messages"),
        ('{"chats": [{"messages": [{"role": "robot", "content": "x"}]}]}', "without role and content"),
        (chat_of('{"role": "user", "content": 5}'), "chat 1 has a message whose content is not text"),
        (chat_of('{"role": "user", "content": {"text": null}}'), "content is not text"),
        (chat_of('{"role": "user", "content": [["x"]]}'), "content is not text"),
        (chat_of('{"role": "user", "content": "x", "metadata": "y"}'), "metadata is not an object"),
        (chat_of('{"role": "user", "content": "\\ud800"}'), "half a character"),
    ],
)
def test_a_file_without_chats_is_refused(text: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        import_chats(empty_store(), text)


@pytest.mark.parametrize("seconds", ["1e400", "-1", "9" * 20, '"now"', "null"])
def test_a_time_that_is_none_is_not_imported(seconds: str) -> None:
    """Gradio cannot send a number beyond 64 bits."""
    text = f'{{"chats": [{{"time": {seconds}, "messages": [{{"role": "user", "content": "x"}}]}}]}}'
    assert import_chats(empty_store(), text)["chats"][0]["time"] == 0


def test_a_large_chat_and_many_chats_remove_no_other() -> None:
    before = {"current": None, "chats": [save(empty_store(), str(number))["chats"][0] for number in range(200)]}
    large = [user_message("x" * 4_000_000), *MESSAGES[1:]]
    change = list_changes(before, save_chat(before, {"id": "large", "forks": []}, large))
    assert ([chat["id"] for chat in change["put"]], change["removed"]) == (["large"], [])


def test_only_what_an_event_changes_goes_back_to_the_browser() -> None:
    before = save(save(save(empty_store(), "a"), "b"), "c")
    saved = list_changes(
        before, save_chat(before, {"id": "a", "forks": []}, [*MESSAGES, *MESSAGES], clock=lambda: 7.0)
    )
    assert ([chat["id"] for chat in saved["put"]], saved["removed"]) == (["a"], [])
    assert saved["current"] == "a" and len(saved["put"][0]["messages"]) == 6
    removed = list_changes(before, remove_chat(before, "b"))
    assert (removed["put"], removed["removed"], removed["current"]) == ([], ["b"], "c")
    # The same twice is two events for the page.
    assert removed["id"] != list_changes(before, remove_chat(before, "b"))["id"]


def event(**data: Any) -> Any:
    return SimpleNamespace(_data=data)


def test_an_import_brings_its_chats_or_says_why_not() -> None:
    store = save(empty_store(), "a")
    change = memory.bring(store, event(text=json.dumps({"chats": save(empty_store(), "b")["chats"]})))
    assert [chat["id"] for chat in change["put"]] == ["b"] and "current" not in change
    change = memory.bring(store, event(text="no"))
    assert "not JSON" in change["problem"] and change["put"] == [] and change["removed"] == []


def test_removing_another_chat_leaves_open_what_a_person_opened_meanwhile() -> None:
    store = save(save(empty_store(), "a"), "b")
    change = memory.drop(store, "a", is_open=False)
    assert change["removed"] == ["a"] and "current" not in change
    assert memory.drop(store, "b", is_open=True)["current"] is None


def test_opening_a_chat_changes_no_chat() -> None:
    store = save(save(empty_store(), "a"), "b")
    history, *_, change = memory.open_chat(store, "a")
    assert history == MESSAGES and (change["current"], change["put"], change["removed"]) == ("a", [], [])
    assert memory.open_chat(store, None)[2]["current"] is None


def test_settings_come_back_with_their_chat() -> None:
    thread = {"id": "a", "forks": [], "settings": {"temperature": 1.5, "seed": "7"}}
    settings = TAB.restore(None, {"top_k": 5}, save_chat(empty_store(), thread, MESSAGES))[8]["updates"]
    assert settings[1] == 1.5 and settings[6] == "7" and settings[0] == TAB.defaults.system_prompt
