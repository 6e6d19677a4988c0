"""A batch on a fake engine: every row ends, a failure affects one row only, and finished rows stay."""

import asyncio
import copy
import functools
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.api.context import ApiContext
from app.api.job_kinds import make_answer
from app.api.model_pool import ModelPool
from app.concurrency import cancel_all
from app.config import AppConfig
from app.extraction.files import read_file
from app.extraction.flags import ENDED
from app.extraction.sources import Row, TableLimits, UnreadableSource, make_table
from app.store import Item
from app.ui.batch import downloads, tables
from app.ui.batch.fields import cut_text
from app.ui.batch.run import BatchRun
from app.ui.batch.tab import AS_IN_EXTRACT, BatchTab
from app.ui.batch.tables import NO_TABLE, OpenTables, open_table
from app.ui.batch.view import format_duration, render_preview, render_progress, render_records
from app.ui.examples import Examples
from app.ui.extract.approvals import read_trust
from app.ui.extract.schema_panel import SchemaPanel
from app.ui.stops import Stops
from engine import CatalogueEntry, EngineDead
from tests.fakes import FakeEngine
from tests.waiting import wait_until


def make_request(session: str, owner: str = "me") -> Any:
    info = SimpleNamespace(owner=owner)
    return SimpleNamespace(session_hash=session, request=SimpleNamespace(scope={"state": {"info": info}}))


REQUEST, LATER = make_request("abc"), make_request("later")
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'
ROWS = (
    Row("a", {"text": "Ada, 36"}), Row("b", error="b is broken"), Row("c", {"id": "7", "text": " "}),
    Row("d", {"text": "Bob"}),
)
MakeTab = Callable[..., tuple[BatchTab, FakeEngine]]


@functools.cache
def build_tab() -> BatchTab:
    examples = Examples({"person": SCHEMA}, {})
    tab, panel = BatchTab(ApiContext(FakeEngine(), AppConfig()), examples), SchemaPanel(examples)  # type: ignore[arg-type]
    with gr.Blocks() as demo:
        panel.build_chooser()
        panel.build(demo)
        tab.build(demo, panel, gr.Button(), [gr.State(), gr.State()])
    return tab


@pytest.fixture
async def make_tab() -> AsyncIterator[MakeTab]:
    """Makes a tab in which a session has opened rows; all share their components, which take a while to make."""
    workers: list[asyncio.Task[None]] = []

    def make(rows: tuple[Row, ...] = ROWS, **options: Any) -> tuple[BatchTab, FakeEngine]:
        engine = FakeEngine(**options)
        context: Any = ApiContext(engine, AppConfig())  # type: ignore[arg-type]
        pool = ModelPool(context, lambda config: FakeEngine(config=config, **options))  # type: ignore[arg-type, return-value]
        workers.append(asyncio.create_task(context.jobs.run(partial(make_answer, pool))))
        tab = copy.copy(build_tab())
        fresh, review = BatchTab(context, tab.examples, interval_s=0, pool=pool), copy.copy(tab.review)
        review.__dict__ |= vars(fresh.review) | {"desk": review.desk, "_redraw": tab._redraw}
        fresh.reader.dropdown = tab.reader.dropdown
        tab.__dict__ |= vars(fresh) | {"review": review}
        tab.tables.put(REQUEST.session_hash, make_table(rows))
        return tab, engine

    yield make
    await cancel_all(workers)


def show(tab: BatchTab, update: Any) -> Any:
    """The update of a handler, by the names of the components; gr.skip() where one stays as it is."""
    found = {} if update == gr.skip() else update
    parts = {
        "progress": tab.progress, "records": tab.records, "trial": tab.trial, "run": tab.run_button,
        "stop": tab.stop_button, "again": tab.again, "column": tab.column,
        "schema": tab.schema,
        "reader": tab.reader.dropdown, "place": tab.review.place,
        "previous": tab.review.previous, "next": tab.review.next,
        "review": tab.review.panel, "fields": tab.review.desk.fields, "shown": tab.review.desk.shown,
        "badge": tab.review.desk.badge,
        **dict(zip(("jsonl", "csv", "xlsx", "parquet"), tab.downloads, strict=True)),
    }
    return SimpleNamespace(**{name: found.get(part, gr.skip()) for name, part in parts.items()})


async def collect(tab: BatchTab, updates: AsyncGenerator[Any, None]) -> list[Any]:
    """What the page has after each update."""
    page: dict[Any, Any] = {}
    shown = []
    async for update in updates:
        page |= {} if update == gr.skip() else update
        shown.append(show(tab, page))
    return shown


def read(button: Any) -> bytes:
    """The file behind a download button."""
    return Path(button["value"]).read_bytes()


