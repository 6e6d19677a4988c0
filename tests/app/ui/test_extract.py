"""The extraction tab's handlers on a fake engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.ui.examples import Examples
from app.ui.extract import ExtractTab
from engine import EngineOverloaded
from tests.fakes import FakeEngine

REQUEST: Any = SimpleNamespace(session_hash="abc")
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}'


def make_tab(samples: dict[str, Path] | None = None, **options: Any) -> tuple[ExtractTab, FakeEngine]:
    engine = FakeEngine(**options)
    return ExtractTab(engine, Examples({"person": SCHEMA}, samples or {}), interval_s=0), engine


async def run(tab: ExtractTab, text: str = "Ada, 36", schema: str = SCHEMA, limits: bool = True) -> list[Any]:
    return [update async for update in tab.run(text, schema, limits, REQUEST)]


async def test_a_run_ends_in_badge_fields_json_and_figures() -> None:
    tab, _ = make_tab()
    badge, fields, record, figures, run_button, stop_button = (await run(tab))[-1]
    assert "schema-valid" in badge and "Ada" in fields and "<mark" in fields
    assert record == '{\n  "name": "Ada",\n  "age": 36\n}' and "added limits" in figures
    assert run_button["interactive"] is True and stop_button["visible"] is False


async def test_the_record_is_shown_while_it_is_written() -> None:
    tab, _ = make_tab()
    updates = await run(tab)
    assert updates[0][5]["visible"] is True
    assert any(">writing<" in str(update[0]) and "Ad" in str(update[1]) for update in updates)


async def test_limits_and_salt_reach_the_engine() -> None:
    tab, engine = make_tab()
    await run(tab, limits=False)
    assert "maxLength" not in engine.requests[0].params.grammar.text
    assert engine.requests[0].options["cache_salt"] == "session-abc"


@pytest.mark.parametrize(
    ("text", "schema", "words"),
    [
        ("", SCHEMA, "no text"),
        ("Ada", "{", "line 1"),
        ("Ada", '{"type": "object", "$dynamicRef": "#a"}', "“$dynamicRef” at the root"),
        ("x" * 3000, SCHEMA, "too long"),
    ],
)
async def test_what_cannot_run_is_explained_and_not_run(text: str, schema: str, words: str) -> None:
    tab, engine = make_tab()
    update = (await run(tab, text, schema))[-1]
    assert words in update[0] and update[4]["interactive"] is True and engine.requests == []


async def test_a_full_queue_is_explained() -> None:
    tab, _ = make_tab(reject=EngineOverloaded("9 wait"))
    assert "queue is full" in (await run(tab))[-1][0]


async def test_stop_says_that_the_record_is_not_complete() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, True, REQUEST)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    last = [update async for update in updates][-1]
    assert ">stopped<" in last[0] and last[4]["interactive"] is True and engine.requests[0].is_aborted


async def test_closing_the_tab_aborts_the_request() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, True, REQUEST)
    await anext(updates)
    await anext(updates)
    await updates.aclose()
    assert engine.requests[0].is_aborted


def test_the_editor_tells_at_once_what_is_wrong_and_where() -> None:
    tab, _ = make_tab()
    assert "Every keyword is enforced" in tab.check_schema(SCHEMA)
    assert "line 1 column 2" in tab.check_schema("{")
    assert "“$dynamicRef” at the root" in tab.check_schema('{"type": "array", "$dynamicRef": "#a"}')


def test_a_sample_brings_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "person_1.txt"
    path.write_text("Ada")
    tab, _ = make_tab({"person 1": path})
    assert tab.choose_sample("person 1") == ("Ada", "person", SCHEMA)


def test_a_file_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff")
    tab, _ = make_tab()
    with pytest.raises(gr.Error, match="not UTF-8"):
        tab.open_file(str(path))
