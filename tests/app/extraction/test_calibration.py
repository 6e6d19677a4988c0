"""Confidence beside accuracy: written by an evaluation, read by the page."""

from pathlib import Path

import pytest

from app.extraction.calibration import CalibrationError, Point, read_calibration, write_calibration
from app.ui.extract.calibration_view import draw, find_calibration, render_calibration
from engine import EngineConfig
from tests.fakes import FakeEngine

FIGURES = {
    "tiny": {
        "field": 0.9, "cases": 3, "fields": 20,
        "deciles": [
            {"confidence": 0.3, "accuracy": 0.5, "fields": 10},
            {"confidence": 0.95, "accuracy": 1.0, "fields": 10},
        ],
    }
}  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert read_calibration(path) is None
    write_calibration(path, "demo", FIGURES)
    found = read_calibration(path)
    assert found is not None and (found.model, found.num_cases) == ("demo", 3)
    assert found.sets == {"tiny": (Point(0.3, 0.5, 10), Point(0.95, 1.0, 10))}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"model": "m"}', '{"model": "m", "sets": {"a": {"deciles": [{}]}}}']
)
def test_a_file_that_is_no_calibration_is_named_and_not_drawn(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"calibration\.json is no calibration"):
        read_calibration(path)
    assert find_calibration(tmp_path) is None


def test_the_plot_says_in_words_what_it_draws(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, "<demo>", FIGURES)
    found = read_calibration(path)
    assert found is not None
    drawn = draw(found)
    assert drawn.count("<circle") == 2 and "<demo>" not in drawn
    assert "(30% confidence) 50% were right, of the surer half (95%) 100%." in drawn


def test_a_model_without_measurement_says_how_to_measure(tmp_path: Path) -> None:
    shown = render_calibration(FakeEngine(config=EngineConfig(model=str(tmp_path))))
    assert "has not been measured" in shown and "--evaluate --calibration" in shown
