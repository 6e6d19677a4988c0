"""The workbench's handlers on a fake engine: run, explain, keep, compare."""

import asyncio
import base64
import copy
import dataclasses
import functools
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import openpyxl
import pytest

from app.api.context import ApiContext
from app.api.model_pool import ModelPool
from app.config import AppConfig
from app.extraction.extractor import make_again
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import Source
from app.store import Store
from app.ui.examples import Examples
from app.ui.extract.approvals import read_trust
from app.ui.extract.pages import Opened
from app.ui.extract.record_view import EMPTY, render_fields
from app.ui.extract.run import add_example
from app.ui.extract.saving import FILE_FORMATS, save_record
from app.ui.extract.shown import Shown, restore
from app.ui.extract.source import PROOF
from app.ui.extract.tab import ExtractTab
from app.ui.extract.why import render_why
from app.ui.model_choice import ModelChoice
from app.ui.owner import find_owner
from app.ui.stops import Stops
from engine import CatalogueEntry, EngineConfig, EngineOverloaded
from tests.app.extraction.pdf_files import make_pdf
from tests.engine.vision_folders import make_picture
from tests.fakes import FakeEngine
from tests.waiting import wait_until

REQUEST: Any = SimpleNamespace(session_hash="abc", request=None)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}'


@functools.cache
def build_tab() -> ExtractTab:
    tab = ExtractTab(FakeEngine(), Examples({"person": SCHEMA}, {}), Store(), interval_s=0)
    with gr.Blocks() as demo:
        tab.build(demo)
    return tab


def make_tab(
    samples: dict[str, Path] | None = None, pool: Any = None, **options: Any
) -> tuple[ExtractTab, FakeEngine]:
    """A tab of its own with the components of the others, which take a while to make."""
    tab, engine = copy.copy(build_tab()), FakeEngine(**options)
    tab.engine, tab.store, tab.stops = engine, Store(), Stops()
    tab.models, tab.reader = ModelChoice(engine, pool), copy.copy(tab.reader)  # type: ignore[arg-type]
    tab.reader.models = tab.models
    tab.examples = Examples({"person": SCHEMA}, samples or {})
    return tab, engine


def read(tab: ExtractTab, update: Any) -> Any:
    """The update of a handler, by the names of the components; gr.skip() where one stays as it is."""
    desk, panel = tab.desk, tab.panel
    parts = {
        "badge": desk.badge, "fields": desk.fields, "record": desk.record, "marked": desk.marked, "shown": desk.shown,
        "figures": tab.figures, "tabs": tab.source_tabs, "run": tab.run_button, "stop": tab.stop_button,
        "page": tab.page, "page_tab": tab.page_tab, "text": tab.text, "name": tab.name, "opened": tab.opened,
        "trust": desk.trust, "form": panel.form, "schema": panel.code, "status": panel.status,
        "chosen": panel.chooser, "fold": panel.fold, "to_batch": tab.to_batch,
    }
    found = {} if update == gr.skip() else update
    return SimpleNamespace(**{name: found.get(part, gr.skip()) for name, part in parts.items()})


EXAMPLE = '{"text": "Bob, 5", "record": {"name": "Bob", "age": 5}}'


async def run(
    tab: ExtractTab, text: str = "Ada, 36", schema: str = SCHEMA, limits: bool = True,
    verbatim: bool = False, problem: Any = None, model: str = "fake",
) -> list[Any]:
    updates = [
        update async for update in tab.run(text, schema, problem, limits, verbatim, "", None, None, model, REQUEST)
    ]
    return [read(tab, update) for update in updates]


async def test_instructions_and_examples_reach_the_engine() -> None:
    tab, engine = make_tab()
    await collect(tab.run("Ada, 36", SCHEMA, None, True, False, "Ages in years.", EXAMPLE, None, "fake", REQUEST))
    assert "Ages in years." in engine.requests[0].prompt and "Bob, 5" in engine.requests[0].prompt


async def collect(updates: AsyncGenerator[Any, None]) -> list[Any]:
    return [update async for update in updates]


async def act(tab: ExtractTab, shown: Any, action: str = "edit", pointer: str = "-", **edits: str) -> Any:
    """What the page shows after a person did this."""
    typed, of = {f"/{name}": text for name, text in edits.items()}, getattr(shown, "reading", "")
    data = {"action": action, "pointer": pointer, "of": of, "edits": typed}
    return read(tab, await tab.act(shown, "", SimpleNamespace(_data=data), REQUEST))  # type: ignore[arg-type]


async def test_a_run_ends_in_badge_fields_json_table_and_marked_source() -> None:
    tab, _ = make_tab()
    last = (await run(tab))[-1]
    assert "valid JSON" in last.badge and "Ada" in last.fields and "<mark" in last.marked
    assert last.record == '{\n  "name": "Ada",\n  "age": 36\n}' and "added limits" in last.figures
    assert last.tabs["selected"] == "evidence"
    assert last.run["interactive"] is True and last.stop["visible"] is False


