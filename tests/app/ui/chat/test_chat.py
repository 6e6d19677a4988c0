"""The chat's handlers on a fake engine: answers grow, end in figures, fail in words, and stop."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.ui.chat.conversation import answer_message, figures_message, read_text, user_message
from app.ui.chat.settings import Settings
from app.ui.chat.tab import ChatTab
from engine import EngineDead, EngineOverloaded
from tests.fakes import FakeEngine

REQUEST: Any = SimpleNamespace(session_hash="abc")
SETTINGS = (Settings().system_prompt, 0.0, 1.0, 0, 0.0, 64, "", "", "none", "", 0, True)
THREAD: Any = {"id": "t", "forks": []}
TURN = [user_message("hello"), answer_message("hi"), figures_message("3 tokens")]


def make_tab(**options: Any) -> tuple[ChatTab, FakeEngine]:
    engine = FakeEngine(reply=lambda prompt: "fine, thanks", **options)
    return ChatTab(engine, "welcome", [], interval_s=0), engine


def typed(text: str, *files: str) -> dict[str, Any]:
    return {"text": text, "files": list(files)}


async def play(tab: ChatTab, begun: tuple[Any, ...], settings: tuple[Any, ...] = SETTINGS) -> Any:
    """Run a turn that began to its end: what grew, and the composer, tokens and history at the end."""
    turn = begun[4]
    grew = [update async for update in tab.answer(turn, REQUEST, *settings)]
    history, composer, growing, tokens, _ = tab.close(turn)
    assert growing == []
    return SimpleNamespace(grew=grew, history=history, composer=composer, tokens=tokens)


async def ask(tab: ChatTab, text: str = "hello", history: Any = (), *files: str) -> tuple[Any, ...]:
    return await tab.send(typed(text, *files), list(history), THREAD, None)


async def begin_writing(tab: ChatTab) -> tuple[Any, AsyncGenerator[Any, None]]:
    """A turn in the middle of its answer."""
    turn = (await ask(tab))[4]
    updates = tab.answer(turn, REQUEST, *SETTINGS)
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
    assert begun[0] == gr.skip() and begun[2] == [user_message("hello")]
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
    played = await play(tab, await ask(tab, "and you?", TURN), settings)
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
    begun = tab.retry(TURN, THREAD, None, SimpleNamespace(index=0))
    fork, (chat,) = begun[3]["forks"][0], begun[5]["put"]
    assert (fork["at"], fork["active"], fork["tails"][0]["messages"]) == (1, 1, TURN[1:])
    assert chat["messages"][0] == TURN[0] and chat["forks"][0]["tails"][0]["messages"] == TURN[1:]
    assert len((await play(tab, begun)).history) == 3
    assert engine.requests[0].prompt.endswith("<user>hello\n<assistant>")


async def test_an_edit_drops_what_followed_and_keeps_the_old_words_as_another_version() -> None:
    tab, engine = make_tab()
    data: Any = SimpleNamespace(index=(0, 0), value="bye", previous_value="hello")
    # The page sends the new words in their place.
    begun = tab.edit([user_message("bye"), *TURN[1:]], THREAD, None, data)
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


async def test_an_attached_file_is_read_to_the_model_or_explained(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("the ``` cat")
    tab, engine = make_tab()
    await play(tab, await ask(tab, "What is this?", [], str(path)))
    assert "What is this?\n\nnote.txt\n````\nthe ``` cat\n````" in engine.requests[0].prompt
    path.write_bytes(b"\xff")
    history = (await play(tab, await ask(tab, "", [], str(path)))).history
    assert "note.txt is not UTF-8" in read_text(history[-1]["content"]) and len(engine.requests) == 1


async def test_an_empty_message_asks_nothing() -> None:
    tab, engine = make_tab()
    played = await play(tab, await ask(tab, "  "))
    assert engine.requests == [] and played.history == gr.skip()


async def test_a_second_question_waits_until_the_first_is_answered() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    assert await tab.send(typed("and?"), [], THREAD, turn) == (gr.skip(),) * 6
    # Its own end must not close the turn that still runs, nor begin it again.
    assert tab.close(turn) == (gr.skip(),) * 5
    assert [update async for update in tab.answer(turn, REQUEST, *SETTINGS)] == [gr.skip()]
    history, _ = await finish(tab, turn, updates)
    assert read_text(history[1]["content"]) == "fine, thanks" and len(engine.requests) == 1


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
    updates = tab.answer(turn, REQUEST, *SETTINGS)
    await anext(updates)
    page = [user_message("bye"), *TURN[1:]] if begin == "edit" else TURN
    assert getattr(tab, begin)(page, THREAD, turn, data) == (shown, *(gr.skip(),) * 5)
    assert [update async for update in tab.answer(turn, REQUEST, *SETTINGS)] == [gr.skip()]
    assert "still being written" in capsys.readouterr().out
    history, _ = await finish(tab, turn, updates)
    assert history[:3] == TURN and read_text(history[4]["content"]) == "fine, thanks"
    assert [request.is_finished for request in engine.requests] == [True]


@pytest.mark.parametrize(
    ("error", "words"), [(EngineOverloaded("9 wait"), "queue is full"), (EngineDead("boom"), "has stopped")]
)
async def test_a_refusal_is_shown_in_words_and_the_composer_opens_again(error: Exception, words: str) -> None:
    tab, _ = make_tab(reject=error)
    played = await play(tab, await ask(tab))
    assert words in read_text(played.history[-1]["content"]) and played.composer["submit_btn"] is True


async def test_an_engine_lost_in_the_middle_keeps_the_half_answer() -> None:
    tab, _ = make_tab(fail_after=(4, EngineDead("boom")))
    history = (await play(tab, await ask(tab))).history
    assert [read_text(message["content"])[:4] for message in history] == ["hell", "fine", "**Th"]


async def test_a_bad_setting_is_explained() -> None:
    tab, engine = make_tab()
    played = await play(tab, await ask(tab), (*SETTINGS[:-4], "regex", "", 0, True))
    assert "cannot be used" in read_text(played.history[-1]["content"]) and engine.requests == []


async def test_closing_the_tab_while_the_request_waits_aborts_it() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    _, updates = await begin_writing(tab)  # with a heartbeat: the engine has said nothing yet
    await updates.aclose()
    assert engine.requests[0].is_aborted


async def test_stop_keeps_what_is_there_and_aborts_the_request() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    tab.stop(turn)
    history, composer = await finish(tab, turn, updates)
    assert "fine, thanks".startswith(read_text(history[1]["content"])) and engine.requests[0].is_aborted
    assert history[-1]["metadata"]["title"].endswith("stopped") and composer["submit_btn"] is True


async def test_stop_before_the_first_token_ends_the_turn() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    turn, updates = await begin_writing(tab)
    tab.stop(turn)
    history, _ = await finish(tab, turn, updates)
    assert history[-1]["metadata"]["title"] == "stopped" and engine.requests[0].is_aborted


async def test_a_page_that_is_gone_ends_its_answer() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    tab.stops.ask("abc", "leave")
    await finish(tab, turn, updates)
    assert engine.requests[0].is_aborted


async def test_a_stop_without_an_answer_does_not_hit_the_next_one() -> None:
    tab, _ = make_tab()
    tab.stop(None)
    tab.stops.ask("abc")
    assert read_text((await play(tab, await ask(tab))).history[1]["content"]) == "fine, thanks"


async def test_leaving_a_chat_while_it_answers_writes_nothing_into_the_next_one() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    tab.leave(turn)
    history, composer = await finish(tab, turn, updates)
    assert history == gr.skip() and composer["submit_btn"] is True and engine.requests[0].is_aborted


async def test_the_question_is_kept_when_the_chat_is_left_before_its_answer() -> None:
    tab, _ = make_tab(hold=asyncio.Event())
    *_, turn, change = await tab.send(typed("hello"), [], None, None)
    (chat,) = change["put"]
    assert chat["id"] == change["current"] == turn.thread["id"] and chat["title"] == "hello"
    # As after a stop: the turn can be tried again.
    assert chat["messages"] == [
        *(await ask(tab))[2],
        answer_message(""),
        figures_message("stopped", turn.turn_id),
    ]
    updates = tab.answer(turn, REQUEST, *SETTINGS)
    await anext(updates)
    tab.leave(turn)
    _ = [update async for update in updates]
    assert tab.end(turn, {"current": "another", "chats": [chat]})[-1] == gr.skip()


async def test_only_the_chat_that_is_removed_ends_its_answer() -> None:
    tab, engine = make_tab()
    turn, updates = await begin_writing(tab)
    tab.leave_removed(turn, SimpleNamespace(_data={"id": "another"}))
    assert turn.asked is None
    tab.leave_removed(turn, SimpleNamespace(_data={"id": THREAD["id"]}))
    _ = [update async for update in updates]
    closed = tab.end(turn, None)
    assert closed[-1] == gr.skip() and closed[4] is None and engine.requests[0].is_aborted


async def test_versions_stay_as_they_are_while_an_answer_is_written() -> None:
    tab, _ = make_tab()
    asked_again = tab.retry(TURN, THREAD, None, SimpleNamespace(index=0))
    played = await play(tab, asked_again)
    history, thread, to_first = played.history, asked_again[3], SimpleNamespace(_data={"at": 1, "to": 0})
    turn = (await tab.send(typed("and?"), history, thread, None))[4]
    updates = tab.answer(turn, REQUEST, *SETTINGS)
    await anext(updates)
    assert tab.switch(history, thread, turn, None, to_first) == (gr.skip(),) * 5
    _ = [update async for update in updates]
    # Before the page has heard of the end: the turn goes into the version that it was asked in.
    assert tab.switch(history, thread, turn, None, to_first)[0] == TURN
    kept, *_, ended, branches, change = tab.end(turn, None)
    assert kept[:3] == history and ended["forks"][0]["active"] == 1 and branches[0]["active"] == 1
    assert tab.switch(kept, ended, None, None, to_first)[0] == TURN
    assert change["put"][0]["messages"] == kept
