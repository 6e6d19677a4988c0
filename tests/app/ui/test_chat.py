"""The chat's handlers on a fake engine: answers grow, end in figures, fail in words, and stop."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.ui.chat import ChatTab
from app.ui.conversation import answer_message, figures_message, read_text, user_message
from app.ui.settings import Settings
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


async def collect(updates: AsyncGenerator[tuple[Any, ...], None]) -> list[tuple[Any, Any]]:
    """Chatbot and composer of every update."""
    return [(update[0], update[1]) async for update in updates]


async def test_an_answer_grows_and_ends_with_its_figures() -> None:
    tab, _ = make_tab()
    updates = await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS))
    texts = [read_text(history[1]["content"]) for history, _ in updates[1:]]
    assert texts == sorted(texts, key=len) and texts[-1] == "fine, thanks"
    assert "12 tokens" in updates[-1][0][-1]["metadata"]["title"]


async def test_the_composer_shows_stop_while_an_answer_runs() -> None:
    tab, _ = make_tab()
    updates = await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS))
    assert (updates[0][1]["stop_btn"], updates[0][1]["value"]) == (True, None)
    assert (updates[-1][1]["stop_btn"], updates[-1][1]["submit_btn"]) == (False, True)


async def test_the_model_reads_system_prompt_and_history() -> None:
    tab, engine = make_tab()
    await collect(tab.send(typed("and you?"), TURN, THREAD, REQUEST, "be kind", *SETTINGS[1:]))
    assert (
        engine.requests[0].prompt
        == "<system>be kind\n<user>hello\n<assistant>hi\n<user>and you?\n<assistant>"
    )


async def test_each_session_has_its_own_cache_salt() -> None:
    tab, engine = make_tab()
    await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS))
    assert engine.requests[0].options["cache_salt"] == "session-abc"


async def test_an_empty_message_asks_nothing() -> None:
    tab, engine = make_tab()
    await collect(tab.send(typed("  "), [], THREAD, REQUEST, *SETTINGS))
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "words"), [(EngineOverloaded("9 wait"), "queue is full"), (EngineDead("boom"), "has stopped")]
)
async def test_a_refusal_is_shown_in_words_and_the_composer_opens_again(error: Exception, words: str) -> None:
    tab, _ = make_tab(reject=error)
    history, composer = (await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)))[-1]
    assert words in read_text(history[-1]["content"]) and composer["submit_btn"] is True


async def test_an_engine_lost_in_the_middle_keeps_the_half_answer() -> None:
    tab, _ = make_tab(fail_after=(4, EngineDead("boom")))
    history, _ = (await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)))[-1]
    assert [read_text(message["content"])[:4] for message in history] == ["hell", "fine", "**Th"]


async def test_a_bad_setting_is_explained() -> None:
    tab, engine = make_tab()
    settings = (*SETTINGS[:-4], "regex", "", 0, True)
    history, _ = (await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *settings)))[-1]
    assert "not usable" in read_text(history[-1]["content"]) and engine.requests == []


async def test_closing_the_tab_while_the_request_waits_aborts_it() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)  # a heartbeat: the engine has said nothing yet
    await updates.aclose()
    assert engine.requests[0].is_aborted


async def test_retry_answers_the_same_question_again() -> None:
    tab, engine = make_tab()
    history, _ = (await collect(tab.retry(TURN, THREAD, SimpleNamespace(index=0), REQUEST, *SETTINGS)))[-1]
    assert len(history) == 3 and engine.requests[0].prompt.endswith("<user>hello\n<assistant>")


async def test_an_edit_drops_what_followed() -> None:
    tab, engine = make_tab()
    data: Any = SimpleNamespace(index=(0, 0), value="bye", previous_value="hello")
    history, _ = (await collect(tab.edit(TURN, THREAD, data, REQUEST, *SETTINGS)))[-1]
    assert read_text(history[0]["content"]) == "bye" and "<user>bye" in engine.requests[0].prompt


def test_undo_takes_the_question_back_into_the_composer() -> None:
    tab, _ = make_tab()
    history, composer = tab.undo([*TURN, *TURN], SimpleNamespace(index=3))
    assert history == TURN and composer["value"]["text"] == "hello"


async def test_stop_keeps_what_is_there_and_aborts_the_request() -> None:
    tab, engine = make_tab()
    updates = tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    history, composer = (await collect(updates))[-1]
    assert "fine, thanks".startswith(read_text(history[1]["content"])) and engine.requests[0].is_aborted
    assert history[-1]["metadata"]["title"].endswith("stopped") and composer["submit_btn"] is True


async def test_stop_before_the_first_token_ends_the_turn() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    history, _ = (await collect(updates))[-1]
    assert history[-1]["metadata"]["title"] == "stopped" and engine.requests[0].is_aborted


async def test_a_chat_cleared_while_it_answers_stays_empty() -> None:
    tab, engine = make_tab()
    updates = tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.discard(REQUEST)
    assert (await collect(updates))[-1][0] == [] and engine.requests[0].is_aborted


async def test_a_stop_without_an_answer_does_not_hit_the_next_one() -> None:
    tab, _ = make_tab()
    tab.stop(REQUEST)
    history, _ = (await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)))[-1]
    assert read_text(history[1]["content"]) == "fine, thanks"


async def test_leaving_a_chat_while_it_answers_writes_nothing_into_the_next_one() -> None:
    tab, engine = make_tab()
    updates = tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.leave(REQUEST)
    history, composer = (await collect(updates))[-1]
    assert history == gr.skip() and composer["submit_btn"] is True and engine.requests[0].is_aborted


async def test_an_answer_ends_with_its_tokens_and_their_rivals() -> None:
    tab, _ = make_tab()
    updates = [update async for update in tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS)]
    steps = updates[-1][2]["steps"]
    assert "".join(step["text"] for step in steps) == "fine, thanks" and steps[0]["p"] == 0.7788
    assert [each["text"] for each in steps[0]["top"]] == ["f", "~"] and updates[0][2] == {"steps": []}


async def test_tokens_are_not_recorded_where_nobody_asked() -> None:
    tab, engine = make_tab()
    updates = [
        update async for update in tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS[:-1], False)
    ]
    assert updates[-1][2] == {"steps": []} and engine.requests[0].params.logprobs is None


async def test_priority_reaches_the_engine() -> None:
    tab, engine = make_tab()
    await collect(tab.send(typed("hello"), [], THREAD, REQUEST, *SETTINGS[:-2], -3, True))
    assert engine.requests[0].options["priority"] == -3


async def test_a_retry_keeps_the_answer_before_as_another_version() -> None:
    tab, _ = make_tab()
    updates = [u async for u in tab.retry(TURN, THREAD, SimpleNamespace(index=0), REQUEST, *SETTINGS)]
    fork = updates[-1][3]["forks"][0]
    assert (fork["at"], fork["active"], fork["tails"][0]["messages"]) == (1, 1, TURN[1:])


async def test_an_edit_keeps_the_old_words_as_another_version() -> None:
    tab, _ = make_tab()
    data: Any = SimpleNamespace(index=0, value="bye", previous_value="hello")
    changed = [user_message("bye"), *TURN[1:]]  # as the page sends it
    updates = [u async for u in tab.edit(changed, THREAD, data, REQUEST, *SETTINGS)]
    assert updates[-1][3]["forks"][0]["tails"][0]["messages"] == TURN


async def test_an_attached_file_is_read_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("the ``` cat")
    tab, engine = make_tab()
    await collect(tab.send(typed("What is this?", str(path)), [], THREAD, REQUEST, *SETTINGS))
    assert "What is this?\n\nnote.txt\n````\nthe ``` cat\n````" in engine.requests[0].prompt


async def test_an_attachment_that_is_no_text_is_explained_and_nothing_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_bytes(b"\xff")
    tab, engine = make_tab()
    history, _ = (await collect(tab.send(typed("", str(path)), [], THREAD, REQUEST, *SETTINGS)))[-1]
    assert "note.txt is not UTF-8" in read_text(history[-1]["content"]) and engine.requests == []


async def test_of_a_long_chat_only_the_growing_text_is_sent() -> None:
    tab, _ = make_tab()
    history = [user_message("q"), answer_message("a")] * 20
    updates = [u async for u in tab.send(typed("hello"), history, THREAD, REQUEST, *SETTINGS)]
    assert len(updates[0][0]) == 42 and all(update[0] == gr.skip() for update in updates[1:-1])
    assert [u[4] for u in updates[1:-1] if u[4] != gr.skip()][-1] == "fine, thanks"
    assert len(updates[-1][0]) == 43 and read_text(updates[-1][0][41]["content"]) == "fine, thanks"
    assert updates[-1][4] == ""