async def test_the_record_is_shown_while_it_is_written() -> None:
    tab, _ = make_tab()
    updates = await run(tab)
    assert updates[0].stop["visible"] is True
    assert any(">writing<" in str(update.badge) and "Ad" in str(update.fields) for update in updates)


async def test_the_text_stays_unmarked_while_it_is_read_and_where_that_fails() -> None:
    *reading, done = await run(make_tab()[0], "Ada <36>, a text")
    assert "Ada &lt;36&gt;, a text" in reading[0].marked and "<mark" not in reading[0].marked
    assert all(update.marked == gr.skip() for update in reading[1:]) and "<mark" in done.marked
    first, failed = await run(make_tab(reject=EngineOverloaded("9 wait"))[0])
    assert "Ada, 36" in first.marked and failed.marked == first.marked


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
        ("", SCHEMA, "no text"), ("Ada", "{", "line 1"),
        ("Ada", '{"type": "object", "properties": {}}', "no field yet"), ("Ada", "{}", "no field yet"),
        ("Ada", '{"type": "object", "$dynamicRef": "#a"}', "“$dynamicRef” at the root"),
        ("Ada", SCHEMA[:-1] + f', "description": "{"x" * 3000}"}}', "too long"),
    ],
)
async def test_what_cannot_run_is_explained_and_not_run(text: str, schema: str, words: str) -> None:
    tab, engine = make_tab()
    last = (await run(tab, text, schema))[-1]
    assert words in last.badge and last.run["interactive"] is True and engine.requests == []


async def test_a_run_with_a_blank_schema_leaves_the_record_of_before() -> None:
    last = (await run(make_tab()[0], schema='{"type": "object", "properties": {}}'))[-1]
    assert "no field yet" in last.badge and last.fields == last.shown == gr.skip()


async def test_a_text_beyond_the_model_is_read_in_parts() -> None:
    tab, engine = make_tab()
    updates = await run(tab, "Ada is here.\n" * 300)
    assert "valid JSON" in updates[-1].badge and len(engine.requests) > 1
    assert any("parts of the text" in str(update.badge) for update in updates)
    assert "overlapping parts" in updates[-1].figures


async def test_a_full_queue_is_explained() -> None:
    tab, _ = make_tab(reject=EngineOverloaded("9 wait"))
    assert "queue is full" in (await run(tab))[-1].badge


async def test_stop_reports_an_incomplete_record() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, None, True, False, "", "", None, "fake", REQUEST)
    await anext(updates)
    await anext(updates)
    tab.stop(REQUEST)
    last = [update async for update in updates][-1]
    assert ">stopped<" in read(tab, last).badge and read(tab, last).run["interactive"] is True
    assert engine.requests[0].is_aborted


async def test_closing_the_tab_aborts_the_request() -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, None, True, False, "", "", None, "fake", REQUEST)
    await anext(updates)
    await anext(updates)
    await updates.aclose()
    assert engine.requests[0].is_aborted


async def test_a_bug_goes_on_and_the_extract_button_opens_again() -> None:
    tab, _ = make_tab(reject=ZeroDivisionError("boom"))
    updates = []
    with pytest.raises(ZeroDivisionError):
        async for update in tab.run("Ada, 36", SCHEMA, None, True, False, "", "", None, "fake", REQUEST):
            updates.append(read(tab, update))
    last = updates[-1]
    assert "inside the app" in last.badge and "ZeroDivisionError" in last.badge
    assert last.run["interactive"] is True and last.stop["visible"] is False


async def test_an_approved_record_is_kept_and_a_later_run_is_compared_with_it() -> None:
    tab, _ = make_tab()
    corrected = await act(tab, (await run(tab))[-1].shown, age="37")
    assert '"age": 37' in corrected.record and "typed by you" in corrected.fields
    done = await act(tab, corrected.shown, "approve")
    assert ">approved<" in done.badge and ">1 to check</button>" in done.fields
    assert b",/name," in base64.b64decode(save_record("csv", done.shown)["data"])  # nobody looked at it
    assert "10 records of this schema" in done.trust and "; 1 so far." in done.trust
    assert "0 of 1" in done.trust
    again = (await run(tab))[-1]
    assert "approved before: 37" in again.fields and "1 of 2 fields as approved before" in again.fields
    other = (await run(tab, text="Ada, 36!"))[-1]
    assert "approved before" not in other.fields


async def list_kept(tab: ExtractTab) -> list[tuple[str, bool]]:
    return [(each["reader"], each["state"] != "not approved") for each in (await tab.list_recent(REQUEST))["recent"]]


