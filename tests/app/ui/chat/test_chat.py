"""The chat's handlers on a fake engine: answers grow, end in figures, report errors, and stop."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.ui.chat.answers import KEEP_S
from app.ui.chat.conversation import answer_message, figures_message, read_text, user_message
from app.ui.chat.run import conclude
from app.ui.chat.settings import Settings
from app.ui.chat.tab import ChatTab
from engine import EngineDead, EngineOverloaded
from tests.fakes import FakeEngine
from tests.waiting import wait_until

REQUEST: Any = SimpleNamespace(session_hash="abc")
SETTINGS = (Settings().system_prompt, 0.0, 1.0, 0, 0.0, 64, "", "", "none", "", 0, True)
THREAD: Any = {"id": "t", "forks": [], "seen": [], "settings": None}
REST: Any = (*SETTINGS, None)  # the last inputs of what begins a turn
TURN = [user_message("hello"), answer_message("hi"), figures_message("3 tokens")]


def make_tab(**options: Any) -> tuple[ChatTab, FakeEngine]:
    engine = FakeEngine(reply=lambda prompt: "fine, thanks", **options)
    return ChatTab(engine, "welcome", [], interval_s=0), engine


def typed(text: str, *files: str) -> dict[str, Any]:
    return {"text": text, "files": list(files)}


async def play(tab: ChatTab, begun: tuple[Any, ...]) -> Any:
    """Run a turn that began to its end: what grew, and the composer, tokens and history at the end."""
    turn = begun[4]
    grew = [update async for update in tab.watch(turn)]
    history, composer, growing, tokens = tab.close(turn)
    assert growing == []
    return SimpleNamespace(grew=grew, history=history, composer=composer, tokens=tokens)


async def ask(
    tab: ChatTab, text: str = "hello", history: Any = (), *files: str, settings: Any = SETTINGS
) -> tuple[Any, ...]:
    return await tab.send(typed(text, *files), list(history), REQUEST, THREAD, None, *settings, None)


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
    tab, _ = make_tab()
    begun = await ask(tab, "hello", [user_message("q"), answer_message("a")] * 40)
    assert begun[0] == gr.skip() and begun[2] == [user_message("hello"), answer_message("…")]
    assert (begun[1]["stop_btn"], begun[1]["value"]) == (True, None)
    played = await play(tab, begun)
    assert {len(growing) for growing in played.grew[:-1]} == {2} and len(played.history) == 83
    texts = [read_text(growing[1]["content"]) for growing in played.grew[1:-1]]
    assert texts == sorted(texts, key=len) and texts[-1] == "fine, thanks"
    assert "12 tokens" in played.history[-1]["metadata"]["title"]
    assert (played.composer["stop_btn"], played.composer["submit_btn"]) == (False, True)


async def test_history_settings_and_session_reach_the_engine() -> None:
    tab, engine = make_tab()
    settings = ("be kind", *SETTINGS[1:-2], -3, False)
    played = await play(tab, await ask(tab, "and you?", TURN, settings=settings))
    (request,) = engine.requests
    assert request.prompt == "<system>be kind\n<user>hello\n<assistant>hi\n<user>and you?\n<assistant>"
    assert (request.options["cache_salt"], request.options["priority"]) == ("session-abc", -3)
    assert "steps" not in played.tokens and request.params.logprobs is None


async def test_every_answer_ends_with_its_own_tokens_and_their_rivals() -> None:
    tab, _ = make_tab()
    first = await play(tab, await ask(tab))
    steps = json.loads(first.tokens["steps"])
    assert "".join(step["text"] for step in steps) == "fine, thanks" and steps[0]["p"] == 0.7788
    assert [each["text"] for each in steps[0]["top"]] == ["f", "~"]
    second = await play(tab, await ask(tab, "again", first.history))
    assert second.tokens["ids"] == [first.tokens["id"], second.tokens["id"]]
    assert first.tokens["id"] != second.tokens["id"]


async def test_a_retry_keeps_the_answer_before_as_another_version() -> None:
    tab, engine = make_tab()
    begun = await tab.retry(TURN, SimpleNamespace(index=0), REQUEST, THREAD, None, *REST)
    fork, (chat,) = begun[3]["forks"][0], begun[5]["put"]
    assert (fork["at"], fork["active"], fork["tails"][0]["messages"]) == (1, 1, TURN[1:])
    assert chat["messages"][0] == TURN[0] and chat["forks"][0]["tails"][0]["messages"] == TURN[1:]
    assert len((await play(tab, begun)).history) == 3
    assert engine.requests[0].prompt.endswith("<user>hello\n<assistant>")


async def test_an_edit_keeps_the_old_text_and_its_answers_as_another_version() -> None:
    tab, engine = make_tab()
    data: Any = SimpleNamespace(index=(0, 0), value="bye", previous_value="hello")
    # The page sends the new words in their place.
    begun = await tab.edit([user_message("bye"), *TURN[1:]], data, REQUEST, THREAD, None, *REST)
    assert begun[3]["forks"][0]["tails"][0]["messages"] == TURN
    played = await play(tab, begun)
    assert read_text(played.history[0]["content"]) == "bye" and "<user>bye" in engine.requests[0].prompt


async def test_undo_takes_the_question_back_into_the_composer_but_not_while_it_is_answered() -> None:
    tab, _ = make_tab()
    history, composer, *_, change = tab.undo([*TURN, *TURN], THREAD, None, None, SimpleNamespace(index=3))
    assert history == TURN and composer["value"]["text"] == "hello"
    assert change["put"][0]["messages"] == TURN
    turn, updates = await begin_writing(tab)
    untouched = tab.undo(TURN, THREAD, turn, None, SimpleNamespace(index=0))
    assert all(each == gr.skip() for each in untouched)
    await finish(tab, turn, updates)


@pytest.mark.parametrize(
    ("data", "words"), [(b"\xff", "note.txt is not UTF-8"), (b"cat " * 9000, "the model takes 2,048")]
)
async def test_an_attached_file_is_sent_or_refused_before_anything_is_stored(
    tmp_path: Path, data: bytes, words: str
) -> None:
    path = tmp_path / "note.txt"
    path.write_text("the ``` cat")
    tab, engine = make_tab()
    await play(tab, await ask(tab, "What is this?", [], str(path)))
    assert "What is this?\n\nnote.txt\n````\nthe ``` cat\n````" in engine.requests[0].prompt
    path.write_bytes(data)
    *nothing, change = await ask(tab, "", [], str(path))
    assert nothing == [gr.skip()] * 5 and words in change["problem"] and change["put"] == []
    assert "current" not in change and len(engine.requests) == 1


async def test_an_empty_message_asks_nothing() -> None:
    tab, engine = make_tab()
    assert await ask(tab, "  ") == (gr.skip(),) * 6 and engine.requests == []


async def test_an_answer_is_shown_once_and_a_late_update_of_it_is_cleared() -> None:
    """Two events may end one turn: its own, and the one that follows the page's opening."""
    tab, _ = make_tab()
    begun = await ask(tab)
    await play(tab, begun)
    assert tab.close(begun[4]) == (gr.skip(), gr.skip(), [], gr.skip())


