"""The chat's handlers on a fake engine: answers grow, end in figures, report errors, and stop."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.store import Limits, Store, objects
from app.ui.chat import store as chats
from app.ui.chat.answers import Answer
from app.ui.chat.conversation import answer_message, figures_message, read_text, user_message
from app.ui.chat.settings import Settings
from app.ui.chat.tab import ChatTab
from app.ui.chat.writing import conclude, inspect
from engine import EngineDead, EngineOverloaded
from tests.fakes import FakeEngine
from tests.waiting import wait_until

REQUEST: Any = SimpleNamespace(session_hash="abc", request=None)
SETTINGS = (Settings().system_prompt, 0.0, 1.0, 0, 0.0, 64, "", "", "none", "", 0, True)
OWNER = f"{objects.GUEST}abc"
TURN = [user_message("hello"), answer_message("hi"), figures_message("3 tokens")]


# Between the tokens of an answer that must still be written when the test acts; the store's thread takes milliseconds.
SLOW_S = 0.05


def make_tab(**options: Any) -> tuple[ChatTab, FakeEngine]:
    engine = FakeEngine(reply=lambda prompt: "fine, thanks", **options)
    return ChatTab(engine, Store(), interval_s=0), engine


async def seed(tab: ChatTab, messages: Any = TURN) -> Any:
    """A stored chat, opened."""
    text = json.dumps({"chats": [{"id": "t", "messages": messages}]})
    await tab.store.run(chats.import_chats, OWNER, text)
    return (await open_chat(tab))[1]


async def open_chat(tab: ChatTab, chat_id: str | None = "t", turn: Any = None) -> Any:
    return await tab.pick(turn, at(id=chat_id), REQUEST)


def at(**data: Any) -> Any:
    return SimpleNamespace(_data=data)


async def read(tab: ChatTab, chat_id: str = "t") -> Any:
    """The chat's fields and its turns as texts, each with the one before it."""
    body, tree = await tab.store.run(chats.read_chat, OWNER, chat_id)
    texts = {node.id: read_text(node.messages[0]["content"]) for node in tree.nodes.values()}
    return body, [(texts.get(node.before), texts[node.id]) for node in tree.nodes.values()]


def typed(text: str, *files: str) -> dict[str, Any]:
    return {"text": text, "files": list(files)}


async def play(tab: ChatTab, begun: tuple[Any, ...]) -> Any:
    """Run a turn that began to its end: what grew, and the composer, tokens and history at the end."""
    turn = begun[4]
    grew = [update async for update in tab.watch(turn)]
    history, composer, growing, tokens = tab.close(turn)
    assert growing == []
    return SimpleNamespace(grew=grew, history=history, composer=composer, tokens=tokens, thread=begun[3])


async def ask(
    tab: ChatTab, text: str = "hello", thread: Any = None, *files: str, turn: Any = None, settings: Any = SETTINGS
) -> tuple[Any, ...]:
    return await tab.send(typed(text, *files), REQUEST, thread, turn, *settings)


async def begin_writing(tab: ChatTab) -> tuple[Any, AsyncGenerator[Any, None]]:
    """A turn in the middle of its answer."""
    turn = (await ask(tab))[4]
    updates = tab.watch(turn)
    await anext(updates)
    await anext(updates)
    return turn, updates


async def finish(tab: ChatTab, turn: Any, updates: AsyncGenerator[Any, None]) -> Any:
    _ = [update async for update in updates]
    history, composer, *_ = tab.close(turn)
    return history, composer


async def test_an_answer_grows_without_the_history_before_it_and_ends_with_its_figures() -> None:
    tab, _ = make_tab(hold=(hold := asyncio.Event()))
    begun = await ask(tab, "hello", await seed(tab, [user_message("q"), answer_message("a")] * 40))
    hold.set()
    assert begun[0] == gr.skip() and begun[2] == [user_message("hello"), answer_message("…")]
    assert begun[1]["stop_btn"] and "value" not in begun[1]  # what is typed stays
    played = await play(tab, begun)
    assert {len(growing) for growing in played.grew[:-1]} == {2} and len(played.history) == 83
    texts = [read_text(growing[1]["content"]) for growing in played.grew[1:-1]]
    assert texts == sorted(texts, key=len) and texts[-1] == "fine, thanks"
    assert "12 tokens" in played.history[-1]["metadata"]["title"]
    assert (played.composer["stop_btn"], played.composer["submit_btn"]) == (False, True)