async def test_another_models_record_is_kept_and_compared_and_its_value_can_be_taken() -> None:
    tab, _ = make_tab(pool=make_pool())
    first = (await run(tab, model="large"))[-1]
    assert "differs from" not in first.fields
    project, _ = await tab.keep("", "Ada, 36", SCHEMA, None, first.shown, REQUEST)
    second = (await run(tab))[-1]
    assert "differs from large in 2 fields" in second.fields
    assert "large read: &quot;Eve&quot;" in second.fields and 'data-act="take" data-pointer="/name"' in second.fields
    taken = await act(tab, second.shown, "take", "/name")
    assert taken.shown.result.record["name"] == "Eve" and taken.shown.by_hand == {"/name"}
    assert "differs from large in 1 field<" in taken.fields
    again = restore(json.loads(json.dumps(taken.shown.dump())), "Ada, 36", json.loads(SCHEMA))
    assert list(again.differences) == ["/age"] and again.reading == taken.shown.reading
    # Both stay, one for each model, however often they read; and so does what was corrected.
    for model in ("fake", "large", "fake"):
        project, _ = await tab.keep(project, "Ada, 36", SCHEMA, None, (await run(tab, model=model))[-1].shown, REQUEST)
    assert await list_kept(tab) == [("fake", False), ("large", False), ("fake", True)]
    assert "differs from" not in (await run(tab, text="Ada, 36!"))[-1].fields


async def test_a_corrected_record_stays_under_recent_when_its_text_is_read_again() -> None:
    tab, _ = make_tab()
    corrected = (await act(tab, (await run(tab))[-1].shown, age="37")).shown
    project, _ = await tab.keep("", "Ada, 36", SCHEMA, None, corrected, REQUEST)
    again = (await run(tab))[-1]
    assert again.shown.result.record["age"] == 36 and "is kept under Recent" in again.fields
    second, _ = await tab.keep(project, "Ada, 36", SCHEMA, None, again.shown, REQUEST)
    assert second != project and await list_kept(tab) == [("fake", False), ("fake", True)]
    back = await act(tab, again.shown, "bring back")
    assert back.shown.result.record["age"] == 37 and back.shown.by_hand == {"/age"}
    assert "kept under Recent" not in back.fields
    third, _ = await tab.keep(second, "Ada, 36", SCHEMA, None, back.shown, REQUEST)
    assert third == second and await list_kept(tab) == [("fake", True)]


async def test_two_pages_with_one_record_lose_no_correction() -> None:
    tab, _ = make_tab()
    opened = (await run(tab))[-1].shown
    project, _ = await tab.keep("", "Ada, 36", SCHEMA, None, opened, REQUEST)
    first = await act(tab, opened, age="37")
    second = await act(tab, opened, name="Bob")  # a page that was opened before
    assert second.shown.result.record == {"name": "Bob", "age": 37} and second.shown.by_hand == {"/name", "/age"}
    kept, _ = await tab.keep(project, "Ada, 36", SCHEMA, None, first.shown, REQUEST)
    (again,) = [read(tab, update) async for update in tab.open({"project": kept}, REQUEST)]
    assert kept == project and again.shown.result.record == {"name": "Bob", "age": 37}
    # A change of the other page is neither replaced nor approved unseen.
    for refused in (await act(tab, first.shown, name="Eve"), await act(tab, first.shown, "approve", "")):
        assert ">changed in another tab<" in refused.badge and refused.shown.result.record == again.shown.result.record
    assert "not applied: “Eve”" in (await act(tab, first.shown, name="Eve")).badge
    assert (await act(tab, again.shown, "approve", "")).shown.is_approved


async def test_a_record_stays_when_its_text_is_changed_before_the_schema() -> None:
    tab, _ = make_tab()
    corrected = (await act(tab, (await run(tab))[-1].shown, age="37")).shown
    project, _ = await tab.keep("", "Ada, 36", SCHEMA, None, corrected, REQUEST)
    second, _ = await tab.keep(project, "Bob, 40", "{}", None, corrected, REQUEST)
    await tab.keep(second, "Bob, 40", SCHEMA, None, (await run(tab, "Bob, 40"))[-1].shown, REQUEST)
    assert await list_kept(tab) == [("fake", False), ("fake", True)]


SLOW = f"^(?!{3 * '(?:x(?=.))*'}y)"


@pytest.mark.parametrize(
    ("schema", "edits", "words"),
    [
        (SCHEMA, {"age": "old"}, "/age"),
        (SCHEMA.replace('"string"', f'"string", "pattern": "{SLOW}"'), {"name": "x" * 400}, "backtrack"),
    ],
)
async def test_a_correction_that_breaks_the_schema_shows_at_once_and_is_not_approved(
    schema: str, edits: dict[str, str], words: str
) -> None:
    tab, _ = make_tab()
    shown = (await run(tab, schema=schema))[-1].shown
    update = await act(tab, shown, **edits)
    assert ">not valid<" in update.badge and words in update.badge and "flagged" in update.fields
    refused = await act(tab, update.shown, "approve")
    assert "not done" in refused.badge and refused.shown == gr.skip() and refused.trust == gr.skip()
    undone = await act(tab, update.shown, "undo", f"/{next(iter(edits))}")
    assert "valid JSON" in undone.badge and "typed by you" not in undone.fields