def test_a_page_that_opens_without_an_answer_leaves_a_question_asked_meanwhile_alone() -> None:
    """What follows the page's opening may end after the question has begun its turn."""
    tab, _ = make_tab()
    history, composer, *_ = tab.end(None, None)
    assert history == composer == gr.skip()


async def test_a_second_question_waits_until_the_first_is_answered() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    assert await tab.send(typed("and?"), [], REQUEST, THREAD, turn, *REST) == (gr.skip(),) * 6
    # Its own end must not close the turn that still runs, nor begin it again.
    assert tab.close(turn) == (gr.skip(),) * 4
    assert [update async for update in tab.watch(turn)] == [gr.skip()]
    history, _ = await finish(tab, turn, updates)
    assert read_text(history[1]["content"]) == "fine, thanks" and len(engine.requests) == 1


async def test_a_question_asked_before_the_page_has_the_end_of_an_answer_loses_nothing() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    _ = [update async for update in updates]
    # The page still sends the history without the first turn, whose end begins after the second turn has.
    begun = await tab.send(typed("and?"), [], REQUEST, turn.thread, turn, *REST)
    assert [read_text(each["content"]) for each in begun[2]][:2] == ["hello", "fine, thanks"]
    assert tab.close(begun[4]) == (gr.skip(),) * 4
    history = (await play(tab, begun)).history
    assert [each["role"] for each in history] == ["user", "assistant", "assistant"] * 2
    assert "<user>hello\n<assistant>fine, thanks\n<user>and?" in engine.requests[1].prompt
    # Nor is it added again once it is shown.
    third = await tab.send(typed("more"), history, REQUEST, begun[3], begun[4], *REST)
    assert read_text(third[2][0]["content"]) == "more"
    await play(tab, third)


