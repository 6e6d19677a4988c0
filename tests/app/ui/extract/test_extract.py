"""The workbench's handlers on a fake engine: run, explain, keep, compare."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.extraction.extractor import make_again
from app.extraction.schema_check import SchemaChecker
from app.ui.examples import Examples
from app.ui.extract.run import NO_RESULT, Shown, add_example
from app.ui.extract.tab import NO_FILE, ExtractTab
from engine import EngineConfig, EngineOverloaded
from tests.app.extraction.pdf_files import make_pdf
from tests.engine.vision_folders import make_picture
from tests.fakes import FakeEngine
from tests.waiting import wait_until

REQUEST: Any = SimpleNamespace(session_hash="abc")
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}'
PARTS = ("badge", "fields", "record", "table", "figures", "marked", "tabs", "run", "stop", "shown", "page")


def make_tab(samples: dict[str, Path] | None = None, **options: Any) -> tuple[ExtractTab, FakeEngine]:
    engine = FakeEngine(**options)
    return ExtractTab(engine, Examples({"person": SCHEMA}, samples or {}), interval_s=0), engine


EXAMPLE = '{"text": "Bob, 5", "record": {"name": "Bob", "age": 5}}'


async def run(
    tab: ExtractTab,
    text: str = "Ada, 36",
    schema: str = SCHEMA,
    limits: bool = True,
    verified: Any = None,
    verbatim: bool = False,
    problem: Any = None,
) -> list[Any]:
    updates = [
        update
        async for update in tab.run(
            text, schema, problem, limits, verbatim, "", None, None, verified, REQUEST
        )
    ]
    return [SimpleNamespace(**dict(zip(PARTS, update, strict=True))) for update in updates]


async def test_instructions_and_examples_reach_the_engine() -> None:
    tab, engine = make_tab()
    _ = [
        each
        async for each in tab.run(
            "Ada, 36", SCHEMA, None, True, False, "Ages in years.", EXAMPLE, None, None, REQUEST
        )
    ]
    assert "Ages in years." in engine.requests[0].prompt and "Bob, 5" in engine.requests[0].prompt


async def collect(updates: AsyncGenerator[Any, None]) -> list[Any]:
    return [update async for update in updates]


def edit(**edits: str) -> Any:
    return SimpleNamespace(_data={"edits": {f"/{name}": text for name, text in edits.items()}})


async def test_a_run_ends_in_badge_fields_json_table_and_marked_source() -> None:
    tab, _ = make_tab()
    last = (await run(tab))[-1]
    assert "fits the schema" in last.badge and "Ada" in last.fields and "<mark" in last.marked
    assert last.record == '{\n  "name": "Ada",\n  "age": 36\n}' and "added limits" in last.figures
    assert "<td>36</td>" in last.table and last.tabs["selected"] == "evidence"
    assert last.run["interactive"] is True and last.stop["visible"] is False


async def test_the_record_is_shown_while_it_is_written() -> None:
    tab, _ = make_tab()
    updates = await run(tab)
    assert updates[0].stop["visible"] is True
    assert any(">writing<" in str(update.badge) and "Ad" in str(update.fields) for update in updates)


async def test_limits_and_salt_reach_the_engine() -> None:
    tab, engine = make_tab()
    await run(tab, limits=False)
    assert "maxLength" not in engine.requests[0].params.grammar.text
    assert engine.requests[0].options["cache_salt"] == "session-abc"


async def test_verbatim_texts_are_grounded_in_the_source_by_the_grammar() -> None:
    tab, engine = make_tab()
    await run(tab, "Ada Lovelace", verbatim=True)
    assert engine.requests[0].params.grammar.source == "Ada Lovelace"


@pytest.mark.parametrize(
    ("text", "schema", "words"),
    [
        ("", SCHEMA, "no text"),
        ("Ada", "{", "line 1"),
        ("Ada", '{"type": "object", "$dynamicRef": "#a"}', "“$dynamicRef” at the root"),
        ("Ada", SCHEMA[:-1] + f', "description": "{"x" * 3000}"}}', "too long"),
    ],
)
async def test_what_cannot_run_is_explained_and_not_run(text: str, schema: str, words: str) -> None:
    tab, engine = make_tab()
    last = (await run(tab, text, schema))[-1]
    assert words in last.badge and last.run["interactive"] is True and engine.requests == []


async def test_a_text_beyond_the_model_is_read_in_parts() -> None:
    tab, engine = make_tab()
    updates = await run(tab, "Ada is here.\n" * 300)
    assert "fits the schema" in updates[-1].badge and len(engine.requests) > 1
    assert any("parts; the text is long" in str(update.badge) for update in updates)
    assert "overlapping parts" in updates[-1].figures


async def test_a_full_queue_is_explained() -> None:
    tab, _ = make_tab(reject=EngineOverloaded("9 wait"))
    assert "queue is full" in (await run(tab))[-1].badge


async def test_stop_reports_an_incomplete_record() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, None, True, False, "", "", None, None, REQUEST)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    last = [update async for update in updates][-1]
    assert ">stopped<" in last[0] and last[7]["interactive"] is True and engine.requests[0].is_aborted


async def test_closing_the_tab_aborts_the_request() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, None, True, False, "", "", None, None, REQUEST)
    await anext(updates)
    await anext(updates)
    await updates.aclose()
    assert engine.requests[0].is_aborted


async def test_a_bug_goes_on_and_the_extract_button_opens_again() -> None:
    tab, _ = make_tab(reject=ZeroDivisionError("boom"))
    updates = []
    with pytest.raises(ZeroDivisionError):
        async for update in tab.run("Ada, 36", SCHEMA, None, True, False, "", "", None, None, REQUEST):
            updates.append(dict(zip(PARTS, update, strict=True)))
    last = updates[-1]
    assert "inside the app" in last["badge"] and "ZeroDivisionError" in last["badge"]
    assert last["run"]["interactive"] is True and last["stop"]["visible"] is False


async def test_a_long_run_of_digits_is_no_trouble_in_verbatim_mode() -> None:
    schema = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "number"}}}'
    tab, _ = make_tab()
    last = (await run(tab, text=f"Ada, 36. Key: {'9' * 320}", schema=schema, verbatim=True))[-1]
    assert "fits the schema" in last.badge and last.run["interactive"] is True


async def test_a_corrected_record_is_kept_and_a_later_run_is_compared_with_it() -> None:
    tab, _ = make_tab()
    shown = (await run(tab))[-1].shown
    badge, fields, record, *_, store = tab.keep(shown, edit(age="37"))
    assert ">verified<" in badge and '"age": 37' in record and "by hand" in fields
    again = (await run(tab, verified=store))[-1]
    assert "verified: 37" in again.fields and "1 of 2 fields as in the record you verified" in again.fields


async def test_a_correction_that_breaks_the_schema_is_not_kept() -> None:
    tab, _ = make_tab()
    shown = (await run(tab))[-1].shown
    update = tab.keep(shown, edit(age="old"))
    assert "not kept" in update[0] and "/age" in update[0] and update[-1] == gr.skip()


async def test_a_correction_that_a_pattern_cannot_check_in_time_is_not_kept() -> None:
    pattern = "^(?!" + 3 * "(?:x(?=.))*" + "y)"
    schema = SCHEMA.replace('"string"', f'"string", "pattern": "{pattern}"')
    tab, _ = make_tab()
    update = tab.keep((await run(tab, schema=schema))[-1].shown, edit(name="x" * 400))
    assert "not kept" in update[0] and "backtrack" in update[0] and update[-1] == gr.skip()


async def test_another_text_is_not_compared() -> None:
    tab, _ = make_tab()
    *_, store = tab.keep((await run(tab))[-1].shown, edit())
    assert "you verified" not in (await run(tab, text="Ada, 36!", verified=store))[-1].fields


async def test_keeping_before_any_run_does_nothing() -> None:
    tab, _ = make_tab()
    assert set(map(str, tab.keep(None, edit()))) == {str(gr.skip())}


async def test_a_sample_brings_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "person_1.txt"
    path.write_text("Ada")
    tab, _ = make_tab({"person 1": path})
    text, _, *results, name, form, schema, status, _ = await tab.pick_sample(
        SimpleNamespace(value="person 1"), REQUEST
    )
    assert tuple(results) == (*NO_RESULT, *NO_FILE)
    assert (text, name, schema) == ("Ada", "person", SCHEMA)
    assert form["value"]["fields"][0]["name"] == "name" and "schema keywords are enforced" in status


async def test_an_opened_file_takes_the_place_of_the_text_and_its_record(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("Bob")
    bad.write_bytes(b"\xff")
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, None, True, False, "", "", None, None, REQUEST)
    await anext(updates)
    running = asyncio.create_task(collect(updates))
    await wait_until(lambda: len(engine.requests) == 1)
    text, _, problem, *kept = await tab.open_file(str(bad), REQUEST)
    assert text == gr.skip() and "not UTF-8" in problem and "Open a text file" in problem
    assert kept == [gr.skip()] * 11 and not engine.requests[0].is_aborted
    text, _, *results = await tab.open_file(str(good), REQUEST)
    assert text == "Bob" and tuple(results[:7]) == NO_RESULT and engine.requests[0].is_aborted
    # The run before writes nothing beside the new text; only its buttons change back.
    *page, run_button, stop, shown, pdf_page = (await running)[-1]
    assert [*page, shown, pdf_page] == [gr.skip()] * 9
    assert run_button["interactive"] is True and stop["visible"] is False


async def test_a_text_opened_before_a_run_has_its_schema_ends_the_run(tmp_path: Path) -> None:
    (path := tmp_path / "good.txt").write_text("Bob")
    tab, engine = make_tab()
    is_asked, may_end = threading.Event(), threading.Event()

    def check(text: str) -> Any:
        is_asked.set()
        may_end.wait(20)
        return SchemaChecker().check(text)

    tab.checker = SimpleNamespace(check=check)
    running = asyncio.create_task(run(tab))
    await asyncio.to_thread(is_asked.wait, 20)
    opening = asyncio.create_task(tab.open_file(str(path), REQUEST))
    await wait_until(lambda: any(flag.asked == "leave" for flag in tab.stops._list("abc")))
    may_end.set()
    assert (await opening)[0] == "Bob" and engine.requests == []
    (last,) = await running
    assert last.badge == gr.skip() and last.run["interactive"] is True


async def test_a_pdf_shows_the_page_of_the_value_that_has_the_focus(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf("Ada", "Ada is 36"))
    tab, _ = make_tab()
    text, *_, page, page_tab, opened = await tab.open_file(str(path), REQUEST)
    assert page_tab["visible"] and "Page 1 of 2" in page and 'data-number="2"' in page
    first, second = [update async for update in run_opened(tab, text, opened)][-2:]
    shown = first[9]
    assert first[6]["selected"] == "page" and "verbatim, page 2" in first[1] and "Page 1 of 2" in second[10]
    focused = SimpleNamespace(_data={"pointer": "/age"})
    assert "Page 2 of 2" in await tab.locate(shown, None, focused)
    assert "Page 2 of 2" in await tab.turn(opened, SimpleNamespace(_data={"number": 2}))
    assert await tab.turn(opened, SimpleNamespace(_data={"number": 3})) == gr.skip()
    # Offsets of an edited text are not those of the file.
    (last,) = [update async for update in run_opened(tab, f"{text}.", opened)][-1:]
    assert await tab.locate(last[9], None, focused) == gr.skip()


async def test_a_schema_is_suggested_from_the_text_or_the_reason_is_shown() -> None:
    tab, engine = make_tab(record='{"title": "Person", "fields": [{"name": "name", "kind": "text"}]}')
    engine.config = EngineConfig(model="real", served_model_name="fake")
    chosen, form, schema, *_ = await tab.suggest("Ada, 36", None, REQUEST)
    assert chosen is None and json.loads(schema)["title"] == "Person"
    assert form["value"]["fields"][0]["name"] == "name" and "snake_case" in engine.requests[0].prompt
    with pytest.raises(gr.Error, match="There is no text yet"):
        await tab.suggest(" ", None, REQUEST)
    engine.reject = EngineOverloaded("the queue is full")
    with pytest.raises(gr.Error, match="queue is full"):
        await tab.suggest("Ada", None, REQUEST)


async def test_a_scan_is_extracted_from_its_pages(tmp_path: Path) -> None:
    make_picture((60, 40)).save(tmp_path / "scan.pdf")
    tab, engine = make_tab(sees_images=True)
    text, tabs, *_, page, _, opened = await tab.open_file(str(tmp_path / "scan.pdf"), REQUEST)
    assert (text, tabs["selected"]) == ("", "page") and "Page 1 of 1" in page
    last = [update async for update in run_opened(tab, text, opened)][-1]
    assert "<image>" in engine.requests[0].prompt and last[6]["selected"] == "page"
    assert "not in the text" not in last[1] and last[9].key != Shown(last[9].result, "", last[9].schema).key
    engine.sees_images = False
    assert "has no text in it" in (await tab.open_file(str(tmp_path / "scan.pdf"), REQUEST))[2]


def run_opened(tab: ExtractTab, text: str, opened: Any) -> AsyncGenerator[Any, None]:
    return tab.run(text, SCHEMA, None, True, False, "", "", opened, None, REQUEST)


async def test_what_is_kept_is_one_record_with_its_time() -> None:
    """The browser puts it beside what other tabs have kept; the newer one of the same text stays."""
    tab, _ = make_tab()
    shown = (await run(tab))[-1].shown
    first, second = tab.keep(shown, edit())[-1], tab.keep(shown, edit(age="37"))[-1]
    assert (
        list(first) == list(second) == [shown.key] and first[shown.key]["time"] <= second[shown.key]["time"]
    )
    assert second[shown.key]["record"] == {"name": "Ada", "age": 37}


@pytest.mark.parametrize("line", ["no", "[]", '{"text": 5, "record": {}}', '{"text": "x"}'])
async def test_an_example_that_is_none_is_named_by_its_line(line: str) -> None:
    tab, engine = make_tab()
    updates = tab.run("Ada", SCHEMA, None, True, False, "", f"{EXAMPLE}\n{line}", None, None, REQUEST)
    (refused,) = [update async for update in updates]
    assert "Line 2" in refused[0] and engine.requests == []


LIST = '{"type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}}}}'


async def test_items_come_and_go_and_json_follows_a_correction_at_once() -> None:
    tab, _ = make_tab()
    first = (await run(tab))[-1].shown
    schema = json.loads(LIST)
    shown = Shown(make_again(schema, "Ada, Bob", first.result, {"names": ["Ada"]}), "Ada, Bob", schema)
    event: Any = SimpleNamespace(_data={"pointer": "/names/0", "action": "add", "edits": {}})
    _, fields, record, *_, added = tab.change_items(shown, None, event)
    assert (
        json.loads(record) == {"names": ["Ada", ""]}
        and 'data-items="remove" data-pointer="/names/1"' in fields
    )
    typed: Any = SimpleNamespace(_data={"edits": {"/names/1": "Bob"}})
    record, *_, both = tab.edit(added, typed)
    assert json.loads(record) == {"names": ["Ada", "Bob"]} and both[1].result.evidence["/names/1"].start == 5
    assert "Bob" in add_example(added, both, "") and "Bob" in tab.keep(added, typed)[2]
    # A value changed back is not an edit.
    assert json.loads(tab.edit(added, SimpleNamespace(_data={"edits": {}}))[0]) == {"names": ["Ada", ""]}
    event._data |= {"action": "remove", **typed._data}
    assert tab.change_items(added, None, event)[-1].result.record == {"names": ["Bob"]}
    assert (
        "not changed"
        in tab.change_items(added, None, SimpleNamespace(_data={"pointer": "/x", "action": "add"}))[0]
    )
