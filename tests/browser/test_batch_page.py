"""A batch in a real browser: a CSV in, a column picked, records out, and the files of what was done."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import run_server
from tests.browser.site import ENDLESS_SCHEMA, Site


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders.csv"
    lines = [
        f'{n},"Invoice INV-{n}\nNorthwind Paper Ltd\nDate: 2026-03-0{n}\nTotal: {n}9.50 EUR"' for n in range(1, 8)
    ]
    path.write_text("\n".join(["id,note", *lines, "8,"]))
    return path


def open_files(site: Site, path: Path) -> None:
    site.go_to("Batch")
    site.page.locator("#batch-files input[type=file]").set_input_files(path)
    site.page.get_by_role("columnheader", name="note").wait_for()


def choose(site: Site, label: str, option: str) -> None:
    site.page.get_by_label(label).click()
    site.page.get_by_role("option", name=option, exact=True).click()


def test_a_csv_becomes_records_and_files(site: Site, orders: Path) -> None:
    # Opened in Extract, where it is one text, and from there in Batch.
    site.go_to("Extract")
    with site.page.expect_file_chooser() as chooser:
        site.page.get_by_role("button", name="Open file").click()
    chooser.value.set_files(orders)
    site.page.get_by_role("button", name="In Batch each of its rows becomes a record").click()
    site.page.get_by_role("columnheader", name="note").wait_for()
    assert site.page.get_by_label("Column with the text").input_value() == "note"
    site.page.get_by_text("8 rows; the first 5 are shown.").wait_for()
    site.page.get_by_role("button", name="Try the first 5").click()
    site.page.get_by_text("done in").wait_for()
    site.wait_for(lambda: "5 of 5 rows" in site.page.locator("#batch-progress").inner_text())
    site.page.get_by_role("button", name="Run all").click()
    site.page.locator(".batch-figures", has_text="8 of 8 rows").wait_for()
    site.page.get_by_text("the column 'note' is empty in this row").wait_for()
    site.page.get_by_text("of the prompts from the prefix cache").wait_for()
    # One field, in all the rows where it asks: its values beside their places in the texts.
    asking = site.page.locator(".ask-line [data-field]").first
    asking.click()
    confirm, back = (site.page.get_by_role("button", name=name) for name in ("rows shown", "Show all rows"))
    confirm.wait_for()
    site.page.get_by_role("columnheader", name="in the text").wait_for()
    site.wait_for(lambda: back.evaluate("node => node === document.activeElement"))
    back.press("Enter")
    confirm.wait_for(state="hidden")
    named = asking.inner_text()
    asking.click()
    confirm.click()
    site.wait_for(lambda: asking.count() == 0 or asking.inner_text() != named)
    site.page.get_by_role("button", name="Undo", exact=True).click()
    site.wait_for(lambda: asking.inner_text() == named)
    asking.click()
    confirm.click()
    site.wait_for(lambda: asking.count() == 0 or asking.inner_text() != named)
    site.page.get_by_role("columnheader", name="vendor").wait_for()
    site.page.get_by_label("Most to check first").uncheck()
    site.page.locator("#batch-records tbody tr:first-child[data-row='0']").wait_for()
    # Rows are corrected in place; an approved one makes way for the next.
    site.page.locator("[data-row='0'] td").last.click()
    site.page.get_by_text("1 of 7 · row 1").wait_for()
    site.page.locator("tr[data-row='1']").press("Enter")
    site.page.get_by_text("2 of 7 · row 2").wait_for()
    site.page.get_by_role("button", name="Previous row").click()
    site.page.get_by_text("1 of 7 · row 1").wait_for()
    vendor = site.page.get_by_role("textbox", name="vendor")
    vendor.fill("Northwind & Sons")
    vendor.press("Tab")
    site.page.locator("#batch-records").get_by_text("Northwind & Sons").wait_for()
    site.approve()
    site.page.get_by_text("2 of 7 · row 2").wait_for()
    assert vendor.input_value() == "Northwind Paper Ltd"  # what was typed stays in its row
    site.page.locator("#batch-progress").get_by_text("1 approved").wait_for()
    site.page.get_by_role("button", name="Previous row").click()
    site.wait_for(lambda: vendor.input_value() == "Northwind & Sons")
    with site.page.expect_download() as waiting:
        site.page.get_by_role("button", name="Download JSONL").click()
    assert waiting.value.suggested_filename == "orders-records.jsonl"
    records = [json.loads(line) for line in Path(waiting.value.path()).read_text().splitlines()]
    assert len(records) == 8 and sum(record["valid"] for record in records) == 7 and "error" in records[7]
    assert records[0]["record"]["vendor"] == "Northwind & Sons" and records[0]["approved"] is True
    # Another column for the next run is previewed above the records, and still chosen after a reload. The records are
    # set aside until the choice is that of the run again.
    note = site.page.get_by_text("has changed since these records were read")
    choose(site, "Schema of a record", "support ticket")
    note.wait_for()
    choose(site, "Schema of a record", "as in Extract (Invoice)")
    note.wait_for(state="hidden")
    site.go_to("Extract")
    site.page.get_by_role("radio", name="contact").check()
    site.go_to("Batch")
    note.wait_for()
    schema = site.page.get_by_label("Schema of a record")
    site.wait_for(lambda: schema.input_value() == "as in Extract (Contact)")
    site.go_to("Extract")
    site.page.get_by_role("radio", name="invoice").check()
    site.go_to("Batch")
    note.wait_for(state="hidden")
    site.wait_for(lambda: schema.input_value() == "as in Extract (Invoice)")
    choose(site, "Column with the text", "id")
    note.wait_for()
    site.page.locator("#batch-records th.chosen", has_text="id").first.wait_for()
    faded = site.page.locator("#batch-records [inert]")
    assert faded.evaluate("node => getComputedStyle(node).opacity") == "0.4"
    assert site.page.locator("#batch-review .record-side[inert] .block.fields").is_visible()
    choose(site, "Column with the text", "note")
    note.wait_for(state="hidden")
    site.page.get_by_role("button", name="Approve").wait_for()
    site.wait_for(lambda: site.page.locator("#batch [inert]").count() == 0)  # Svelte makes a closing menu inert, too
    choose(site, "Column with the text", "id")
    note.wait_for()
    assert site.page.locator("#batch-records").get_by_text("Northwind & Sons").count()
    site.reload()
    site.page.locator("#batch-records").get_by_text("Northwind & Sons").wait_for()
    site.wait_for(lambda: site.page.get_by_label("Column with the text").input_value() == "id")
    note.wait_for()
    site.page.get_by_role("button", name="Try the first 5").click()
    note.wait_for(state="hidden")
    # A run that the page no longer shows is under Recent, with its files.
    site.page.locator(".batch-figures", has_text="5 of 5 rows").wait_for()
    download = site.page.get_by_role("button", name="Download CSV")
    download.wait_for()
    site.page.locator("#batch-files").get_by_label("Clear").click()
    site.page.get_by_text("Many texts, one schema").wait_for()
    assert not download.is_visible()
    menu = site.page.get_by_label("Recent batches")
    kept = menu.locator("option", has_text="1 approved")
    kept.wait_for(state="attached")
    assert kept.inner_text().startswith("orders.csv · ") and "8 rows, " in kept.inner_text()
    menu.select_option(kept.get_attribute("value"))
    site.page.locator("#batch-records").get_by_text("Northwind & Sons").wait_for()
    site.page.locator("#batch-files").get_by_text("orders").wait_for()
    with site.page.expect_download() as waiting:
        download.click()
    assert "Northwind & Sons" in Path(waiting.value.path()).read_text()
    site.wait_for(lambda: site.page.get_by_label("Column with the text").input_value() == "note")
    assert not note.is_visible()


def start_endless_run(site: Site, path: Path) -> None:
    with path.open("a") as file:
        file.writelines(f"\n{number},Invoice INV-{number}" for number in range(9, 2000))
    site.go_to("Extract")
    site.unfold("describe your own")
    site.go_to("JSON Schema")
    site.type_code("#schema", ENDLESS_SCHEMA)
    site.page.get_by_text("schema keywords are enforced").wait_for()
    open_files(site, path)
    site.page.get_by_role("button", name="Run all").click()
    # The row without a text fails at once. The others are cut off as loops soon, and are many.
    site.page.get_by_text("1 failed").wait_for()


def test_a_run_outlives_its_page_and_stopping_keeps_its_records(site: Site, orders: Path) -> None:
    start_endless_run(site, orders)
    site.page.get_by_label("Column with the text").click()
    site.page.get_by_role("option", name="id").click()
    site.reload()
    site.go_to("Batch")
    site.page.get_by_text("1 failed").wait_for()
    site.wait_for(lambda: site.page.get_by_label("Column with the text").input_value() == "note")
    site.page.locator("#batch-files").get_by_text("orders").wait_for()
    site.complaints.clear()  # Gradio aborts the stream of the page that is left, and complains
    site.page.get_by_role("button", name="Stop").click()
    site.page.get_by_text("stopped; what is done is kept").wait_for()
    assert "is empty in this row" in site.page.locator("#batch-records").inner_text()
    site.wait_for(lambda: site.num_running() == 0)
    site.page.get_by_role("button", name="Download CSV").wait_for()


def test_an_idle_page_loads_again_after_a_restart_of_the_server(site: Site, orders: Path) -> None:
    open_files(site, orders)
    site.page.evaluate("document.body.id = 'old'")
    site.page.route("**/app_id", lambda route: route.fulfill(json={"app_id": 1}))  # another process
    site.page.context.set_offline(True)
    site.page.locator(".strip").get_by_text("not reachable").wait_for()
    site.page.context.set_offline(False)
    site.page.locator("#old").wait_for(state="detached")
    site.page.unroute("**/app_id")
    site.complaints.clear()
    site.page.locator("#batch-files").get_by_text("orders").wait_for()
    site.page.get_by_role("button", name="Try the first 5").click()
    site.page.locator(".batch-figures", has_text="5 of 5 rows").wait_for()


def test_answer_and_batch_survive_a_killed_server(desk: Any, tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    rows = [f'{n},"Invoice INV-{n}, Northwind Paper Ltd, total {n}.50 EUR"' for n in range(150)]
    path.write_text("\n".join(["id,note", *rows]))
    records = "#batch-records tbody tr"
    kept = ("app", "--core", "local", "--data-dir", str(tmp_path / "data"))
    with run_server(*kept) as (server, url):
        site = Site(desk.new_page(), url)
        site.open()
        site.make_answers_endless()
        site.ask("Count, please.")
        site.wait_for(lambda: site.page.locator("#growing .bot-row").count() > 0 and len(site.answer) > 20)
        open_files(site, path)
        site.page.get_by_role("button", name="Run all").click()
        site.wait_for(lambda: site.page.locator(f"{records}[data-row]").count() > 3)
        site.go_to("Chat")
        begun = site.answer
        site.go_to("Batch")
        server.kill()
        server.wait()
        shown = site.page.locator(records).all_inner_texts()
        assert len(shown) < len(rows)
    with run_server(*kept, port=int(url.rsplit(":")[-1].strip("/"))):
        site.reload()
        site.go_to("Chat")
        site.wait_for(lambda: site.answer[:20] == begun[:20])  # what came in the last second may be lost
        site.go_to("Batch")
        # It goes on where it was.
        site.page.locator(records).first.wait_for()
        site.wait_for(lambda: len(site.page.locator(records).all_inner_texts()) > len(shown))
        assert len(set(shown) & set(site.page.locator(records).all_inner_texts())) == len(shown)
        site.page.close()


def test_code_is_downloaded_under_the_name_of_what_it_asks(site: Site) -> None:
    site.go_to("API")
    for kind, name in (("Extract a record", "extract-contact.py"), ("Chat", "chat.py")):
        site.page.get_by_role("radio", name=kind).check()
        words = "chat.completions" if kind == "Chat" else "found["
        site.page.locator("#snippets .cm-content", has_text=words).first.wait_for()
        with site.page.expect_download() as waiting:
            site.page.locator("#snippets a[download$='.py']").click()
        assert waiting.value.suggested_filename == name