async def test_before_any_run_there_is_nothing_to_do() -> None:
    tab, _ = make_tab()
    assert (await act(tab, None, "approve")).badge == gr.skip()
    event: Any = SimpleNamespace(_data={"of": "another record", "edits": {"/name": "Bob"}})
    with pytest.raises(gr.Error, match="Another record took the place"):
        await tab.act((await run(tab))[-1].shown, "", event, REQUEST)


async def test_a_record_is_saved_as_it_was_corrected() -> None:
    tab, _ = make_tab()
    shown = (await act(tab, (await run(tab))[-1].shown, "check", "/name", age="37")).shown
    saved = {file_format: base64.b64decode(save_record(file_format, shown)["data"]) for file_format in FILE_FORMATS}
    assert json.loads(saved["json"]) == {
        "source": "", "model": "fake", "approved": False, "to_check": [], "record": {"name": "Ada", "age": 37}
    }
    assert b"approved,name,age\r\n" in saved["csv"] and b",false,Ada,37" in saved["csv"] and b",fake," in saved["csv"]
    assert saved["xlsx"].startswith(b"PK") and save_record("csv", shown)["name"] == "record.csv"
    with pytest.raises(gr.Error, match="extract one first"):
        save_record("csv", None)


@pytest.mark.parametrize(
    ("text", "source", "name"), [("Ada, 36 and more", "ada.txt", "ada-record"), ("another", "", "record")]
)
async def test_a_record_is_saved_under_the_name_of_its_document(text: str, source: str, name: str) -> None:
    tab, _ = make_tab()
    opened = Opened(Path("folder/ada.txt"), Source("ada.txt", "and more"))
    updates = await collect(tab.run(text, SCHEMA, None, True, False, "", "", opened, "fake", REQUEST))
    (shown,) = [update[tab.desk.shown] for update in updates if update.get(tab.desk.shown)]
    saved = save_record("json", shown)
    assert (saved["name"], json.loads(base64.b64decode(saved["data"]))["source"]) == (f"{name}.json", source)


async def test_the_page_opens_with_an_extraction_unless_a_text_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(gr, "Info", said.append)
    (path := tmp_path / "sample.txt").write_text("Ada, 36")
    tab, engine = make_tab()
    tab.examples = Examples({"invoice": SCHEMA}, {PROOF: path})
    updates = [read(tab, update) async for update in tab.open({"is_new": True}, REQUEST)]
    assert "takes no cookie" in said[0]
    assert updates[0].text == "Ada, 36" and PROOF in updates[0].name and "Ada" in updates[-1].fields
    assert [update async for update in tab.open({}, REQUEST)] == [gr.skip()] and len(engine.requests) == 1
    engine.refusal = "an encoder generates no text"
    assert [update async for update in tab.open({"is_new": True}, REQUEST)] == [gr.skip()]


async def test_a_reload_keeps_text_file_schema_record_and_corrections(tmp_path: Path) -> None:
    (path := tmp_path / "ada.txt").write_text("Ada, 36")
    tab, _ = make_tab()
    file = read(tab, await tab.open_file(str(path), "fake", REQUEST)).opened
    shown = (await act(tab, (await run(tab))[-1].shown, "check", "/name", age="37")).shown
    project, _ = await tab.keep("", "Ada, 36", SCHEMA, file, shown, REQUEST)
    (opened,) = [read(tab, update) async for update in tab.open({"project": project}, REQUEST)]
    again = opened.shown
    assert (opened.text, opened.schema, again.result.record) == ("Ada, 36", SCHEMA, {"name": "Ada", "age": 37})
    assert (again.by_hand, again.checked) == (shown.by_hand, shown.checked)
    assert opened.opened == again.opened == file and "ada.txt" in opened.name
    path.unlink()
    assert render_why(again, "/name") == render_why(shown, "/name")
    assert (await act(tab, again, "undo", "/age")).shown.result.record == {"name": "Ada", "age": 36}
    assert [each["name"] for each in (await tab.list_recent(REQUEST))["recent"]] == ["ada.txt"]
    # What was typed since is newer; another browser has no such project.
    (opened,) = [read(tab, update) async for update in tab.open({"project": project, "draft": "Ada, 40"}, REQUEST)]
    assert opened.text == "Ada, 40" and opened.shown.text == "Ada, 36" and "ada.txt" in opened.name
    other = SimpleNamespace(session_hash="xyz", request=None)
    assert [update async for update in tab.open({"project": project}, other)] == [gr.skip()]


def make_pool() -> ModelPool:
    """A pool with a second model, `large`, which writes another record."""
    def make_engine(config: EngineConfig) -> Any:
        return FakeEngine(config=config, record='{"name": "Eve", "age": 1}')

    first: Any = FakeEngine()
    pool = ModelPool(ApiContext(first, AppConfig(api_key="k")), make_engine)
    pool.keep("chat", CatalogueEntry("large", "/models/large", "folder"))
    return pool