async def test_an_answer_that_was_cut_off_goes_on_as_another_version() -> None:
    tab, engine = make_tab()
    first = await play(tab, await ask(tab))
    played = await play(tab, await tab.go_on(REQUEST, first.thread, None, *SETTINGS))
    assert engine.requests[-1].prompt.endswith("<user>hello\n<assistant>fine, thanks")
    assert read_text(played.grew[0][-1]["content"]).startswith("fine, thanks")
    assert played.history[1] == answer_message("fine, thanksfine, thanks")
    assert f"prompt {len(engine.requests[-1].prompt)}, " in played.history[2]["metadata"]["title"]
    assert [turn for turn in (await read(tab, played.thread["id"]))[1] if turn[0]] == [
        ("hello", "fine, thanks"), ("hello", "fine, thanksfine, thanks")
    ]


async def test_history_settings_and_session_reach_the_engine() -> None:
    tab, engine = make_tab()
    settings = ("be kind", *SETTINGS[1:-2], -3, False)
    played = await play(tab, await ask(tab, "and you?", await seed(tab), settings=settings))
    (request,) = engine.requests
    assert request.prompt == "<system>be kind\n<user>hello\n<assistant>hi\n<user>and you?\n<assistant>"
    assert (request.options["cache_salt"], request.options["priority"]) == ("session-abc", -3)
    assert "steps" not in played.tokens and request.params.logprobs is None


async def test_every_answer_ends_with_its_own_tokens_and_their_rivals() -> None:
    tab, _ = make_tab()
    begun = await ask(tab)
    first = await play(tab, begun)
    steps = json.loads(*first.tokens["steps"].values())
    assert "".join(step["text"] for step in steps) == "fine, thanks" and steps[0]["p"] == 0.7788
    assert [each["text"] for each in steps[0]["top"]] == ["f", "~"]
    second = await play(tab, await ask(tab, "again", first.thread))
    assert second.tokens["ids"] == [*first.tokens["steps"], *second.tokens["steps"]]
    assert first.tokens["ids"] == second.tokens["ids"][:1] != second.tokens["ids"][1:]
    (output,) = begun[4].answer.outputs.values()
    compared = Answer(names=("a", "b"), outputs={"a": output, "b": output}, ended=0.0)
    shown = inspect(conclude(compared), compared)
    assert [*shown["steps"]] == shown["ids"][1::2] and len(shown["steps"]) == 2


async def test_a_retried_answer_and_an_edited_question_are_versions_that_can_be_shown_again() -> None:
    tab, engine = make_tab()
    thread = await seed(tab)
    begun = await tab.retry(at(turn=1), REQUEST, thread, None, *SETTINGS)
    assert begun[0] == TURN[:1] and len((await play(tab, begun)).history) == 3
    assert engine.requests[0].prompt.endswith("<user>hello\n<assistant>")
    data: Any = SimpleNamespace(index=(0, 0), value="bye", previous_value="hello")
    begun = await tab.edit([user_message("bye"), *TURN[1:]], data, REQUEST, begun[3], None, *SETTINGS)
    played = await play(tab, begun)
    assert read_text(played.history[0]["content"]) == "bye" and "<user>bye" in engine.requests[1].prompt
    _, turns = await read(tab)
    assert turns[2:] == [("hello", "fine, thanks"), (None, "bye"), ("bye", "fine, thanks")]
    back, thread, branches, _, listed = await tab.switch(begun[3], None, at(at=0, to=0), REQUEST)
    assert read_text(back[1]["content"]) == "fine, thanks" and listed["leaf"] == thread["leaf"]
    assert [(each["at"], each["active"], each["count"]) for each in branches] == [(0, 0, 2), (1, 1, 2)]
    back, *_ = await tab.switch(thread, None, at(at=1, to=0), REQUEST)
    assert back == TURN and (await open_chat(tab))[0] == TURN
    assert (await tab.switch(thread, None, at(at=1, to=2), REQUEST))[0] == gr.skip()