async def test_a_run_shows_progress_and_ends_with_files(make_tab: MakeTab) -> None:
    tab, _ = make_tab()
    updates = await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    assert updates[0].stop["visible"] is True
    last = updates[-1]
    assert last.again["visible"] is True
    assert "<b>4</b> of 4 rows" in last.progress and "2 failed" in last.progress and "b is broken" in last.records
    assert last.stop["visible"] is False and read(last.jsonl).count(b"\n") == 4
    assert read(last.csv).count(b"\r\n") == 5


@pytest.mark.parametrize(
    ("cells", "line"), [({"id": "7", "text": "Ada, 36"}, b",7,\"Ada, 36\","), ({"note": "Ada"}, b",Ada,")]
)
async def test_the_files_of_a_table_have_the_column_with_the_text(
    make_tab: MakeTab, cells: dict[str, str], line: bytes
) -> None:
    tab, _ = make_tab((Row("a", cells),))
    last = (await collect(tab, tab.run_all(REQUEST, list(cells)[-1], "person", "", None, False, "fake")))[-1]
    assert line in read(last.csv)


async def test_the_trial_takes_the_first_rows_only_with_the_schema_of_the_extract_tab(make_tab: MakeTab) -> None:
    tab, engine = make_tab(tuple(Row(str(index), {"text": "Ada"}) for index in range(9)))
    mine = SCHEMA.replace("{", '{"title": "Mine", ', 1)
    await collect(tab, tab.run_some(REQUEST, "text", AS_IN_EXTRACT, mine, None, False, "fake"))
    assert len(engine.requests) == 5 and "Mine" in engine.requests[0].prompt