async def test_the_chosen_model_reads_and_stands_for_its_record() -> None:
    pool = make_pool()
    tab, engine = make_tab(pool=pool)
    offered = await tab.reader.offer("fake")
    assert offered["visible"] and [name for _, name in offered["choices"]] == ["fake", "large"]
    assert "value" not in offered
    assert (await tab.reader.offer("large"))["value"] == "large"  # as the browser kept it
    shown = (await run(tab, model="large"))[-1].shown
    assert (shown.model, shown.result.record["name"], engine.requests) == ("large", "Eve", [])
    assert "Read by large" in (await act(tab, shown, "approve")).badge
    owner = find_owner(REQUEST)
    found = [await tab.store.run(read_trust, owner, shown.schema, name) for name in ("fake", "large")]
    assert found[0] is None and found[1] is not None and found[1].num_unseen == 2
    project, _ = await tab.keep("", shown.text, SCHEMA, None, shown, REQUEST)
    (opened,) = [update async for update in tab.open({"project": project}, REQUEST)]
    assert opened[tab.desk.shown].model == opened[tab.reader.dropdown]["value"] == "large"
    assert "2 values that were approved but not opened do not count" in opened[tab.desk.trust]
    assert "embedded demo model" not in opened[tab.calibration]
    (opened,) = [update async for update in tab.open({"project": project, "reader": "fake"}, REQUEST)]
    assert (opened[tab.desk.shown].model, opened[tab.reader.dropdown]["value"]) == ("large", "fake")


@pytest.mark.parametrize(
    ("sizes", "larger"),
    [
        ({"small": 135, "large": 400, "unloaded": 7000}, "large"),
        ({"small": 135, "large": 299, "unloaded": 300}, "unloaded"),
        ({"small": 135, "large": 299, "unloaded": 0}, None),
    ],
)
async def test_where_many_values_are_doubtful_a_much_larger_model_that_is_here_is_offered(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], larger: str | None
) -> None:
    async def list_choices() -> dict[str, CatalogueEntry]:
        return {
            name: CatalogueEntry(name, f"/models/{name}", "folder", 10**9 - size, num_parameters=size * 10**6)
            for name, size in sizes.items()
        }

    monkeypatch.setattr("app.ui.model_choice.is_demo_model", lambda engine: engine.model_name == "fake")
    pool = make_pool()
    monkeypatch.setattr(pool, "list_choices", list_choices)
    tab, _ = make_tab(pool=pool)
    shown = (await run(tab, "nobody"))[-1].shown
    assert len(shown.to_check) == 2 and not (await tab._offer(shown))["visible"]  # two may be corrected by hand
    many = make_again({}, "nobody", shown.result, {"names": ["Ada", "Bob", "Cy", "Di"]})
    flags = {leaf.pointer: ("unsure",) for leaf in many.leaves}
    doubtful = Shown(dataclasses.replace(many, flags=flags), "nobody", {}, "fake")
    offered, chosen = await tab._offer(doubtful), await tab.choose_larger(doubtful)
    assert (offered["visible"], chosen.get("value")) == (larger is not None, larger)
    assert larger is None or offered["value"] == f"Many values are doubtful: read again with {larger} ›"
    assert not (await tab._offer(dataclasses.replace(doubtful, model="large")))["visible"]