async def test_undo_takes_the_question_back_into_the_composer_but_not_while_it_is_answered() -> None:
    tab, engine = make_tab()
    thread = await seed(tab, [*TURN, *TURN])
    history, composer, thread, *_, listed = await tab.undo(thread, None, SimpleNamespace(index=3), REQUEST)
    assert history == TURN and composer["value"]["text"] == "hello" and len((await read(tab))[1]) == 2
    engine.hold = asyncio.Event()
    turn = (await ask(tab, "more", thread))[4]
    untouched = await tab.undo(turn.thread, turn, SimpleNamespace(index=0), REQUEST)
    assert all(each == gr.skip() for each in untouched)
    engine.hold.set()
    await play(tab, (None,) * 3 + (turn.thread, turn))
    _, _, thread, *_, listed = await tab.undo(turn.thread, turn, SimpleNamespace(index=0), REQUEST)
    assert listed["chats"] == [] and thread["leaf"] is None, "a chat without turns is no chat"


@pytest.mark.parametrize(
    ("data", "words"), [(b"\xff", "note.txt is not UTF-8"), (b"cat " * 9000, "the model takes 2,048")]
)
async def test_an_attached_file_is_sent_or_refused_before_anything_is_stored(
    tmp_path: Path, data: bytes, words: str
) -> None:
    path = tmp_path / "note.txt"
    path.write_text("the ``` cat")
    tab, engine = make_tab()
    await play(tab, await ask(tab, "What is this?", None, str(path)))
    assert "What is this?\n\nnote.txt\n````\nthe ``` cat\n````" in engine.requests[0].prompt
    path.write_bytes(data)
    *nothing, change = await ask(tab, "", None, str(path))
    assert nothing == [gr.skip()] * 5 and words in change["problem"] and "chats" not in change
    assert len(engine.requests) == 1


async def test_an_image_is_refused_if_a_chosen_model_sees_none(tmp_path: Path) -> None:
    path = tmp_path / "dot.png"
    path.write_bytes(b"")
    tab, engine = make_tab()
    *_, change = await ask(tab, "What is this?", None, str(path))
    assert "dot.png is an image, and fake sees none" in change["problem"] and engine.requests == []
    seeing = FakeEngine(sees_images=True)
    tab.models.find = lambda name: seeing if name == "seeing" else engine  # type: ignore[method-assign, assignment]
    settings = astuple(Settings(models=["seeing"]))
    assert "problem" not in (await ask(tab, "What is this?", None, str(path), settings=settings))[5]


async def test_a_long_prompt_says_what_is_waited_for() -> None:
    tab, engine = make_tab()
    seen: list[str] = []
    turn = (await ask(tab, "cat " * 100))[4]
    engine.reply = lambda _: seen.append(read_text(turn.growing[-1]["content"])) or "fine"  # type: ignore[func-returns-value]
    await play(tab, (None,) * 3 + (turn.thread, turn))
    assert seen == [f"Reading {len(engine.requests[0].prompt)} tokens …"]


async def test_an_empty_message_asks_nothing() -> None:
    tab, engine = make_tab()
    assert await ask(tab, "  ") == (gr.skip(),) * 6 and engine.requests == []


async def test_an_answer_is_shown_once_and_a_late_update_of_it_is_cleared() -> None:
    """Two events may end one turn: its own, and the one that follows the page's opening."""
    tab, _ = make_tab()
    begun = await ask(tab)
    await play(tab, begun)
    assert tab.close(begun[4]) == (gr.skip(), gr.skip(), [], gr.skip())


async def test_a_page_that_opens_without_an_answer_leaves_a_question_asked_meanwhile_alone() -> None:
    """What follows the page's opening may end after the question has begun its turn."""
    tab, _ = make_tab()
    history, composer, *_ = await tab.end(None, REQUEST)
    assert history == composer == gr.skip()