async def test_opened_files_pick_their_column_and_open_the_buttons(make_tab: MakeTab, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,body\n1,<Ada>\n")
    tab, _ = make_tab()
    opened = show(tab, await tab.open_files([str(path)], AS_IN_EXTRACT, REQUEST))
    assert opened.column["value"] == "body" and opened.run["interactive"] is True and opened.progress == ""
    assert len(tab.tables.get("abc").rows) == 1
    # The page had not drawn the column yet.
    assert await tab.show_choice(None, AS_IN_EXTRACT, "", REQUEST) == gr.skip()
    assert "&lt;Ada&gt;" in opened.records and opened.records.index(">body<") < opened.records.index(">id<")


async def test_a_page_loaded_later_opens_the_files_with_what_was_chosen(make_tab: MakeTab, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,body\n1,Ada\n")
    tab, _ = make_tab()
    await tab.open_files([str(path)], AS_IN_EXTRACT, REQUEST)
    kept = re.search('data-run="([^"]+)"', await tab.show_choice("id", "person", "", REQUEST))
    run = (await collect(tab, tab.run_all(REQUEST, "body", "person", "", None, False, "fake")))[-1]
    chosen = await tab.show_choice("id", "person", "", REQUEST)  # for the next run
    assert chosen.index("class=chosen>id") < chosen.index(" inert>")
    assert run.records in await tab.show_choice("body", "person", "", REQUEST)
    assert " inert>" in await tab.show_choice("body", AS_IN_EXTRACT, "{}", REQUEST)
    await tab.show_choice("id", "person", "", REQUEST)
    for number, batch_id in enumerate((kept[1], re.search('data-run="([^"]+)"', run.records)[1])):
        later = make_request(f"later {number}")
        opened = await anext(tab.attach(batch_id, later))
        assert (opened[tab.column]["value"], opened[tab.schema]) == ("id", "person")
        assert opened[tab.run_button]["interactive"] is True and len(tab.tables.get(later.session_hash).rows) == 1
    path.unlink()
    gone = await anext(tab.attach(kept[1], make_request("last")))
    assert gone[tab.column]["value"] == "id" and "open them again" in gone[tab.progress]


async def test_files_opened_while_earlier_ones_are_read_again_stay(
    make_tab: MakeTab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first := tmp_path / "a.csv").write_text("id,body\n1,Ada\n")
    (second := tmp_path / "b.txt").write_text("Bob")
    tab, _ = make_tab()
    opened = show(tab, await tab.open_files([str(first)], AS_IN_EXTRACT, REQUEST))
    batch_id = re.search('data-run="([^"]+)"', opened.records)
    assert batch_id is not None
    release, reads = threading.Event(), threading.Event()

    def read_slowly(path: Path, limits: TableLimits) -> Any:
        if path == first:
            reads.set()
            release.wait()
        return read_file(path, limits)

    monkeypatch.setattr(tables, "read_file", read_slowly)
    attaching = asyncio.create_task(collect(tab, tab.attach(batch_id[1], LATER)))
    await wait_until(reads.is_set)
    opening = asyncio.create_task(tab.open_files([str(second)], AS_IN_EXTRACT, LATER))
    await asyncio.sleep(0)
    release.set()
    assert await attaching == [] and (await opening)[tab.column]["value"] == "text"
    assert [row.name for row in tab.tables.get(LATER.session_hash).rows] == ["b.txt"]


async def test_a_folder_opens_the_files_that_could_be_opened_one_by_one(make_tab: MakeTab, tmp_path: Path) -> None:
    """macOS puts .DS_Store into every folder; Gradio's own check would refuse the folder for it."""
    paths = [tmp_path / name for name in ("a.txt", "B.TXT", "photo.png", ".DS_Store")]
    for path in paths:
        path.write_text("Ada")
    tab, _ = make_tab()
    opened = show(tab, await tab.open_folder(list(map(str, paths)), AS_IN_EXTRACT, REQUEST))
    assert [row.name for row in tab.tables.get("abc").rows] == ["B.TXT", "a.txt"]
    assert opened.run["interactive"] is True and "left out: 2" in opened.progress


async def test_slow_files_leave_the_threads_of_the_engine_free(
    make_tab: MakeTab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are written in asyncio's own threads; before, as many slow PDFs as there are threads took them all."""
    release = threading.Event()
    monkeypatch.setattr(tables, "read_file", lambda *_: release.wait() and NO_TABLE)
    tab, _ = make_tab()
    visitors: Any = [make_request(str(number)) for number in range(40)]
    opening = [asyncio.create_task(tab.open_files([str(tmp_path)], AS_IN_EXTRACT, each)) for each in visitors]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    finally:
        release.set()
        await asyncio.gather(*opening)


async def test_a_visitor_has_one_table_and_it_is_freed_when_he_leaves(make_tab: MakeTab, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Ada")
    tab, engine = make_tab()
    await tab.open_files([str(path)], AS_IN_EXTRACT, REQUEST)
    assert [row.name for row in tab.tables.get("abc").rows] == ["a.txt"]
    tab.leave("abc")
    (update,) = await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    assert "not open any more" in update.progress and engine.requests == []


async def test_tables_are_limited_together_and_the_oldest_makes_room(tmp_path: Path) -> None:
    table, lines, text = (tmp_path / name for name in ("a.csv", "b.jsonl", "c.txt"))
    table.write_text("id,text\n1,a\n2,b")
    lines.write_text('{"x": 1}\n{"x": 2}')
    text.write_text("four")
    for path in (table, lines):
        (row,) = read_file(path, TableLimits(max_rows=1)).rows
        assert row.error == f"{path.name}: more than 1 rows in all; open fewer or split them"
    (row,) = read_file(table, TableLimits(max_cells=5)).rows
    assert row.error == "a.csv: more than 5 cells in all; open fewer or split them"
    with pytest.raises(UnreadableSource, match="these files: more than 9 characters in all"):
        await open_table([table, text], TableLimits(max_chars=9))
    opened = OpenTables(TableLimits(max_rows=4, max_cells=4, max_chars=4 * len("Ada, 36")))
    for session in range(9):
        opened.put(str(session), make_table((ROWS[0],) * 4))
    assert [bool(opened.get(str(session)).rows) for session in range(9)] == [False] + [True] * 8


async def test_an_order_chosen_during_a_run_stays(make_tab: MakeTab) -> None:
    tab, _ = make_tab()
    updates = tab.run_all(REQUEST, "text", "person", "", None, False, "fake")
    await anext(updates)
    await tab.sort(True, REQUEST)
    shown = (await collect(tab, updates))[-1].records
    assert shown == await tab.sort(True, REQUEST)
    assert shown != await tab.sort(False, REQUEST)


async def test_the_end_of_one_run_leaves_the_flags_of_the_others() -> None:
    stops = Stops()
    with stops.running("abc") as first:
        with stops.running("abc"), stops.running("def") as other:
            pass
        stops.ask("abc", "leave")
        stops.ask("abc", "keep")
        with stops.running("abc") as later:
            pass
    assert (first.asked, later.asked, other.asked) == ("leave", None, None)
    assert await stops.end("abc") is False


async def test_the_end_of_a_session_waits_for_all_that_it_runs() -> None:
    stops = Stops()
    with stops.running("abc"):
        with stops.running("abc") as inner:
            ending = asyncio.create_task(stops.end("abc"))
            await wait_until(lambda: inner.asked == "leave")
        await asyncio.sleep(0)
        assert not ending.done()
    assert await ending is True


@pytest.mark.parametrize(("seconds", "words"), [(4.25, "4.2 s"), (80, "80 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_have_a_fitting_unit(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_a_download_that_failed_once_opens_again() -> None:
    good = {"source": "a", "valid": True, "finish_reason": "stop", "record": {"x": "y"}}
    bad = {**good, "record": {"x": "\ud83d"}}
    (closed, why), (again, nothing) = downloads.write_files([bad]), downloads.write_files([good])
    assert closed[1]["interactive"] is False and "No CSV file: " in why and "an unpaired surrogate" in why
    assert "label" not in closed[1]  # a long one would lie over the other buttons
    assert (again[1]["visible"], again[1]["interactive"], nothing) == (True, True, "")


async def test_a_table_of_the_extract_tab_is_opened_and_the_heading_names_what_is_open(
    make_tab: MakeTab, tmp_path: Path
) -> None:
    (path := tmp_path / "orders.csv").write_text("id,note\n1,Ada is 36\n")
    tab, _ = make_tab()
    given: Any = SimpleNamespace(path=path)
    assert tab.models.pool is not None
    tab.models.pool.keep("chat", CatalogueEntry("large", "/models/large", "folder"))
    update = await tab.open_table(given, "large", REQUEST)
    assert update[tab.files] == [str(path)] and update[tab.column]["value"] == "note"
    assert update[tab.schema] == AS_IN_EXTRACT and "Ada is 36" in update[tab.records]
    assert update[tab.reader.dropdown]["value"] == "large"
    last = (await collect(tab, tab.run_all(REQUEST, "note", "person", "", None, False, "fake")))[-1]
    assert Path(last.csv["value"]).name == "orders-records.csv" and b",false,1," in read(last.csv)
    label = (await tab.describe("note", "person", "", "fake", REQUEST))[tab.inputs]["label"]
    assert label == "orders.csv · note · person · fake"
    label = (await tab.describe(None, AS_IN_EXTRACT, '{"title": "Order"}', "fake", REQUEST))[tab.inputs]["label"]
    assert label == "orders.csv · no column · Order · fake"
    assert (await tab.describe(None, "person", "", "fake", LATER))[tab.inputs]["label"] == "Files, column and schema"


def correct(tab: BatchTab, page: Any, **data: Any) -> Any:
    """What the page shows after a person did this to the row that it shows."""
    event: Any = SimpleNamespace(_data={"of": page.shown.reading, **data})
    return tab.review.act(event, REQUEST)


async def test_the_chosen_model_reads_the_rows_and_their_approvals_are_its_own(make_tab: MakeTab) -> None:
    tab, engine = make_tab(record='{"name": "Ada"}')
    pool = tab.models.pool
    assert pool is not None
    pool.keep("chat", CatalogueEntry("large", "/models/large", "folder"))
    run = (await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "large")))[-1]
    assert "read by large" in run.progress and engine.requests == []
    page = show(tab, await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 0})))  # type: ignore[arg-type]
    await correct(tab, page, action="approve")
    found = [await tab.store.run(read_trust, "me", page.shown.schema, name) for name in ("fake", "large")]
    assert found[0] is None and found[1] is not None and "Read by large" in page.badge
    pool.kept.clear()
    pool.roles.clear()
    *_, gone, refused = await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "large"))
    assert gone.reader["value"] == "fake" and "&#x27;large&#x27; is not here any more" in refused.progress


