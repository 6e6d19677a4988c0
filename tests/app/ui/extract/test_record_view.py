"""The record as HTML: escaped, marked once, with missing evidence shown as such."""

import dataclasses
import json
import re
from typing import Any

import pytest

from app.extraction import ExtractionResult, Extractor
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import scan
from app.ui.extract.record_view import (
    EMPTY,
    render_fields,
    render_figures,
    render_growing,
    render_source,
    render_status,
    show_path,
)
from app.ui.extract.shown import Shown
from app.ui.extract.table_rows import count_rows
from tests.fakes import PERSON, FakeEngine


async def extract(text: str, record: str = '{"name": "Ada <b>", "age": 36}', **options: Any) -> ExtractionResult:
    return await Extractor(FakeEngine(record=record), **options).extract(PERSON, text)


def show(result: ExtractionResult, text: str = "", **more: Any) -> str:
    return render_fields(Shown(result, text, PERSON, "fake", **more))


async def test_values_and_source_are_escaped_and_linked() -> None:
    text = "\n<i>Ada <b>, 36"
    result = await extract(text)
    page, source = show(result, text), render_source(result.leaves, result.evidence, text)
    assert "<i>" not in source and "&lt;i&gt;" in source and "Ada &lt;b&gt;</textarea>" in page
    assert re.findall(r'<mark data-field="(\d)"[^>]*>([^<]*)<', source) == [("0", "Ada &lt;b&gt;"), ("1", "36")]
    assert page.count('<tr data-field="0"') == 1
    source = render_source(result.leaves, result.evidence, text, ["/age"])
    assert '<mark data-field="0" title="name">' in source
    assert '<mark data-field="1" class="doubtful" title="Check: age">' in source


async def test_a_flagged_value_says_why_in_the_open_and_a_sure_one_has_no_figure() -> None:
    page = show(result := await extract("nobody"))
    assert page.count("Check: not in the text") == 2 and ">2 to check</button>" in page
    assert ">Go to marked, then approve</button>" in page
    assert "<mark" not in render_source(result.leaves, result.evidence, "nobody")
    found = dataclasses.replace(await extract("Ada <b> 36"), flags={"/name": ("the model was unsure",)})
    page = show(found)
    assert page.count("Check: the model was unsure") == 1 and "%" not in page
    checked = Shown(found, "", PERSON, "fake").act({"action": "check", "pointer": "/name"})
    page = render_fields(checked)
    assert "checked by you: the model was unsure" in page and ">Approve, 1 not opened</button>" in page


async def test_a_record_that_is_not_valid_cannot_be_approved() -> None:
    assert " disabled>Approve when valid</button>" in show(await extract("Ada", '{"name": "Ada", "age": "x"}'))


async def test_an_approval_says_what_nobody_looked_at() -> None:
    found = dataclasses.replace(await extract("Ada <b> 36"), flags={"/name": ("the model was unsure",)})
    shown = Shown(found, "", PERSON, "fake")
    blind = shown.act({"action": "approve"})
    assert "approved, not opened: the model was unsure" in render_fields(blind) and blind.to_check == ["/name"]
    assert ">1 to check</button>" in render_fields(blind) and "flagged" in render_fields(blind)
    assert "status-line cut" in render_status(blind) and "1 marked value not opened" in render_status(blind)
    late = blind.act({"action": "check", "pointer": "/name"})
    assert late.to_check == [] and "1 of 2 values not opened" in render_status(late)
    seen = shown.act({"action": "approve", "seen": ["/name", "/age", "/other"]})
    assert "checked by you: the model was unsure" in render_fields(seen) and "every value" in render_status(seen)
    assert seen.to_check == [] and "flagged" not in render_fields(seen)


async def test_the_number_of_the_text_is_offered_in_place_of_one_with_a_lost_separator() -> None:
    text, record = "Ada <b> paid 85,50", '{"name": "Ada", "age": 8550}'
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "number"}}}
    shown = Shown(await Extractor(FakeEngine(record=record)).extract(schema, text), text, schema, "fake")
    page = render_fields(shown)
    button = '<button [^>]*data-act="use" data-pointer="/age"[^>]*>Use 85.5<'
    assert re.search(f"Check: 85,50 in the text[^<]*{button}", page)
    used = shown.act({"action": "use", "pointer": "/age"})
    assert used.result.record == {"name": "Ada", "age": 85.5} and used.by_hand == {"/age"}
    assert "Use 85.5" not in render_fields(used) and used.act({"action": "use", "pointer": "/age"}) == used
    whole = dataclasses.replace(shown, schema=PERSON)  # where only a whole number is allowed
    assert "Check: not in the text" in render_fields(whole) and "Use 85.5" not in render_fields(whole)


def test_a_growing_record_shows_values_without_judging_them() -> None:
    page = render_growing(scan('{"name": "Ad').leaves)
    assert "Ad" in page and "Check" not in page and "textarea" not in page
    assert render_growing([]) == EMPTY
    page = render_growing(scan('{"items": [{"a": [1]}, {"a": [2]}], "n": 1}').leaves)
    assert re.findall(r'class="group"><th colspan="2">([^<]*)<', page) == ["items › 1 › a", "items › 2 › a"]