async def test_a_second_question_waits_until_the_first_is_answered() -> None:
    tab, engine = make_tab(step_s=SLOW_S)
    turn, updates = await begin_writing(tab)
    assert await ask(tab, "and?", turn.thread, turn=turn) == (gr.skip(),) * 6
    # Its own end must not close the turn that still runs, nor begin it again.
    assert tab.close(turn) == (gr.skip(),) * 4
    assert [update async for update in tab.watch(turn)] == [gr.skip()]
    history, _ = await finish(tab, turn, updates)
    assert read_text(history[1]["content"]) == "fine, thanks" and len(engine.requests) == 1


async def test_a_question_asked_before_the_page_has_the_end_of_an_answer_loses_nothing() -> None:
    tab, engine = make_tab(step_s=SLOW_S)
    turn, updates = await begin_writing(tab)
    _ = [update async for update in updates]
    # The page has no history of the first turn, whose end begins after the second turn has.
    begun = await ask(tab, "and?", turn.thread, turn=turn)
    assert [read_text(each["content"]) for each in begun[2]][:2] == ["hello", "fine, thanks"]
    assert tab.close(begun[4]) == (gr.skip(),) * 4
    history = (await play(tab, begun)).history
    assert [each["role"] for each in history] == ["user", "assistant", "assistant"] * 2
    assert "<user>hello\n<assistant>fine, thanks\n<user>and?" in engine.requests[1].prompt
    # Nor is it added again once it is shown.
    third = await ask(tab, "more", begun[3], turn=begun[4])
    assert read_text(third[2][0]["content"]) == "more"
    await play(tab, third)


async def test_an_event_that_opens_the_chat_again_leaves_its_answer_on_the_page() -> None:
    """Another tab has written to the chat; the question of this one may not be in the browser yet."""
    tab, engine = make_tab(hold=asyncio.Event())
    turn, updates = await begin_writing(tab)
    chat_id = turn.thread["id"]
    assert all(each == gr.skip() for each in await open_chat(tab, chat_id, turn)) and not turn.is_left
    engine.hold.set()
    await finish(tab, turn, updates)
    await open_chat(tab, chat_id, turn)
    assert turn.is_left


@pytest.mark.parametrize(
    ("begin", "data", "shown"),
    [
        ("retry", at(turn=1), gr.skip()),
        # The page has the new words in place already and gets the old ones back.
        ("edit", SimpleNamespace(index=0, value="bye", previous_value="hello"), TURN),
        ("send_example", SimpleNamespace(value={"text": "hello"}), gr.skip()),
    ],
)
async def test_no_other_turn_begins_beside_an_answer(begin: str, data: Any, shown: Any) -> None:
    tab, engine = make_tab(step_s=SLOW_S)
    turn = (await ask(tab, "and you?", await seed(tab)))[4]
    updates = tab.watch(turn)
    await anext(updates)
    page = [[user_message("bye"), *TURN[1:]]] if begin == "edit" else []
    assert await getattr(tab, begin)(*page, data, REQUEST, turn.thread, turn, *SETTINGS) == (shown, *(gr.skip(),) * 5)
    assert [update async for update in tab.watch(turn)] == [gr.skip()]
    history, _ = await finish(tab, turn, updates)
    assert history[:3] == TURN and read_text(history[4]["content"]) == "fine, thanks"
    assert [request.is_finished for request in engine.requests] == [True]


@pytest.mark.parametrize(
    ("error", "words"), [(EngineOverloaded("9 wait"), "queue is full"), (EngineDead("boom"), "has stopped")]
)
async def test_a_refusal_is_explained_and_the_composer_opens_again(error: Exception, words: str) -> None:
    tab, _ = make_tab(reject=error)
    played = await play(tab, await ask(tab))
    assert words in read_text(played.history[-1]["content"]) and played.composer["submit_btn"] is True


async def test_an_engine_lost_in_the_middle_keeps_the_half_answer() -> None:
    tab, _ = make_tab(fail_after=(4, EngineDead("boom")))
    history = (await play(tab, await ask(tab))).history
    assert [read_text(message["content"])[:4] for message in history] == ["hell", "fine", "**Th"]