async def test_rows_are_corrected_in_place_and_the_files_have_the_corrections(make_tab: MakeTab) -> None:
    tab, _ = make_tab(record='{"name": "Ada", "age": 36}')
    await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    page = show(tab, await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 0})))  # type: ignore[arg-type]
    assert page.review["visible"] is True and "1 of 2 · row 1<" in page.place and "Ada" in page.fields
    with pytest.raises(gr.Error, match="not here any more"):
        await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 1}))  # type: ignore[arg-type]
    edited = show(tab, await correct(tab, page, action="edit", edits={"/name": "Ada L."}))
    assert "Ada L." in edited.records and b"Ada L." in read(edited.csv) and edited.place == gr.skip()
    refused = show(tab, await correct(tab, page, action="add", pointer="/x"))
    assert "not done" in refused.badge and refused.records == gr.skip()
    following = show(tab, await correct(tab, page, action="approve"))
    assert "1 approved" in following.progress and ">approved<" in following.records
    assert "2 of 2 · row 4<" in following.place and following.shown.reading.endswith("/3")  # the next one with a record
    assert following.previous["interactive"] and not following.next["interactive"]
    assert b'"model": "fake"' in read(following.jsonl) and b",fake," in read(following.csv)
    assert b'"approved": true' in read(following.jsonl) and b'"corrected": ["/name"]' in read(following.jsonl)
    back = show(tab, await tab.review.go_back(REQUEST))
    assert back.shown.reading.endswith("/0") and "typed by you" in back.fields and "Approved" in back.fields
    assert await tab.review.go_back(REQUEST) == gr.skip()