async def test_a_list_is_a_grid_with_a_row_for_each_item_and_says_what_it_may_lack() -> None:
    record = '{"n": 1, "lines": [{"name": "Tea", "price": 2}, {"name": "Milk"}], "tags": ["a", "b"]}'
    text = "Tea 1 2.00\nMilk 2 3.00\nCake 1 4.00"
    result = await Extractor(FakeEngine(record=record)).extract({"type": "object"}, text)
    result = dataclasses.replace(result, notes=("/tags was ended after item 2",))
    page = render_fields(Shown(result, text, {}, "fake"))
    assert page.count('class="grid"') == 2 and re.findall(r'scope="col">(\w+)<', page) == ["name", "price", "value"]
    assert page.count("<th scope='row'>1</th>") == 2 and 'aria-label="lines › 2 › name"' in page
    assert "2 rows</small>" in page and "the text has a table of 3 rows" in page and "was ended after item 2" in page
    assert "<small" not in page.split('class="value-notes"')[0].split("<tbody>")[-1]
    both = dataclasses.replace(result, flags=dict.fromkeys(("/lines/0/name", "/lines/0/price"), ("unsure",)))
    page = render_fields(Shown(both, text, {}, ""))
    assert '<small class="tell check"><b>name, price</b> Check: unsure</small>' in page


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Item   Qty   Price\nTea   1   2.00\nMilk   2   3.00\nCake   4   5.00\nTotal   7   30.00", 3),
        ("a | 1 | 2\nb | 3 | 4\n\nPage 2 of 2\n\nc | 5 | 6", 3),
        ("Meet me on 3 May at 10:30.\nI have 2 cats.", 0),
        ("1 x lamp, 49.50 EUR\n2 x chair, 80.00 EUR", 0),
        ("Phone case 2 19.90\nDue notes 1 2.00\nPen 1 1.00", 3),
        ("Date: 14 March 2026\nInvoice 7731 of 2026\nBath, 9 May 2026\n1 tea, 2.00\n3 milk, 2.00\n1 pie, 4.00", 3),
    ],
)
def test_the_rows_of_a_table_are_counted_and_prose_has_none(text: str, count: int) -> None:
    assert count_rows(text) == count


async def test_fields_that_differ_from_an_approved_record_show_both() -> None:
    result = await extract("Ada <b> 36")
    page = show(result, verified={"name": "Ada <b>", "age": 35, "gone": True})
    assert "1 of 3 fields as approved before" in page
    assert "approved before: 35" in page and "not here" in page


def test_text_that_shows_two_fields_is_marked_for_both() -> None:
    leaves = scan('{"a": "New York", "b": "York"} ').leaves
    text = "in New York"
    source = render_source(leaves, find_evidence(leaves, text), text)
    assert 'data-field="0" title="a">New </mark>' in source and 'data-field="0 1" title="a, b">York</mark>' in source


@pytest.mark.parametrize(
    ("options", "record", "badge"),
    [
        ({}, '{"name": "Ada", "age": 36}', "please check"),
        ({"max_tokens": 9}, '{"name": "Ada", "age": 36}', "cut off"),
        ({}, '{"age": "x"}', "not valid"),
        ({}, json.dumps({"name": "a b " * 48, "age": 36}), "stopped: it repeated itself"),
    ],
)
async def test_the_badge_shows_the_verdict_as_text(options: dict[str, Any], record: str, badge: str) -> None:
    assert f">{badge}<" in render_status(Shown(await extract("Ada", record, **options), "Ada", PERSON, "fake"))


async def test_added_limits_and_the_backend_are_stated() -> None:
    line = render_figures(await extract("Ada"))
    assert "added limits: 200 characters a text" in line and "grammar by fakegrammar" in line
    assert "added limits" not in render_figures(await extract("Ada", limits=None))


async def test_a_record_that_was_stopped_is_not_called_complete() -> None:
    whole, stopped = [await extract("Ada", f'{{"name": "{name}", "age": 36}}') for name in ("Ada", "a b " * 48)]
    assert "complete" in render_figures(whole)
    assert "repeated itself" in (line := render_figures(stopped)) and "complete" not in line


def test_places_in_lists_are_counted_from_one_and_names_of_digits_are_kept() -> None:
    assert show_path(("a/b", 0, "c<")) == "a/b › 1 › c&lt;"
    assert show_path(("2023", "²", 1)) == "2023 › ² › 2"


async def test_fields_named_with_digits_keep_their_names_wherever_they_are_shown() -> None:
    record = '{"2023": {"1": 120, "²": [4]}, "2024": 140}'
    result = await Extractor(FakeEngine(record=record)).extract({"type": "object"}, "120, 4, 140")
    verified = {**result.record, "2022": [{"1": 9}]}
    page = show(result, verified=verified)
    assert re.findall(r'class="group"><th colspan="2">([^<]*)<', page) == ["2023"] and "<h2>2023 › ²" in page
    assert re.findall(r'<th scope="row"(?: class="inner")?>([^<]*)<', page) == ["1", "2024", "2022 › 1 › 1"]
    assert 'aria-label="2023 › 1"' in page and 'aria-label="2023 › ² › 1"' in page
    assert 'title="2024"' in render_source(result.leaves, result.evidence, "120, 4, 140")