async def test_a_bad_setting_is_explained() -> None:
    tab, engine = make_tab()
    played = await play(tab, await ask(tab, settings=(*SETTINGS[:-4], "regex", "", 0, True)))
    assert "cannot be used" in read_text(played.history[-1]["content"]) and engine.requests == []


async def test_stop_keeps_what_is_there_and_aborts_the_request() -> None:
    tab, engine = make_tab(step_s=SLOW_S)
    turn, updates = await begin_writing(tab)
    await tab.stop(turn)
    history, composer = await finish(tab, turn, updates)
    assert "fine, thanks".startswith(read_text(history[1]["content"])) and engine.requests[0].is_aborted
    assert history[-1]["metadata"]["title"].endswith("stopped") and composer["submit_btn"] is True


async def test_a_page_that_is_behind_gets_fewer_updates_and_all_of_the_answer() -> None:
    tab, _ = make_tab(step_s=0.001)
    begun = await ask(tab)
    assert (await tab.slow_down(begun[4]), begun[4].pause_s) == (None, 0.25)
    played = await play(tab, begun)
    assert len(played.grew) < 6 and played.history[1] == answer_message("fine, thanks")


async def test_stop_before_the_first_token_ends_the_turn() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    turn, updates = await begin_writing(tab)
    await tab.stop(turn)
    history, _ = await finish(tab, turn, updates)
    assert history[-1]["metadata"]["title"] == "stopped" and engine.requests[0].is_aborted


async def test_a_stop_without_an_answer_does_not_hit_the_next_one() -> None:
    tab, _ = make_tab()
    await tab.stop(None)
    assert read_text((await play(tab, await ask(tab))).history[1]["content"]) == "fine, thanks"


async def test_an_answer_goes_on_without_its_page_and_is_found_again() -> None:
    hold = asyncio.Event()
    tab, engine = make_tab(hold=hold)
    turn = (await ask(tab))[4]
    updates = tab.watch(turn)
    await anext(updates)
    await updates.aclose()  # the page is closed, and opened again
    history, thread, *_, listed, _, composer, again, settings = await tab.restore({}, None, REQUEST)
    assert history == [user_message("hello")] and composer["stop_btn"] is True and thread == turn.thread
    assert listed["chats"][0]["title"] == "hello" and settings["updates"][5] == 64
    hold.set()
    grew = [update async for update in tab.watch(again)]
    assert read_text(grew[-2][0]["content"]) == "fine, thanks" and not engine.requests[0].is_aborted
    history = (await tab.end(again, REQUEST))[0]
    opened = await tab.restore({}, thread["id"], REQUEST)
    assert opened[0] == history and read_text(history[1]["content"]) == "fine, thanks" and opened[3]["steps"]
    assert (await tab.restore({}, "", REQUEST))[0] == [], "a tab that showed an empty chat"


async def test_a_lost_server_leaves_the_answer_so_far() -> None:
    tab, _ = make_tab(step_s=0.001)
    turn, updates = await begin_writing(tab)
    for _ in range(3):
        await anext(updates)
    other = ChatTab(FakeEngine(), tab.store)
    history, *_, turn = (await open_chat(other, turn.thread["id"]))[:8]
    assert turn is None and history[-1]["metadata"]["title"] == "stopped"
    text = read_text(history[1]["content"])
    assert text and "fine, thanks".startswith(text)
    await updates.aclose()


async def test_a_chat_that_is_left_gets_its_answer_and_the_next_one_gets_nothing_of_it() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    opened = await tab.fresh(turn, REQUEST)
    assert opened[0] == [] and opened[6]["submit_btn"] is True and opened[7] is None
    history, composer = await finish(tab, turn, updates)
    assert history == composer == gr.skip()
    await wait_until(lambda: turn.answer.is_over)
    assert not engine.requests[0].is_aborted and all(output.finished for output in turn.answer.outputs.values())
    assert (await tab.end(turn, REQUEST))[-1] == gr.skip()
    assert read_text((await open_chat(tab, turn.thread["id"]))[0][1]["content"]) == "fine, thanks"