async def test_a_model_that_is_not_here_any_more_is_named_and_the_others_are_offered(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(gr, "Warning", said.append)
    pool = make_pool()
    tab, engine = make_tab(pool=pool)
    pool.kept.clear()
    pool.roles.clear()
    (update,) = [each async for each in tab.run("Ada", SCHEMA, None, True, False, "", "", None, "large", REQUEST)]
    assert "large is not here any more" in update[tab.desk.badge] and engine.requests == []
    assert tab.desk.shown not in update and update[tab.reader.dropdown]["value"] == "fake"
    offered = await tab.reader.offer("large")  # as after a reload
    assert (offered["value"], offered["visible"]) == ("fake", False)
    assert said == ["large is not here any more. fake reads from now on."]


async def test_a_model_that_is_not_loaded_is_offered_last_and_loaded_when_it_is_chosen_or_asked(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApiContext, "warm_up", lambda context: None)  # there is no such folder
    pool = make_pool()
    tab, _ = make_tab(pool=pool)
    pool.keep("extract", CatalogueEntry("other", "/models/other", "folder"))
    entry = pool.roles["chat"]
    del pool.kept[entry.model]  # as a model of the folder: here, and not loaded
    offered = await tab.reader.offer("large")
    assert offered["value"] == "large" and offered["choices"] == [
        ("Read by fake", "fake"), ("Read by other", "other"), ("Read by large (not loaded)", "large")
    ]
    first, *_, last = [update["choices"][-1][0] async for update in tab.reader.load("large")]
    assert (first, last) == ("Loading large, 0 s …", "Read by large") and pool.find_loaded(entry) is not None
    await pool.unload(entry)
    updates = await run(tab, model="large")
    assert any("Loading large, 0 s" in str(update.badge) for update in updates)
    assert updates[-1].shown.model == "large" and updates[-1].shown.result.record["name"] == "Eve"


async def test_a_picked_sample_is_read_at_once_and_the_heading_of_the_list_is_none(tmp_path: Path) -> None:
    (path := tmp_path / "person_1.txt").write_text("Ada, 36")
    tab, engine = make_tab({"person 1": path})
    picked = read(tab, await tab.pick_sample("person 1", REQUEST))
    asked = (picked.text, picked.schema, None, True, False, "", "", picked.opened, "fake")
    updates = await collect(tab.run_picked(REQUEST, "person 1", *asked))
    assert updates[-1][tab.desk.shown].result.record == {"name": "Ada", "age": 36}
    assert await collect(tab.run_picked(REQUEST, "", *asked)) == [gr.skip()] and len(engine.requests) == 1


async def test_a_sample_brings_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "person_1.txt"
    path.write_text("Ada")
    tab, _ = make_tab({"person 1": path})
    update = read(tab, await tab.pick_sample("person 1", REQUEST))
    assert (update.fields, update.shown, update.figures) == (EMPTY, None, "") and "person 1" in update.name
    assert (update.text, update.chosen["value"], update.schema) == ("Ada", "person", SCHEMA)
    assert update.form["value"]["fields"][0]["name"] == "name" and "schema keywords are enforced" in update.status


async def test_an_opened_file_takes_the_place_of_the_text_and_its_record(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("Bob")
    bad.write_bytes(b"\xff")
    tab, engine = make_tab(hold=asyncio.Event())
    updates = tab.run("Ada", SCHEMA, None, True, False, "", "", None, "fake", REQUEST)
    await anext(updates)
    running = asyncio.create_task(collect(updates))
    await wait_until(lambda: len(engine.requests) == 1)
    update = read(tab, await tab.open_file(str(good), "fake", REQUEST))
    assert (update.text, update.fields, update.shown) == ("Bob", EMPTY, None) and "good.txt" in update.name
    assert engine.requests[0].is_aborted
    # The run before writes nothing beside the new text; only its buttons change back.
    assert set((await running)[-1]) == {tab.run_button, tab.stop_button}
    assert "Bob" in update.marked and not update.badge and not update.to_batch["visible"]
    table = tmp_path / "rows.csv"
    table.write_text("name,age\nAda,36\n")
    update = read(tab, await tab.open_file(str(table), "fake", REQUEST))
    assert update.to_batch["visible"] and "Ada,36" in update.marked
    people = [("name", "age"), ("Ada", 36), ("Bob", 40)]
    for rows, is_table in ((people, True), ([("A note",)], False)):
        sheet = tmp_path / "rows.xlsx"
        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(row)
        book.save(sheet)
        assert read(tab, await tab.open_file(str(sheet), "fake", REQUEST)).to_batch["visible"] is is_table
    update = read(tab, await tab.open_file(str(bad), "fake", REQUEST))
    assert "not UTF-8" in update.badge and "Open a PDF" in update.badge
    # What was open before is neither shown nor extracted.
    assert (update.text, update.fields, update.shown, update.opened) == ("", EMPTY, None, None)
    assert "good.txt" not in update.name


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
    opening = asyncio.create_task(tab.open_file(str(path), "fake", REQUEST))
    await wait_until(lambda: any(flag.asked == "leave" for flag in tab.stops._list("abc")))
    may_end.set()
    assert (await opening)[tab.text] == "Bob" and engine.requests == []
    (last,) = await running
    assert last.badge == gr.skip() and last.run["interactive"] is True


async def test_a_pdf_shows_the_page_of_the_value_that_has_the_focus(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf("Ada", "Ada is 36"))
    tab, _ = make_tab()
    update = read(tab, await tab.open_file(str(path), "fake", REQUEST))
    opened = update.opened
    assert update.page_tab["visible"] and "Page 1 of 2" in update.page and 'data-number="2"' in update.page
    first, second = [read(tab, each) async for each in run_opened(tab, update.text, opened)][-2:]
    assert first.tabs["selected"] == "page" and "page 2" in first.fields and "Page 1 of 2" in second.page
    assert "Page 2 of 2" in await tab.locate(first.shown, "/age")
    assert "Page 2 of 2" in await tab.turn(opened, SimpleNamespace(_data={"number": 2}))  # type: ignore[arg-type]
    assert await tab.turn(opened, SimpleNamespace(_data={"number": 3})) == gr.skip()  # type: ignore[arg-type]
    # Offsets of an edited text are not those of the file.
    (last,) = [read(tab, each) async for each in run_opened(tab, f"{update.text}.", opened)][-1:]
    assert await tab.locate(last.shown, "/age") == gr.skip()


async def test_a_schema_is_made_of_names_or_proposed_for_the_text() -> None:
    tab, engine = make_tab(record='{"title": "Person", "fields": [{"name": "name", "kind": "text"}]}')
    wish = "Customer, order date, total; skills (list)"
    named = json.loads(read(tab, await tab.describe(wish, "", None, "fake", REQUEST)).schema)
    kinds = {name: (each["type"], each.get("format")) for name, each in named["properties"].items()}
    assert kinds == {
        "customer": ("string", None), "order_date": ("string", "date"), "total": ("number", None),
        "skills": ("array", None),
    }
    with pytest.raises(gr.Error, match="List the fields"):
        await tab.describe("Everything that a bookkeeper needs to know.", "Ada", None, "fake", REQUEST)
    engine.config = EngineConfig(model="real", served_model_name="fake")
    update = read(tab, await tab.describe("Who is it about, and how old are they?", "Ada, 36", None, "fake", REQUEST))
    assert update.chosen["value"] is None and json.loads(update.schema)["title"] == "Person"
    assert "snake_case" in engine.requests[0].prompt and "how old" in engine.requests[0].prompt
    with pytest.raises(gr.Error, match="There is no text yet"):
        await tab.describe("", " ", None, "fake", REQUEST)
    engine.reject = EngineOverloaded("the queue is full")
    with pytest.raises(gr.Error, match="queue is full"):
        await tab.describe("", "Ada", None, "fake", REQUEST)


async def test_a_scan_is_extracted_from_its_pages(tmp_path: Path) -> None:
    make_picture((60, 40)).save(tmp_path / "scan.pdf")
    tab, engine = make_tab(sees_images=True)
    opening = read(tab, await tab.open_file(str(tmp_path / "scan.pdf"), "fake", REQUEST))
    assert (opening.text, opening.tabs["selected"]) == ("", "page") and "Page 1 of 1" in opening.page
    last = read(tab, [update async for update in run_opened(tab, opening.text, opening.opened)][-1])
    assert "<image>" in engine.requests[0].prompt and last.tabs["selected"] == "page"
    assert "not in the text" not in last.fields
    assert last.shown.key != Shown(last.shown.result, "", last.shown.schema, "fake").key
    engine.sees_images = False
    assert "has no text in it" in read(tab, await tab.open_file(str(tmp_path / "scan.pdf"), "fake", REQUEST)).badge


def run_opened(tab: ExtractTab, text: str, opened: Any) -> AsyncGenerator[Any, None]:
    return tab.run(text, SCHEMA, None, True, False, "", "", opened, "fake", REQUEST)


@pytest.mark.parametrize("line", ["no", "[]", '{"text": 5, "record": {}}', '{"text": "x"}'])
async def test_an_example_that_is_none_is_named_by_its_line(line: str) -> None:
    tab, engine = make_tab()
    updates = tab.run("Ada", SCHEMA, None, True, False, "", f"{EXAMPLE}\n{line}", None, "fake", REQUEST)
    (refused,) = [read(tab, update) async for update in updates]
    assert "Line 2" in refused.badge and engine.requests == []


ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "price": {"type": "number"}}}
LINES: dict[str, Any] = {
    "type": "object", "properties": {"lines": {"type": "array", "items": ITEM}, "total": {"type": "number"}}
}


