"""The record as HTML: escaped, marked once, with missing evidence shown as such."""

import dataclasses
import re
from typing import Any

import pytest

from app.extraction import ExtractionResult, Extractor
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import scan
from app.extraction.review import compare
from app.ui.extract.record_view import (
    EMPTY,
    render_fields,
    render_figures,
    render_source,
    render_status,
    show_path,
)
from tests.fakes import PERSON, FakeEngine


async def extract(
    text: str, record: str = '{"name": "Ada <b>", "age": 36}', **options: Any
) -> ExtractionResult:
    return await Extractor(FakeEngine(record=record), **options).extract(PERSON, text)


async def test_values_and_source_are_escaped_and_linked() -> None:
    text = "<i>Ada <b>, 36"
    result = await extract(text)
    page, source = render_fields(result.leaves, result), render_source(result.leaves, result.evidence, text)
    assert "<i>" not in source and "&lt;i&gt;" in source and "Ada &lt;b&gt;</textarea>" in page
    assert re.findall(r'<mark data-field="(\d)"[^>]*>([^<]*)<', source) == [
        ("0", "Ada &lt;b&gt;"),
        ("1", "36"),
    ]
    assert page.count('<tr data-field="0"') == 1 and "78%" in page


async def test_a_value_without_evidence_says_so_and_is_flagged() -> None:
    page = render_fields((result := await extract("nobody")).leaves, result)
    assert "not in the text" in page and page.count('class="flagged"') == 2 and ">2 to check</button>" in page
    assert "<mark" not in render_source(result.leaves, result.evidence, "nobody")
    found = dataclasses.replace(await extract("Ada <b> 36"), flags={"/name": ("the model was unsure",)})
    page = render_fields(found.leaves, found)
    assert page.count('class="flagged"') == 1 and 'title="the model was unsure"' in page
    assert ">1 to check, 1 not looked at</button>" in page


def test_a_growing_record_shows_values_without_judging_them() -> None:
    page = render_fields(scan('{"name": "Ad').leaves, None)
    assert "Ad" in page and "confidence" not in page.replace("Confidence", "") and "textarea" not in page
    assert render_fields([], None) == EMPTY
    page = render_fields(scan('{"items": [{"a": 1}, {"a": 2}], "n": 1}').leaves, None)
    assert re.findall(r'class="group"><th colspan="3">([^<]*)<', page) == ["items › 1", "items › 2"]


async def test_fields_that_differ_from_a_verified_record_show_both() -> None:
    result = await extract("Ada <b> 36")
    verified = {"name": "Ada <b>", "age": 35, "gone": True}
    page = render_fields(result.leaves, result, compare(result.record, verified))
    assert "1 of 3 fields as in the record you verified" in page
    assert "verified: 35" in page and "as verified" in page and "no longer there" in page


def test_text_that_shows_two_fields_is_marked_for_both() -> None:
    leaves = scan('{"a": "New York", "b": "York"} ').leaves
    text = "in New York"
    source = render_source(leaves, find_evidence(leaves, text), text)
    assert (
        'data-field="0" title="a">New </mark>' in source
        and 'data-field="0 1" title="a, b">York</mark>' in source
    )


@pytest.mark.parametrize(
    ("options", "record", "badge"),
    [
        ({}, '{"name": "Ada", "age": 36}', "fits the schema"),
        ({"max_tokens": 9}, '{"name": "Ada", "age": 36}', "cut off"),
        ({}, '{"age": "x"}', "not valid"),
    ],
)
async def test_the_badge_shows_the_verdict_as_text(options: dict[str, Any], record: str, badge: str) -> None:
    assert f">{badge}<" in render_status(await extract("Ada", record, **options))


async def test_added_limits_and_the_backend_are_stated() -> None:
    line = render_figures(await extract("Ada"))
    assert "added limits: 200 characters a text" in line and "grammar by fakegrammar" in line
    assert "added limits" not in render_figures(await extract("Ada", limits=None))


def test_places_in_lists_are_counted_from_one_and_names_of_digits_are_kept() -> None:
    assert show_path(("a/b", 0, "c<")) == "a/b › 1 › c&lt;"
    assert show_path(("2023", "²", 1)) == "2023 › ² › 2"


async def test_fields_named_with_digits_keep_their_names_wherever_they_are_shown() -> None:
    record = '{"2023": {"1": 120, "²": [4]}, "2024": 140}'
    result = await Extractor(FakeEngine(record=record)).extract({"type": "object"}, "120, 4, 140")
    verified = {**result.record, "2022": [{"1": 9}]}
    page = render_fields(result.leaves, result, compare(result.record, verified))
    assert re.findall(r'class="group"><th colspan="3">([^<]*)<', page) == ["2023", "2023 › ²"]
    assert re.findall(r'<th scope="row"(?: class="inner")?>([^<]*)<', page) == [
        "1", "1", "2024", "2022 › 1 › 1",
    ]  # fmt: skip
    assert 'aria-label="2023 › 1"' in page and 'aria-label="2023 › ² › 1"' in page
    assert 'title="2024"' in render_source(result.leaves, result.evidence, "120, 4, 140")