async def test_a_removed_chat_ends_its_answer_and_can_be_brought_back() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    await seed(tab)
    turn, updates = await begin_writing(tab)
    other = await tab.drop(turn.thread, turn, at(id="t"), REQUEST)
    assert not turn.is_left and other[0] == gr.skip() and not other[4]["removed"]["was_open"]
    opened = await tab.drop(turn.thread, turn, at(id=turn.thread["id"]), REQUEST)
    assert opened[0] == [] and opened[4]["chats"] == []
    _ = [update async for update in updates]
    assert engine.requests[0].is_aborted
    assert await tab.store.run(lambda db: db.execute("SELECT id FROM objects").fetchall()) == []
    begun = await ask(tab, "more", turn.thread)
    assert "removed in another tab" in begun[5]["problem"]
    text = other[4]["removed"]["text"]
    back = await tab.bring(None, None, at(text=text, opens=True), REQUEST)
    assert back[0] == TURN and back[1]["id"] == "t"


async def test_a_bug_in_an_answer_is_shown_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    tab, _ = make_tab(fail_after=(4, RuntimeError("boom")))
    history = (await play(tab, await ask(tab))).history
    assert "a bug (RuntimeError)" in read_text(history[-1]["content"]) and "an answer of the chat failed" in caplog.text


async def test_two_tabs_that_ask_at_one_place_make_versions() -> None:
    tab, _ = make_tab()
    thread = await seed(tab)
    one, two = await ask(tab, "one", thread), await ask(tab, "two", thread)
    await play(tab, one)
    await play(tab, two)
    assert (await read(tab))[1][2:] == [("hi", "one"), ("one", "fine, thanks"), ("hi", "two"), ("two", "fine, thanks")]
    branches = (await open_chat(tab))[2]
    assert [(each["at"], each["active"], each["count"]) for each in branches] == [(3, 1, 2)]


async def test_versions_stay_as_they_are_while_an_answer_is_written() -> None:
    tab, engine = make_tab()
    asked_again = await tab.retry(at(turn=1), REQUEST, await seed(tab), None, *SETTINGS)
    thread, to_first = (await play(tab, asked_again)).thread, at(at=1, to=0)
    engine.hold = asyncio.Event()
    turn = (await ask(tab, "and?", thread))[4]
    updates = tab.watch(turn)
    await anext(updates)
    assert await tab.switch(turn.thread, turn, to_first, REQUEST) == (gr.skip(),) * 5
    engine.hold.set()
    _ = [update async for update in updates]
    # Before the page has heard of the end: the turn goes into the version that it was asked in.
    assert (await tab.switch(turn.thread, turn, to_first, REQUEST))[0] == TURN
    kept, *_, branches, _ = await tab.end(turn, REQUEST)
    assert len(kept) == 6 and branches[0]["active"] == 1


async def test_a_full_store_refuses_a_question_and_says_when_an_answer_is_not_kept() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    tab.store = Store(limits=Limits(max_bytes=8000))
    refused = await ask(tab, "x" * 1500)
    assert "no room left" in refused[5]["problem"] and engine.requests == []
    begun = await ask(tab)
    (used,) = await tab.store.run(lambda db: db.execute("SELECT bytes FROM owners").fetchone())
    await tab.store.run(objects.put, OWNER, "file", "f", {}, data=b"x" * (1990 - used))
    engine.hold.set()
    _ = [update async for update in tab.watch(begun[4])]
    history, *_, listed = await tab.end(begun[4], REQUEST)
    assert read_text(history[1]["content"]) == "fine, thanks" and "lost when the page is closed" in listed["problem"]


async def test_settings_come_back_with_their_chat_and_a_page_without_cookie_is_warned() -> None:
    tab, _ = make_tab()
    settings = ("be kind", 1.5, *SETTINGS[2:])
    thread = (await play(tab, await ask(tab, settings=settings))).thread
    opened = await tab.restore({"top_k": 5}, thread["id"], REQUEST)
    assert opened[8]["updates"][:2] == ["be kind", 1.5] and "takes no cookie" in opened[4]["problem"]
    opened = await tab.restore({"temperature": 1.5}, "", REQUEST)
    assert opened[1] != thread and opened[8]["updates"][1] == 1.5