async def show_lines(tab: ExtractTab) -> Shown:
    """Three lines: the model was unsure of the first, and a person has looked at it."""
    drafted = (await run(tab))[-1].shown.result
    record = {"lines": [{"name": name, "price": 1} for name in ("Ada", "Bob", "Cy")], "total": 3}
    sure = {f"/lines/{at}/{name}": 0.5 + at / 10 for at in range(3) for name in ("name", "price")}
    text = "Ada 1 Bob 1 Cy 1, total 3"
    result = make_again(LINES, text, dataclasses.replace(drafted, confidence=sure), record)
    return Shown(result, text, LINES, "fake").act({"action": "check", "pointer": "/lines/1/name"})


async def test_marks_follow_the_items_that_come_and_go() -> None:
    tab, _ = make_tab()
    typed = (await show_lines(tab)).act({"edits": {"/lines/2/price": "2"}})
    assert typed.by_hand == {"/lines/2/price"} and "/lines/1/name" in typed.checked
    removed = (await act(tab, typed, "remove", "/lines/0")).shown
    assert removed.by_hand == {"/lines/1/price"} and "/lines/0/name" in removed.checked
    assert removed.result.confidence["/lines/0/name"] == 0.6 and removed.result.confidence["/lines/1/name"] == 0.7
    assert removed.act({"action": "bring back"}) == typed and "Undo the removal" in render_fields(removed)
    assert "Undo the removal" not in render_fields(removed.act({"action": "check", "pointer": "/lines/0/price"}))
    added = await act(tab, removed, "add", "/lines/0")
    assert added.shown.by_hand == {"/lines/2/price"}
    sure = added.shown.result.confidence
    assert sure["/lines/2/name"] == 0.7 and "/lines/1/name" not in sure
    assert 'aria-label="lines › 2 › name"' in added.fields and json.loads(added.record)["lines"][1]["name"] == ""
    assert "not done" in (await act(tab, added.shown, "add", "/lines/9")).badge


