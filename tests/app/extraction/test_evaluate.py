"""Figures of an evaluation: per kind, whole records, strings found, deciles; with other text around."""

import json
from pathlib import Path

import pytest

from app.extraction import Extractor
from app.extraction.cases import Case, CaseError, read_cases
from app.extraction.evaluate import find_threshold, group_by_confidence, score_cases, summarize
from app.extraction.json_spans import scan
from app.extraction.scoring import list_wrong
from engine import EngineDead
from grammar import InvalidGrammar
from tests.fakes import PERSON, FakeEngine


def make_case(text: str = "Ada is 36 years old.", name: str = "Ada", kind: str = "person") -> Case:
    return Case(kind, PERSON, text, {"name": name, "age": 36})


async def test_right_and_wrong_fields_are_counted_one_by_one() -> None:
    cases = [make_case(), make_case(name="Bob", kind="other")]
    figures = summarize(await score_cases(Extractor(FakeEngine()), cases))
    assert figures.field == 0.75 and figures.by_field["other/name"] == 0.0 and figures.by_field["person/name"] == 1.0
    assert (figures.whole, figures.valid, figures.cases, figures.fields) == (1, 2, 2, 4)
    figures = summarize(await score_cases(Extractor(FakeEngine()), [make_case(), make_case(text="Nobody is 36.")]))
    assert (figures.strings, figures.found) == (2, 1)


async def test_a_case_that_fails_alone_counts_as_wrong() -> None:
    scored = await score_cases(Extractor(FakeEngine()), [make_case(text="x" * 3000), make_case()])
    assert scored[0].error and not scored[0].is_whole and scored[1].is_whole
    figures = summarize(scored)
    assert figures.field == 0.5 and figures.valid == 1
    assert (figures.failed, figures.first_error) == (1, scored[0].error)
    scored = await score_cases(Extractor(FakeEngine(reject=InvalidGrammar("no such year"))), [make_case()])
    assert scored[0].error == "no such year"
    with pytest.raises(EngineDead):
        await score_cases(Extractor(FakeEngine(reject=EngineDead("gone"))), [make_case(), make_case()])


async def test_unexpected_fields_make_a_record_incorrect() -> None:
    record = '{"name": "Ada", "age": 36, "email": "ada@x.org", "note": null, "tags": []}'
    (scored,) = await score_cases(Extractor(FakeEngine(record=record)), [make_case()])
    assert scored.extra == ("/email",) and not scored.is_whole and min(scored.scores.values()) == 1.0


def test_deciles_are_groups_of_equal_size_in_order_of_confidence() -> None:
    pairs = [(i / 20, float(i >= 10)) for i in range(20)]
    groups = group_by_confidence(pairs[::-1])
    assert [group.fields for group in groups] == [2] * 10
    assert [group.accuracy for group in groups] == [0.0] * 5 + [1.0] * 5
    assert groups[0].confidence == pytest.approx(0.025)
    assert [group.fields for group in group_by_confidence([(0.1, 1.0), (0.2, 0.0)])] == [1, 1]
    assert group_by_confidence([]) == []


def test_fields_of_the_same_confidence_share_their_accuracy() -> None:
    groups = group_by_confidence([(0.5, 0.0), *[(1.0, 0.0)] * 10, *[(1.0, 1.0)] * 9], num_groups=4)
    assert [group.accuracy for group in groups[1:]] == [pytest.approx(9 / 19, abs=1e-4)] * 3
    assert groups[0].accuracy == pytest.approx(4 * 9 / 19 / 5, abs=1e-4)


def test_the_threshold_is_the_least_confidence_with_enough_right_fields() -> None:
    pairs = [(0.5, 0.0), *[(0.8, 1.0)] * 19, (0.8, 0.0), (0.9, 1.0)]
    assert find_threshold(pairs) == 0.8
    assert find_threshold([(0.8, 0.0), (0.9, 1.0)]) == 0.9
    assert find_threshold([(0.9, 0.0)]) is None and find_threshold([]) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 is not JSON"), ("[]", "needs `text`"), ('{"kind": "contact", "text": "a"}', "and `record`"),
        ('{"text": "a", "record": 5}', "needs `record`, an object"),
        ('{"kind": "zebra", "text": "a", "record": {}}', "no `kind` among contact, event, .* --schema is not given"),
        ("", "has no line with a document"),
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


def test_a_schema_comes_from_the_line_or_the_kind_or_the_command(tmp_path: Path) -> None:
    own = {"type": "object", "title": "own"}
    lines = [{"text": "a", "record": {}}, {"text": "a", "record": {}, "kind": "contact"}]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, [*lines, lines[0] | {"schema": own}])))
    given, contact, last = (case.schema for case in read_cases(tmp_path / "set.jsonl", PERSON))
    assert (given, last) == (PERSON, own) and "phone" in contact["properties"]


def test_single_values_are_wrong_one_by_one_and_items_are_compared_with_the_most_alike() -> None:
    wanted = {"a": 1, "lines": [{"x": "b", "n": 2}, {"x": "c", "n": 3}], "tags": ["u", "v"]}
    found = {"a": 2, "lines": [{"x": "c", "n": 3}, {"x": "b", "n": 9}], "tags": ["v", "w"], "more": True}
    paths = [leaf.path for leaf in scan(json.dumps(found)).leaves]
    assert list(list_wrong(paths, found, wanted)) == ["/a", "/lines/1/n", "/tags/1", "/more"]


async def test_wrong_and_flagged_values_are_counted() -> None:
    engine = FakeEngine(record='{"name": "Bob", "age": 36}')
    figures = summarize(await score_cases(Extractor(engine), [make_case()]))
    assert (figures.wrong_values, figures.flagged_values) == (1, 2)
    assert (figures.wrong_flagged, figures.flagged_wrong) == (1.0, 0.5)
