"""Scores are exact after trim and case-fold, numbers by value, lists by F1, inner objects field by field."""

from typing import Any

import pytest

from app.extraction.scoring import list_extra, score_field, score_record


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        (" Ada ", "ada", 1.0), ("Ada L", "Ada", 0.0), (3, 3.0, 1.0), (True, 1, 0.0), (None, "None", 0.0),
        (None, None, 1.0), (["a", "b"], ["B", "a"], 1.0), (["a"], ["a", "b"], 2 / 3),
        (["a", "a"], ["a"], 2 / 3), ([], [], 1.0), ([], ["a"], 0.0), ("a", ["a"], 0.0),
        ([{"n": 1, "d": "x"}], [{"d": "X", "n": 1.0}], 1.0),
        ([{"n": 1}, {"n": 2}], [{"n": 1}, {"n": 3}], 0.5), (10**400, 1, 0.0), (2**53 + 1, 2**53, 0.0),
        (2**53, 2.0**53, 1.0),
    ],
)
def test_a_value_scores_by_its_kind(found: Any, wanted: Any, score: float) -> None:
    assert score_field(found, wanted) == pytest.approx(score)


def test_fields_of_inner_objects_count_one_by_one() -> None:
    wanted = {"a": 1, "b": {"c/d": 2, "e": {"f": 3}}}
    assert score_record({"a": 1, "b": {"c/d": 2, "e": {"f": 4}}}, wanted) == {"/a": 1.0, "/b/c~1d": 1.0, "/b/e/f": 0.0}


@pytest.mark.parametrize("found", [None, [], "a", {}, {"b": 1}])
def test_what_is_missing_scores_nothing(found: Any) -> None:
    assert score_record(found, {"a": None}) == {"/a": 0.0}


@pytest.mark.parametrize(
    ("found", "extra"),
    [
        ({"a": 1, "email": "x"}, ["/email"]), ({"a": 2, "b": {"c": 0, "d": False}}, ["/b/d"]),
        ({"a": 1, "e": None, "f": "", "g": [], "h": {}, "i": {"j": None}}, []), (None, []),
    ],
)
def test_what_was_found_and_not_wanted_is_listed(found: Any, extra: list[str]) -> None:
    assert list_extra(found, {"a": 1, "b": {"c": 2}}) == extra
