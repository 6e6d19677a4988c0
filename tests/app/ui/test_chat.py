"""The chat's handlers on a fake engine: answers grow, end in figures, fail in words, and stop."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from app.ui.chat import ChatTab
from app.ui.conversation import answer_message, figures_message, read_text, user_message
from app.ui.settings import Settings
from engine import EngineDead, EngineOverloaded
from tests.fakes import FakeEngine

REQUEST: Any = SimpleNamespace(session_hash="abc")
SETTINGS = (Settings().system_prompt, 0.0, 1.0, 0, 0.0, 64, "", "", "none", "")
TURN = [user_message("hello"), answer_message("hi"), figures_message("3 tokens")]


def make_tab(**options: Any) -> tuple[ChatTab, FakeEngine]:
    engine = FakeEngine(reply=lambda prompt: "fine, thanks", **options)
    return ChatTab(engine, "welcome", [], interval_s=0), engine


async def collect(updates: AsyncGenerator[tuple[Any, Any], None]) -> list[tuple[Any, Any]]:
    return [update async for update in updates]


async def test_an_answer_grows_and_ends_with_its_figures() -> None:
    tab, _ = make_tab()
    updates = await collect(tab.send("hello", [], REQUEST, *SETTINGS))
    texts = [read_text(history[1]["content"]) for history, _ in updates[1:]]
    assert texts == sorted(texts, key=len) and texts[-1] == "fine, thanks"
    assert "12 tokens" in updates[-1][0][-1]["metadata"]["title"]


async def test_the_composer_shows_stop_while_an_answer_runs() -> None:
    tab, _ = make_tab()
    updates = await collect(tab.send("hello", [], REQUEST, *SETTINGS))
    assert (updates[0][1]["stop_btn"], updates[0][1]["value"]) == (True, "")
    assert (updates[-1][1]["stop_btn"], updates[-1][1]["submit_btn"]) == (False, True)


async def test_the_model_reads_system_prompt_and_history() -> None:
    tab, engine = make_tab()
    await collect(tab.send("and you?", TURN, REQUEST, "be kind", *SETTINGS[1:]))
    assert (
        engine.requests[0].prompt
        == "<system>be kind\n<user>hello\n<assistant>hi\n<user>and you?\n<assistant>"
    )


async def test_each_session_has_its_own_cache_salt() -> None:
    tab, engine = make_tab()
    await collect(tab.send("hello", [], REQUEST, *SETTINGS))
    assert engine.requests[0].options["cache_salt"] == "session-abc"


async def test_an_empty_message_asks_nothing() -> None:
    tab, engine = make_tab()
    await collect(tab.send("  ", [], REQUEST, *SETTINGS))
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "words"), [(EngineOverloaded("9 wait"), "queue is full"), (EngineDead("boom"), "has stopped")]
)
async def test_a_refusal_is_shown_in_words_and_the_composer_opens_again(error: Exception, words: str) -> None:
    tab, _ = make_tab(reject=error)
    history, composer = (await collect(tab.send("hello", [], REQUEST, *SETTINGS)))[-1]
    assert words in read_text(history[-1]["content"]) and composer["submit_btn"] is True


async def test_an_engine_lost_in_the_middle_keeps_the_half_answer() -> None:
    tab, _ = make_tab(fail_after=(4, EngineDead("boom")))
    history, _ = (await collect(tab.send("hello", [], REQUEST, *SETTINGS)))[-1]
    assert [read_text(message["content"])[:4] for message in history] == ["hell", "fine", "**Th"]


async def test_a_bad_setting_is_explained() -> None:
    tab, engine = make_tab()
    history, _ = (await collect(tab.send("hello", [], REQUEST, *SETTINGS[:-2], "regex", "")))[-1]
    assert "not usable" in read_text(history[-1]["content"]) and engine.requests == []


async def test_closing_the_tab_while_the_request_waits_aborts_it() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.send("hello", [], REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)  # a heartbeat: the engine has said nothing yet
    await updates.aclose()
    assert engine.requests[0].is_aborted


async def test_retry_answers_the_same_question_again() -> None:
    tab, engine = make_tab()
    history, _ = (await collect(tab.retry(TURN, SimpleNamespace(index=0), REQUEST, *SETTINGS)))[-1]
    assert len(history) == 3 and engine.requests[0].prompt.endswith("<user>hello\n<assistant>")


async def test_an_edit_drops_what_followed() -> None:
    tab, engine = make_tab()
    data: Any = SimpleNamespace(index=(0, 0), value="bye")
    history, _ = (await collect(tab.edit(TURN, data, REQUEST, *SETTINGS)))[-1]
    assert read_text(history[0]["content"]) == "bye" and "<user>bye" in engine.requests[0].prompt


def test_undo_takes_the_question_back_into_the_composer() -> None:
    tab, _ = make_tab()
    history, composer = tab.undo([*TURN, *TURN], SimpleNamespace(index=3))
    assert history == TURN and composer["value"] == "hello"


async def test_stop_keeps_what_is_there_and_aborts_the_request() -> None:
    tab, engine = make_tab()
    updates = tab.send("hello", [], REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    history, composer = (await collect(updates))[-1]
    assert "fine, thanks".startswith(read_text(history[1]["content"])) and engine.requests[0].is_aborted
    assert history[-1]["metadata"]["title"].endswith("stopped") and composer["submit_btn"] is True


async def test_stop_before_the_first_token_ends_the_turn() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.send("hello", [], REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    history, _ = (await collect(updates))[-1]
    assert history[-1]["metadata"]["title"] == "stopped" and engine.requests[0].is_aborted


async def test_a_chat_cleared_while_it_answers_stays_empty() -> None:
    tab, engine = make_tab()
    updates = tab.send("hello", [], REQUEST, *SETTINGS)
    await anext(updates)
    await anext(updates)
    tab.discard(REQUEST)
    assert (await collect(updates))[-1][0] == [] and engine.requests[0].is_aborted


async def test_a_stop_without_an_answer_does_not_hit_the_next_one() -> None:
    tab, _ = make_tab()
    tab.stop(REQUEST)
    history, _ = (await collect(tab.send("hello", [], REQUEST, *SETTINGS)))[-1]
    assert read_text(history[1]["content"]) == "fine, thanks"