async def test_a_corrected_row_keeps_its_place_and_approval_leads_to_the_next_open_one(make_tab: MakeTab) -> None:
    tab, _ = make_tab(tuple(Row(name, {"text": "Ada"}) for name in "abc"), record='{"name": "Ada", "age": 36}')
    await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, True, "fake"))
    run = tab.shown[REQUEST.session_hash]
    page = show(tab, await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 0})))  # type: ignore[arg-type]
    await correct(tab, page, action="edit", edits={"/name": "Bob", "/age": "7"})
    assert run.list_rows() == [0, 1, 2] and run.records[0]["confidence"] != run.records[1]["confidence"]
    for opened, following in ((0, 1), (2, 1), (1, None)):
        event: Any = SimpleNamespace(_data={"row": opened})
        page = show(tab, await correct(tab, show(tab, await tab.review.open_row(REQUEST, event)), action="approve"))
        assert run.find_open(opened) == following
        assert page.place == gr.skip() if following is None else f"row {following + 1}<" in page.place


async def test_a_correction_reaches_its_row_though_another_one_or_another_run_is_open(make_tab: MakeTab) -> None:
    tab, _ = make_tab(record='{"name": "Ada", "age": 36}')
    await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    page = show(tab, await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 0})))  # type: ignore[arg-type]
    following = show(tab, await tab.review.go_on(REQUEST))
    edited = show(tab, await correct(tab, page, action="edit", edits={"/name": "Ada L."}))
    assert "Ada L." in edited.records and edited.fields == edited.shown == gr.skip()
    await correct(tab, following, action="edit", edits={"/age": "37"})
    records = tab.shown[REQUEST.session_hash].records
    assert [records[index]["record"] for index in (0, 3)] == [{"name": "Ada L.", "age": 36}, {"name": "Ada", "age": 37}]
    updates = await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    assert updates[0].review["visible"] is False
    assert await correct(tab, page, action="edit", edits={"/name": "Bob"}) == gr.skip()


async def test_a_row_open_in_two_pages_loses_no_correction(make_tab: MakeTab) -> None:
    tab, _ = make_tab(record='{"name": "Ada", "age": 36, "sum": 1}')
    await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    event: Any = SimpleNamespace(_data={"row": 0})
    page = show(tab, await tab.review.open_row(REQUEST, event))
    tab.shown["later"] = copy.copy(tab.shown["abc"])
    tab.shown["later"].records = dict(tab.shown["abc"].records)
    await correct(tab, page, pointer="/name", edits={"/name": "Eve"})
    for edits in ({"/age": "37"}, {"/sum": "2"}):
        data: Any = SimpleNamespace(_data={"of": page.shown.reading, "pointer": next(iter(edits)), "edits": edits})
        last = show(tab, await tab.review.act(data, LATER))
    assert last.shown.result.record == {"name": "Eve", "age": 37, "sum": 2}
    refused = show(tab, await correct(tab, page, pointer="/age", edits={"/age": "38"}))
    assert ">changed in another tab<" in refused.badge and b"Eve,37,2" in read(last.csv)
    again = show(tab, await correct(tab, refused, pointer="/age", edits={"/age": "38"}))
    assert again.shown.result.record == {"name": "Eve", "age": 38, "sum": 2}


async def test_one_field_is_checked_in_all_rows_where_it_asks(make_tab: MakeTab) -> None:
    rows = tuple(Row(name, {"text": f"{name} <b>ordered</b> lamps"}) for name in ("Ada", "Bob", "Ada & Eve"))
    record = '{"name": "Ada", "lines": [{"count": 9}]}'
    tab, _ = make_tab((*rows, Row("bad", error="broken")), record=record)
    await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, True, "fake"))
    run, order = tab.shown[REQUEST.session_hash], [3, 0, 1, 2]
    assert run.list_rows() == order  # the failed row, and then those with most to check
    page = show(tab, await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 0})))  # type: ignore[arg-type]
    assert "<b>1 of 3 · row 1</b>" in page.place  # the failed row, before it, cannot be opened
    update = show(tab, await correct(tab, page, action="check", pointer="/name"))
    assert run.list_rows() == order  # a row stays where it is while a person checks it
    asks = re.findall(r'data-field="(.*?)".*?<b>(.*?)</b> (asks in .*?)<', update.records)
    assert asks == [("/lines/*/count", "count", "asks in 3 of 4 rows"), ("/name", "name", "asks in 2 rows")]
    event: Any = SimpleNamespace(_data={"field": "/name", "rows": [1, 2]})
    shown = (await tab.review.pick(REQUEST, event))[tab.records]
    assert run.list_rows() == [1, 2] and run.find_next(1) == 2 and 'data-row="0"' not in shown
    assert "<td><mark>Ada</mark> &amp; Eve &lt;b&gt;ordered" in shown and "not in the text" in shown
    assert "Approve name in all 2 rows shown" in shown
    update = show(tab, await tab.review.confirm(REQUEST, event))
    assert [run.records[index]["checked"] for index in range(3)] == [["/name"]] * 3 and run.list_rows() == order
    assert [list(run.records[index]["flags"]) for index in range(3)] == [["/lines/0/count"]] * 3
    assert "name</b> asks" not in update.records and b'"/name": [' not in read(update.jsonl)
    assert not run.records[1].get("approved")  # the other values of the row still wait
    assert "<b>name</b> is approved in 2 rows." in update.records
    update = show(tab, await tab.review.undo(REQUEST))
    assert [run.records[index]["checked"] for index in range(3)] == [["/name"], [], []]
    assert "name</b> asks in 2 rows" in update.records and read(update.jsonl).count(b'"/name": [') == 2
    assert "is approved in" not in update.records and await tab.review.undo(REQUEST) == gr.skip()
    await tab.review.pick(REQUEST, event)
    await tab.review.confirm(REQUEST, event)
    await correct(tab, page, action="check", pointer="/lines/0/count")
    assert await tab.review.undo(REQUEST) == gr.skip()  # another action came after it