async def test_a_page_that_opens_may_watch_a_question_asked_meanwhile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The question's own event then shows no notice of a second question."""
    tab, _ = make_tab()
    turn = (await ask(tab))[4]
    opening = tab.watch_again(turn)
    await anext(opening)
    assert [update async for update in tab.watch(turn)] == [gr.skip()]
    assert "still being written" not in capsys.readouterr().out
    await finish(tab, turn, opening)


async def test_an_event_that_opens_the_chat_again_leaves_its_answer_on_the_page() -> None:
    """Another tab has written to the chat; the question of this one may not be in the browser yet."""
    tab, _ = make_tab()
    turn, updates = await begin_writing(tab)
    again: Any = SimpleNamespace(_data={"id": turn.thread["id"]})
    assert all(each == gr.skip() for each in tab.pick(turn, None, again)) and not turn.is_left
    await finish(tab, turn, updates)
    tab.pick(turn, None, again)
    assert turn.is_left


@pytest.mark.parametrize(
    ("begin", "data", "shown"),
    [
        ("retry", SimpleNamespace(index=0), gr.skip()),
        # The page has the new words in place already and gets the old ones back.
        ("edit", SimpleNamespace(index=0, value="bye", previous_value="hello"), TURN),
        ("send_example", SimpleNamespace(value={"text": "hello"}), gr.skip()),
    ],
)
async def test_no_other_turn_begins_beside_an_answer(
    begin: str, data: Any, shown: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tab, engine = make_tab()
    turn = (await ask(tab, "and you?", TURN))[4]
    updates = tab.watch(turn)
    await anext(updates)
    page = [user_message("bye"), *TURN[1:]] if begin == "edit" else TURN
    assert await getattr(tab, begin)(page, data, REQUEST, THREAD, turn, *REST) == (shown, *(gr.skip(),) * 5)
    assert [update async for update in tab.watch(turn)] == [gr.skip()]
    assert "still being written" in capsys.readouterr().out
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
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    await tab.stop(turn)
    history, composer = await finish(tab, turn, updates)
    assert "fine, thanks".startswith(read_text(history[1]["content"])) and engine.requests[0].is_aborted
    assert history[-1]["metadata"]["title"].endswith("stopped") and composer["submit_btn"] is True


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


def store_of(change: Any) -> Any:
    return {"current": change["current"], "chats": change["put"]}


async def test_an_answer_goes_on_without_its_page_and_is_found_again_until_ten_minutes_after_its_end() -> (
    None
):
    hold = asyncio.Event()
    tab, engine = make_tab(hold=hold)
    *_, turn, change = await tab.send(typed("hello"), [], REQUEST, None, None, *REST)
    (chat,) = change["put"]
    assert chat["id"] == change["current"] == turn.thread["id"] and chat["title"] == "hello"
    assert chat["settings"]["max_tokens"] == 64
    updates = tab.watch(turn)
    await anext(updates)
    await updates.aclose()  # the page is closed, and opened again
    opened = tab.restore(None, None, store_of(change))
    assert opened[0] == chat["messages"][:1] and opened[6]["stop_btn"] is True
    again = opened[7]
    hold.set()
    grew = [update async for update in tab.watch_again(again)]
    assert read_text(grew[-2][0]["content"]) == "fine, thanks" and not engine.requests[0].is_aborted
    history, *_, kept = tab.end(again, store_of(change))
    assert kept["put"][0]["messages"] == history and read_text(history[1]["content"]) == "fine, thanks"
    assert (
        conclude(tab.restore(None, None, store_of(change))[7]) == history
    )  # still there, should the page not have kept it
    tab.answers._clock = lambda: time.monotonic() + KEEP_S + 1
    lost = tab.restore(None, None, store_of(change))
    assert lost[7] is None and lost[0][-1]["metadata"]["title"] == "stopped"


async def test_a_chat_that_is_left_gets_its_answer_and_the_next_one_gets_nothing_of_it() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    opened = tab.fresh(turn, None)
    assert opened[0] == [] and opened[6]["submit_btn"] is True and opened[7] is None
    history, composer = await finish(tab, turn, updates)
    assert history == composer == gr.skip()
    await wait_until(lambda: turn.answer.is_over)
    assert not engine.requests[0].is_aborted and turn.answer.output.finished
    assert tab.end(turn, None)[-1] == gr.skip()


async def test_only_the_chat_that_is_removed_ends_its_answer() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    await tab.drop(THREAD, turn, None, SimpleNamespace(_data={"id": "another"}))
    assert not turn.is_left
    opened = await tab.drop(THREAD, turn, None, SimpleNamespace(_data={"id": THREAD["id"]}))
    assert opened[0] == [] and opened[4]["current"] is None
    _ = [update async for update in updates]
    assert engine.requests[0].is_aborted


async def test_a_bug_in_an_answer_is_shown_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    tab, _ = make_tab(fail_after=(4, RuntimeError("boom")))
    history = (await play(tab, await ask(tab))).history
    assert "a bug (RuntimeError)" in read_text(history[-1]["content"]) and "job of the page failed" in caplog.text


async def test_a_turn_of_another_tab_becomes_a_version_and_the_later_end_of_it_is_taken() -> None:
    tab, _ = make_tab()
    before = {"current": "t", "chats": [{"id": "t", "messages": TURN, "forks": []}]}
    one = await tab.send(typed("one"), TURN, REQUEST, THREAD, None, *REST[:-1], before)
    both = store_of(one[5])
    two = await tab.send(typed("two"), TURN, REQUEST, THREAD, None, *REST[:-1], both)
    (fork,) = two[5]["put"][0]["forks"]
    assert (fork["at"], fork["active"], read_text(fork["tails"][0]["messages"][0]["content"])) == (
        3,
        1,
        "one",
    )
    _ = [update async for update in tab.watch(one[4])]
    first_end = store_of(tab.end(one[4], store_of(two[5]))[-1])
    _ = [update async for update in tab.watch(two[4])]
    (chat,) = tab.end(two[4], first_end)[-1]["put"]
    assert read_text(chat["messages"][4]["content"]) == "fine, thanks"
    assert (
        chat["forks"][0]["tails"][0]["messages"][1]["content"] == "fine, thanks" and len(chat["forks"]) == 1
    )


async def test_versions_stay_as_they_are_while_an_answer_is_written() -> None:
    tab, _ = make_tab()
    asked_again = await tab.retry(TURN, SimpleNamespace(index=0), REQUEST, THREAD, None, *REST)
    played = await play(tab, asked_again)
    history, thread, to_first = played.history, asked_again[3], SimpleNamespace(_data={"at": 1, "to": 0})
    turn = (await tab.send(typed("and?"), history, REQUEST, thread, None, *REST))[4]
    updates = tab.watch(turn)
    await anext(updates)
    assert tab.switch(history, thread, turn, None, to_first) == (gr.skip(),) * 5
    _ = [update async for update in updates]
    # Before the page has heard of the end: the turn goes into the version that it was asked in.
    assert tab.switch(history, thread, turn, None, to_first)[0] == TURN
    kept, *_, ended, branches, change = tab.end(turn, None)
    assert kept[:3] == history and ended["forks"][0]["active"] == 1 and branches[0]["active"] == 1
    assert tab.switch(kept, ended, None, None, to_first)[0] == TURN
    assert change["put"][0]["messages"] == kept
