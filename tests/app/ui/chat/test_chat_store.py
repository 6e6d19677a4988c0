"""Chats in the store: files that are imported and exported, older ones with their versions, and the search."""

import json
from typing import Any

import pytest

from app.store import Store, objects
from app.ui.chat import store as chats
from app.ui.chat.branches import join
from app.ui.chat.conversation import answer_message, figures_message, user_message

MESSAGES = [user_message("hello  there"), answer_message("hi"), figures_message("3 tokens")]


def file_of(*given: Any) -> str:
    return json.dumps({"chats": given})


async def read(store: Store, chat_id: str) -> tuple[Any, Any, Any]:
    """The fields, the tree, and the messages of the shown version."""
    body, tree = await store.run(chats.read_chat, "a", chat_id)
    return body, tree, join(tree.find_path(body["leaf"]))


async def test_what_was_exported_can_be_imported_elsewhere_and_replaces_itself() -> None:
    store = Store()
    given = [{"id": name, "title": name, "time": 7, "named": True, "messages": MESSAGES} for name in "xyz"]
    assert await store.run(chats.import_chats, "a", file_of(*given)) == ["x", "y", "z"]
    text = await store.run(chats.export_chats, "a")
    for owner in ("a", "b"):
        await store.run(chats.import_chats, owner, text)
        listed = await store.run(chats.list_chats, owner)
        assert [(each["id"], each["title"], each["time"]) for each in listed] == [(name, name, 7) for name in "xyz"]
    assert (await read(store, "x"))[2] == MESSAGES
    await store.run(objects.put, "b", "file", "f", {})
    (other,) = await store.run(chats.import_chats, "b", file_of({**given[0], "id": "f"}))
    assert other != "f" and await store.run(objects.get, "b", "file", "f"), "an id of another object"


async def test_an_older_file_keeps_its_versions() -> None:
    old = {
        "id": "x",
        "messages": [user_message("q"), answer_message("second"), user_message("more"), answer_message("yes")],
        "forks": [
            {"at": 1, "active": 1, "tails": [{"messages": [answer_message("first")], "forks": []}, None]},
            {"at": 2, "active": 1, "tails": [{"messages": [user_message("less"), answer_message("no")], "forks": [
                {"at": 3, "active": 1, "tails": [{"messages": [answer_message("never")], "forks": []}, None]}
            ]}, None]},
        ],
    }
    store = Store()
    await store.run(chats.import_chats, "a", file_of(old))
    body, tree, shown = await read(store, "x")
    assert shown == old["messages"] and body["title"] == "q"
    found = [(each["at"], each["active"], each["count"]) for each in tree.describe(tree.find_path(body["leaf"]))]
    assert found == [(1, 1, 2), (2, 1, 2)]
    less = next(node for node in tree.nodes.values() if node.messages == [user_message("less")])
    path = tree.find_path(tree.find_leaf(less.id))
    assert [message["content"] for message in join(path)] == ["q", "second", "less", "no"]
    assert len(tree.describe(path)) == 3


def chat_of(message: str) -> str:
    return f'{{"chats": [{{"messages": [{message}]}}]}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "not JSON"), ("[]", 'no list "chats"'), ('{"chats": [{"messages": []}]}', "chat 1 has no messages"),
        ('{"chats": [{"turns": []}]}', "chat 1 has no messages"),
        ('{"chats": [{"turns": [{"id": "a", "before": "b"}]}]}', "chat 1 has a turn"),
        ('{"chats": [{"messages": [{"role": "robot", "content": "x"}]}]}', "without role and content"),
        (chat_of('{"role": "user", "content": 5}'), "chat 1 has a message whose content is not text"),
        (chat_of('{"role": "user", "content": {"text": null}}'), "content is not text"),
        (chat_of('{"role": "user", "content": [["x"]]}'), "content is not text"),
        (chat_of('{"role": "user", "content": "x", "metadata": "y"}'), "metadata is not an object"),
    ],
)
async def test_a_file_without_chats_is_refused_and_changes_nothing(text: str, words: str) -> None:
    store = Store()
    with pytest.raises(chats.ChatsError, match=words):
        await store.run(chats.import_chats, "a", text)
    assert await store.run(chats.list_chats, "a") == []


@pytest.mark.parametrize("seconds", ["1e400", "-1", "9" * 20, '"now"', "null"])
async def test_a_time_that_is_none_is_not_imported(seconds: str) -> None:
    """Gradio cannot send a number beyond 64 bits."""
    store, text = Store(), f'{{"chats": [{{"time": {seconds}, "messages": [{{"role": "user", "content": "x"}}]}}]}}'
    await store.run(chats.import_chats, "a", text)
    assert (await store.run(chats.list_chats, "a"))[0]["time"] == 0


async def test_a_file_names_no_file_of_the_server() -> None:
    store = Store()
    content = [{"path": "/etc/passwd"}, "what is this?"]
    await store.run(chats.import_chats, "a", file_of({"id": "x", "messages": [{"role": "user", "content": content}]}))
    assert (await read(store, "x"))[2] == [user_message("[image: passwd]\nwhat is this?")]


async def test_chats_are_found_by_title_and_text_of_every_version() -> None:
    store = Store()
    given = [{"id": "x", "title": "Title", "messages": MESSAGES}, {"id": "y", "messages": [user_message("Other")]}]
    await store.run(chats.import_chats, "a", file_of(*given))
    for text, found in (("THERE", ["x"]), ("titl", ["x"]), ("other", ["y"]), ("t", ["x", "y"]), ("zzz", [])):
        assert [each["id"] for each in await store.run(chats.list_chats, "a", text)] == found
    assert await store.run(chats.list_chats, "b", "t") == []


def test_a_title_is_the_first_question_as_plain_text_shortened() -> None:
    assert chats.make_title([user_message("x" * 99)]) == "x" * 59 + "…" and chats.make_title([]) == ""
    titles = {
        "**Bold** and `code` and *it*": "Bold and code and it", "# Why `__init__`?\n- a\n- b": "Why __init__? a b",
        "***[A **link**](https://a.b)***": "A link", "2 * 3 * 4 = 2*3*4, snake_case": "2 * 3 * 4 = 2*3*4, snake_case",
        "Run\n```python\nprint(1)\n```": "Run print(1)", "**Open and `shut": "**Open and `shut",
    }
    for question, title in titles.items():
        assert chats.make_title([user_message(question)]) == title
