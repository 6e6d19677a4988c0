"""Figures of an evaluation: per kind, whole records, strings found, deciles; with other text around."""

import json
from pathlib import Path

import jsonschema_rs
import pytest

from app.extraction import Extractor
from app.extraction.cases import SETS, Case, CaseError, read_cases, read_paragraphs, surround
from app.extraction.evaluate import Judged, group_by_confidence, judge_cases, summarize
from app.extraction.json_spans import scan
from app.extraction.scoring import list_wrong
from engine import EngineDead
from grammar import InvalidGrammar
from tests.fakes import PERSON, FakeEngine


def make_case(text: str = "Ada is 36 years old.", name: str = "Ada", kind: str = "person") -> Case:
    return Case(kind, PERSON, text, {"name": name, "age": 36})


async def test_right_and_wrong_fields_are_counted_by_kind() -> None:
    cases = [make_case(), make_case(name="Bob", kind="other")]
    figures = summarize(await judge_cases(Extractor(FakeEngine()), cases))
    assert figures.field == 0.75 and figures.kinds == {"other": 0.5, "person": 1.0}
    assert (figures.whole, figures.valid, figures.cases, figures.fields) == (1, 2, 2, 4)


async def test_strings_that_are_not_in_the_text_are_counted() -> None:
    figures = summarize(
        await judge_cases(Extractor(FakeEngine()), [make_case(), make_case(text="Nobody is 36.")])
    )
    assert (figures.strings, figures.found) == (2, 1)


async def test_a_case_that_fails_alone_counts_as_wrong() -> None:
    judged = await judge_cases(Extractor(FakeEngine()), [make_case(text="x" * 3000), make_case()])
    assert judged[0].error and not judged[0].is_whole and judged[1].is_whole
    figures = summarize(judged)
    assert figures.field == 0.5 and figures.valid == 1
    assert (figures.failed, figures.first_error) == (1, judged[0].error)


async def test_a_text_that_no_grammar_can_be_made_for_fails_alone() -> None:
    judged = await judge_cases(Extractor(FakeEngine(reject=InvalidGrammar("no such year"))), [make_case()])
    assert judged[0].error == "no such year"


async def test_unexpected_fields_make_a_record_incorrect() -> None:
    record = '{"name": "Ada", "age": 36, "email": "ada@x.org", "note": null, "tags": []}'
    (judged,) = await judge_cases(Extractor(FakeEngine(record=record)), [make_case()])
    assert judged.extra == ("/email",) and not judged.is_whole and min(judged.scores.values()) == 1.0


async def test_a_dead_engine_ends_the_evaluation() -> None:
    with pytest.raises(EngineDead):
        await judge_cases(Extractor(FakeEngine(reject=EngineDead("gone"))), [make_case(), make_case()])


def test_deciles_are_groups_of_equal_size_in_order_of_confidence() -> None:
    pairs = [(i / 20, float(i >= 10)) for i in range(20)]
    groups = group_by_confidence(pairs[::-1])
    assert [group.fields for group in groups] == [2] * 10
    assert [group.accuracy for group in groups] == [0.0] * 5 + [1.0] * 5
    assert groups[0].confidence == pytest.approx(0.025)


def test_fields_of_the_same_confidence_share_their_accuracy() -> None:
    groups = group_by_confidence([(0.5, 0.0), *[(1.0, 0.0)] * 10, *[(1.0, 1.0)] * 9], num_groups=4)
    assert [group.accuracy for group in groups[1:]] == [pytest.approx(9 / 19, abs=1e-4)] * 3
    assert groups[0].accuracy == pytest.approx(4 * 9 / 19 / 5, abs=1e-4)


def test_few_fields_make_few_groups() -> None:
    assert [group.fields for group in group_by_confidence([(0.1, 1.0), (0.2, 0.0)])] == [1, 1]
    assert group_by_confidence([]) == []


def test_an_empty_set_has_no_figures() -> None:
    with pytest.raises(ValueError, match="empty"):
        summarize([])


def test_a_record_without_wrong_fields_is_whole() -> None:
    assert Judged(make_case(), {}, {}, True, 0, 0).is_whole
    assert not Judged(make_case(), {"/a": 1.0, "/b": 0.5}, {}, True, 0, 0).is_whole


def test_other_text_stands_on_both_sides_in_the_asked_amount() -> None:
    text = surround(make_case(), 100, lambda part: len(part.split()), read_paragraphs()).text
    before, behind = (part.split() for part in text.split("Ada is 36 years old."))
    assert 40 <= len(before) <= 50 and 40 <= len(behind) <= 50


def test_more_text_than_there_is_repeats_and_none_changes_nothing() -> None:
    long = surround(make_case(), 40, lambda part: len(part.split()), ["one two three."]).text
    assert long.count("one two three.") == 12
    assert surround(make_case(), 0, len, ["a"]).text == make_case().text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "`kind` and `text`"),
        ('{"kind": "contact", "text": "a"}', "needs `record`"),
        ('{"kind": "zebra", "text": "a", "record": {}}', "'zebra' is none of contact, event"),
    ],
)
def test_a_line_that_is_no_case_is_named(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(line)
    with pytest.raises(CaseError, match=problem):
        read_cases(tmp_path / "set.jsonl")


def test_only_a_line_end_ends_a_case(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    line = json.dumps({"kind": "contact", "text": text, "record": {}}, ensure_ascii=False)
    (tmp_path / "set.jsonl").write_bytes(f"{line}\r\n\n{line}\n".encode())
    assert [case.text for case in read_cases(tmp_path / "set.jsonl")] == [text, text]


@pytest.mark.parametrize("name", SETS)
def test_every_built_in_set_fits_its_schemas(name: str) -> None:
    cases = read_cases(SETS[name])
    assert len(cases) >= 16
    for case in cases:
        assert list(case.schema["properties"]) == list(case.record)
        assert json.dumps(case.record) != "{}"
        jsonschema_rs.validate(case.schema, case.record)


def test_single_values_are_wrong_one_by_one_and_items_are_compared_with_the_most_alike() -> None:
    wanted = {"a": 1, "lines": [{"x": "b", "n": 2}, {"x": "c", "n": 3}], "tags": ["u", "v"]}
    found = {"a": 2, "lines": [{"x": "c", "n": 3}, {"x": "b", "n": 9}], "tags": ["v", "w"], "more": True}
    paths = [leaf.path for leaf in scan(json.dumps(found)).leaves]
    assert list(list_wrong(paths, found, wanted)) == ["/a", "/lines/1/n", "/tags/1", "/more"]


async def test_wrong_and_flagged_values_are_counted() -> None:
    engine = FakeEngine(record='{"name": "Bob", "age": 36}')
    figures = summarize(await judge_cases(Extractor(engine), [make_case()]))
    assert (figures.wrong_values, figures.flagged_values) == (1, 2)
    assert (figures.wrong_flagged, figures.flagged_wrong) == (1.0, 0.5)