async def test_a_value_typed_as_the_model_wrote_it_is_checked_and_an_undone_one_is_not() -> None:
    tab, _ = make_tab(record='{"name": "Bob", "age": 36}')
    flagged = (await run(tab))[-1].shown
    assert "/name" in flagged.to_check
    typed = (await act(tab, flagged, name="Ada")).shown
    back = await act(tab, typed, name="Bob")
    assert "/name" not in back.shown.to_check and "checked by you: not in the text" in back.fields
    assert "/name" in typed.act({"action": "undo", "pointer": "/name"}).to_check


async def test_a_reload_keeps_what_was_typed_at_its_item_when_items_before_it_came_or_went() -> None:
    tab, _ = make_tab()
    typed = (await show_lines(tab)).act({"edits": {"/lines/2/price": "2"}, "seen": ["/lines/2/price"]})
    added = typed.act({"action": "remove", "pointer": "/lines/0"}).act({"action": "add", "pointer": "/lines/1"})
    added = added.act({"edits": {"/lines/2/name": "Bob"}})
    again = restore(json.loads(json.dumps(added.dump())), added.text, added.schema)
    for name in ("origin", "by_hand", "checked", "seen", "empty"):
        assert getattr(again, name) == getattr(added, name), name
    assert again.result.confidence == added.result.confidence and again.draft_of("/lines/1/price") == 1
    assert again.act({"action": "undo", "pointer": "/lines/1/price"}).by_hand == {"/lines/2/name"}


async def test_an_added_item_is_to_be_filled_in_before_the_record_is_approved() -> None:
    tab, _ = make_tab()
    item = ITEM | {"properties": ITEM["properties"] | {"note": {"type": ["string", "null"]}}}
    schema = {"type": "object", "properties": {"lines": {"type": "array", "items": item}}}
    drafted = (await run(tab))[-1].shown.result
    record = {"lines": [{"name": "Ada", "price": 1, "note": None}, {"name": "Bob", "price": 2, "note": None}]}
    shown = Shown(make_again(schema, "Ada 1, Bob 2", drafted, record), "Ada 1, Bob 2", schema, "fake")
    added = await act(tab, shown, "add", "/lines/0")
    new = ["/lines/1/name", "/lines/1/price", "/lines/1/note"]
    assert set(added.shown.to_check) == set(new) and added.shown.unseen[3:6] == new
    assert added.fields.count('></textarea>') == 3 and "<b>name, price, note</b> fill in" in added.fields
    assert "typed by you" not in added.fields and " disabled>Approve when filled in<" in added.fields
    assert ">fill in<" in added.badge and "not done" in (await act(tab, added.shown, "approve")).badge
    half = await act(tab, added.shown, **{"lines/1/price": "3"})
    kept = restore(half.shown.dump(), half.shown.text, schema)
    assert kept.to_check == half.shown.to_check == ["/lines/1/name", "/lines/1/note"]
    assert half.shown.by_hand == {"/lines/1/price"} and "not done" in (await act(tab, kept, "approve")).badge
    # What is right without a value is confirmed.
    done = half.shown.act({"edits": {"/lines/1/name": "Cy"}}).act({"action": "check", "pointer": "/lines/1/note"})
    assert done.to_check == [] and done.act({"action": "approve"}).is_approved


async def test_sums_counts_and_marks_follow_each_correction_at_once() -> None:
    tab, _ = make_tab()
    schema = LINES | {"x-checks": [{"sum": ["/lines/*/price"], "equals": "/total"}]}
    shown = dataclasses.replace(await show_lines(tab), schema=schema)
    wrong = await act(tab, shown, **{"lines/0/price": "5"})
    assert "/total" in wrong.shown.to_check and "total is 3" in wrong.fields and "typed by you" in wrong.fields
    assert "please check" in wrong.badge and len(wrong.shown.to_check) == 5
    looked_at = wrong.shown.act({"action": "check", "pointer": "/total", "seen": wrong.shown.unseen})
    assert ">Approve, the sum differs</button>" in render_fields(looked_at)
    assert looked_at.act({"action": "approve"}).is_approved
    right = await act(tab, wrong.shown, total="7")
    assert "/total" not in right.shown.to_check and "total is" not in right.fields and len(right.shown.to_check) == 4


async def test_each_value_says_why_it_is_what_it_is() -> None:
    tab, engine = make_tab()
    shown = (await run(tab))[-1].shown
    why = render_why(shown, "/name")
    assert engine.requests[0].params.logprobs > 0
    assert "In the text" in why and "“Ada”" in why and "The model weighed" in why and "%" in why
    assert "the model wrote <code>36</code>" in render_why(shown.act({"edits": {"/age": "7"}}), "/age")
    assert "Bob" in add_example(shown.act({"edits": {"/name": "Bob"}}), "")