def test_the_place_of_a_value_is_cut_out_of_its_text() -> None:
    text = "x" * 100 + "<3 lamps>" + "y" * 100
    cut = cut_text(text, {"match": "exact", "start": 101, "end": 102})
    assert cut == "…" + "x" * 59 + "&lt;<mark>3</mark> lamps&gt;" + "y" * 53 + "…"
    assert cut_text("a", None) == cut_text("a", {"match": "none", "start": 0, "end": 0}) == "–"


async def test_what_cannot_be_run_is_explained(make_tab: MakeTab) -> None:
    tab, engine = make_tab()
    for schema, words in (("{", "cannot be used"), ("{}", "no field yet")):
        (refused,) = await collect(tab, tab.run_all(REQUEST, "text", AS_IN_EXTRACT, schema, None, False, "fake"))
        assert words in refused.progress and engine.requests == []


async def test_a_fault_within_the_engine_fails_its_row_and_one_of_the_files_opens_the_buttons(
    make_tab: MakeTab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tab, _ = make_tab(reject=ZeroDivisionError("boom"))
    monkeypatch.setattr(downloads, "export", lambda *_: 1 // 0)
    updates = []
    with pytest.raises(ZeroDivisionError):
        async for update in tab.run_all(REQUEST, "text", "person", "", None, False, "fake"):
            updates.append(show(tab, update))
    assert "ZeroDivisionError: boom" in caplog.text and "internal error" in tab.shown["abc"].records[0]["error"]
    last = updates[-1]
    assert "inside the app" in last.progress and last.stop["visible"] is False
    assert last.trial["interactive"] is True and last.run["interactive"] is True


async def test_a_lost_engine_is_waited_for(make_tab: MakeTab) -> None:
    tab, engine = make_tab(reject=EngineDead("boom"))
    updates = tab.run_all(REQUEST, "text", "person", "", None, False, "fake")
    await anext(updates)
    await wait_until(lambda: len(engine.requests) > 0)
    assert tab.shown["abc"].is_running and not any("Ada" in str(each) for each in tab.shown["abc"].records.values())
    await tab.stop(REQUEST)
    assert "stopped" in (await collect(tab, updates))[-1].progress


async def start_run(tab: BatchTab, engine: FakeEngine) -> tuple[asyncio.Task[None], list[Any]]:
    """A run that has ended one row and waits for three, and its updates; in a task, as Gradio drives it."""
    updates: list[Any] = []
    rows = (*(Row(f"held{index}", {"text": "Ada"}) for index in range(3)), ROWS[1])
    tab.tables.put(REQUEST.session_hash, make_table(rows))

    async def drive() -> None:
        async for update in tab.run_all(REQUEST, "text", "person", "", None, False, "fake"):
            updates.append(show(tab, update))

    num_requests = len(engine.requests) + 3
    task = asyncio.create_task(drive())
    await wait_until(lambda: len(engine.requests) == num_requests and "b is broken" in str(tab.shown["abc"].records))
    return task, updates


async def test_opening_other_files_stops_the_run_first_and_it_draws_nothing_more(make_tab: MakeTab) -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    first, updates = await start_run(tab, engine)
    opened = show(tab, await tab.open_files(None, AS_IN_EXTRACT, REQUEST))
    num_updates = len(updates)
    assert all(request.is_aborted for request in engine.requests) and "was stopped" in opened.progress
    assert opened.run["interactive"] is False  # because the files have been deleted
    hidden = (opened.again, opened.stop, opened.jsonl)  # the page shows that run no more
    assert [part["visible"] for part in hidden] == [False] * 3
    await first
    assert len(updates) == num_updates


async def test_a_run_goes_on_without_its_page_and_a_page_loaded_later_shows_it(make_tab: MakeTab) -> None:
    hold = asyncio.Event()
    tab, engine = make_tab(hold=hold)
    first, _ = await start_run(tab, engine)
    run_id = tab.shown["abc"].job.id
    tab.leave(REQUEST.session_hash)  # as Gradio does when the connection has ended
    await first
    assert not any(request.is_aborted for request in engine.requests)
    shown = tab.attach(run_id, LATER)
    begun = show(tab, await anext(shown))
    assert "<b>1</b> of 4 rows" in begun.progress and begun.stop["visible"] is True and run_id in begun.records
    hold.set()
    last = (await collect(tab, shown))[-1]
    assert "done in" in last.progress and "b is broken" in last.records and read(last.jsonl).count(b"\n") == 4
    assert last.stop["visible"] is False and last.run["interactive"] is False and last.again["visible"] is True
    # A run that has ended is found, too; one that never was, or is somebody else's, is not.
    tab.leave(LATER.session_hash)
    assert "done in" in (await collect(tab, tab.attach(run_id, REQUEST)))[-1].progress
    for known, request in (("other", LATER), (run_id, make_request("x", owner="you"))):
        assert [update async for update in tab.attach(known, request)] == [gr.skip()]


async def test_a_stopped_run_goes_on_with_the_rows_that_are_left(make_tab: MakeTab) -> None:
    hold = asyncio.Event()
    tab, engine = make_tab(hold=hold)
    first, updates = await start_run(tab, engine)
    await tab.stop(REQUEST)
    await first
    assert updates[-1].again == gr.update(visible=True, value="Go on with the other 3 rows")
    before = tab.shown["abc"].job.id
    hold.set()
    last = (await collect(tab, tab.run_again(REQUEST, False)))[-1]
    assert "<b>4</b> of 4 rows" in last.progress and tab.shown["abc"].job.id == before
    assert last.again["value"] == "Run failed rows again"


async def test_a_run_that_is_shown_no_more_is_found_under_recent_with_its_corrections(
    make_tab: MakeTab, tmp_path: Path
) -> None:
    (path := tmp_path / "contacts.csv").write_text("id,note\n1,Ada is 36\n2,Bob\n")
    tab, _ = make_tab(record='{"name": "Eve"}')
    await tab.open_files([str(path)], AS_IN_EXTRACT, REQUEST)
    mine = SCHEMA.replace("{", '{"title": "Mine", ', 1)
    await collect(tab, tab.run_all(REQUEST, "note", AS_IN_EXTRACT, mine, None, False, "fake"))
    page = show(tab, await tab.review.open_row(REQUEST, SimpleNamespace(_data={"row": 1})))  # type: ignore[arg-type]
    edited = show(tab, await correct(tab, page, action="edit", edits={"/name": "Bob"}))
    await correct(tab, SimpleNamespace(shown=edited.shown, index=1), action="approve")
    cleared = show(tab, await tab.open_files(None, "person", REQUEST))
    assert cleared.csv["visible"] is False and REQUEST.session_hash not in tab.shown
    (found,) = (await tab.list_recent(REQUEST))["recent"]
    assert (found["name"], found["reader"]) == ("contacts.csv", "fake")
    assert found["state"] == "2 rows, 1 to check, 1 approved"
    assert (await tab.list_recent(make_request("abc", owner="you")))["recent"] == []
    event: Any = SimpleNamespace(_data={"id": found["id"]})
    last = (await collect(tab, tab.reopen(REQUEST, event)))[-1]
    assert ">Bob<" in last.records and "1 approved" in last.progress and b",Bob," in read(last.csv)
    assert last.column["value"] == "note" and last.run["interactive"] is True
    # It stands beside its own schema, whatever the Extract tab has now.
    name = last.schema["value"]
    assert ("Mine, as read before", name) in last.schema["choices"]
    assert " inert>" not in await tab.show_choice("note", name, SCHEMA, REQUEST)
    assert " inert>" in await tab.show_choice("note", AS_IN_EXTRACT, SCHEMA, REQUEST)
    choices = (await tab.describe("note", "person", SCHEMA, "fake", REQUEST))[tab.schema]["choices"]
    assert choices[-1] == ("Mine, as read before", name)  # to undo that
    assert choices[:2] == [("as in Extract (no title)", AS_IN_EXTRACT), ("person", "person")]
    event._data["id"] = "other"
    with pytest.raises(gr.Error, match="not kept any more"):
        await anext(tab.reopen(REQUEST, event))


async def test_a_run_that_goes_on_is_not_stopped_by_a_look_at_another_one(make_tab: MakeTab) -> None:
    hold = asyncio.Event()
    tab, engine = make_tab(hold=hold)
    (first, _), other = await start_run(tab, engine), tab.shown["abc"].job
    await tab.stop(REQUEST)
    await first
    second, _ = await start_run(tab, engine)
    await collect(tab, tab.reopen(REQUEST, SimpleNamespace(_data={"id": other.id})))  # type: ignore[arg-type]
    await second
    assert tab.shown["abc"].job.id == other.id and not any(request.is_aborted for request in engine.requests[3:])
    assert (await tab.list_recent(REQUEST))["recent"][0]["state"] == "4 rows, running"
    # The files of sample texts are not among the files of the page, which the page reports as none.
    assert await tab.open_files([], "person", REQUEST) == gr.skip() and "abc" in tab.shown


async def test_a_second_run_of_a_page_ends_the_first(make_tab: MakeTab) -> None:
    tab, engine = make_tab(hold=asyncio.Event())
    first, _ = await start_run(tab, engine)
    second, updates = await start_run(tab, engine)
    await first
    assert [request.is_aborted for request in engine.requests] == [True] * 3 + [False] * 3
    assert await tab.show_choice("text", "person", "", REQUEST) == gr.skip()  # the records stay in sight
    await tab.stop(REQUEST)
    await second
    assert "stopped" in updates[-2].progress and all(request.is_aborted for request in engine.requests)


def make_run(**fields: Any) -> BatchRun:
    body = {"status": "running", "started": 10.0, "request": {"schema": {}}, "model": "fake"}
    job = Item(1, "job_1", "job", body, 0, 0, 0)
    return BatchRun("me", job, clock=lambda: 12.0, **fields)


async def test_what_there_is_not_to_show_is_said(make_tab: MakeTab) -> None:
    assert "b is broken" in render_preview(make_table(ROWS), "text", "")
    tab, _ = make_tab()
    opened = show(tab, await tab.open_files(None, AS_IN_EXTRACT, REQUEST))
    assert "Many texts, one schema" in opened.records and 'class="flagged"' in opened.records
    assert opened.run["interactive"] is False
    assert "Many texts" in render_records(make_run())
    record = {"source": "a", "record": {"2023": 1}, "valid": True, "confidence": {"/2023": 0.5}, "flags": {}}
    assert 'title="2023"' in render_records(make_run(records={0: record}))


def test_lists_in_a_row_are_counted_in_words() -> None:
    item = {"what": "desk lamps", "count": 3}
    record = {"source": "a", "valid": True, "confidence": {}, "flags": {}}
    for items, words in (([item], "<b>1 item:</b> <bdi>desk lamps, 3</bdi>"), ([item] * 2, "<b>2 items:</b>")):
        assert words in render_records(make_run(records={0: record | {"record": {"items": items}}}))


@pytest.mark.parametrize(
    ("opened", "name"),
    [({"paths": ["/May orders.csv"]}, "May-orders"), ({"paths": ["a", "b"], "schema": "a ticket"}, "a-ticket")],
)
def test_downloads_are_named_after_the_file_or_the_schema(opened: dict[str, Any], name: str) -> None:
    run = make_run()
    run.job.body["opened"] = opened
    assert run.document == name


def test_progress_shows_the_remaining_time_and_the_cache_hits() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}
    record = {"valid": True, "record": {}, "flags": {}, "usage": usage}
    line = render_progress(make_run(records={0: record}, counts={"done": 1, "waiting": 3}))
    assert "about 6.0 s left" in line and "60% of the prompts" in line and "width:25.0%" in line


def test_a_row_that_repeated_itself_is_to_check_and_not_valid_until_then() -> None:
    record = {"source": "a", "record": {"a": [1]}, "valid": True, "confidence": {}, "flags": {"/a/0": [ENDED]}}
    run = make_run(records={0: record}, counts={"done": 1})
    line, table = render_progress(run), render_records(run)
    assert "0 valid" in line and "1 to check" in line and "1 stopped: it repeated itself" in line
    assert ">stopped: it repeated itself<" in table and ">valid<" not in table and "not valid" not in line
    assert ">valid<" in render_records(make_run(records={0: record | {"flags": {}}}))


async def test_failed_rows_are_run_again(make_tab: MakeTab) -> None:
    tab, engine = make_tab(record='{"name": "Ada", "age": 36}')
    updates = await collect(tab, tab.run_all(REQUEST, "text", "person", "", None, False, "fake"))
    assert '"row": {"id": "7", "text": " "}' in read(updates[-1].jsonl).decode()  # its cells
    shown = await tab.sort(True, REQUEST)
    assert shown.index("b is broken") < shown.index("Ada")
    num_before = len(engine.requests)
    last = (await collect(tab, tab.run_again(REQUEST, False)))[-1]
    assert "<b>4</b> of 4" in last.progress and len(engine.requests) == num_before  # the others have no text
    tab.leave(REQUEST.session_hash)
    assert await tab.sort(True, REQUEST) == gr.skip()
