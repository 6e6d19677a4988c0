"""Confidence beside accuracy: written by an evaluation, read by the page."""

from pathlib import Path

import pytest

from app.extraction.calibration import (
    Calibration,
    CalibrationError,
    MeasuredSet,
    Point,
    read_calibration,
    write_calibration,
)
from app.ui.extract.reliability import find_calibration, make_table, render_calibration
from engine import EngineConfig
from tests.fakes import FakeEngine

SETS = {"tiny": MeasuredSet(3, (Point(0.3, 0.5, 10), Point(0.95, 1.0, 10)))}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert read_calibration(path) is None
    write_calibration(path, Calibration("demo", SETS))
    assert read_calibration(path) == Calibration("demo", SETS)


@pytest.mark.parametrize("text", ["", "[]", '{"model": "m"}', '{"model": "m", "sets": {"a": {"deciles": [{}]}}}'])
def test_a_file_that_is_no_calibration_is_named_and_not_drawn(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"calibration\.json is not a calibration file"):
        read_calibration(path)
    assert find_calibration(tmp_path) is None


def test_the_table_says_how_many_values_of_a_confidence_were_right() -> None:
    table = make_table(Calibration("<demo>", SETS))
    assert "<td>0% to 50%</td><td>50%</td><td>10</td>" in table and "<demo>" not in table
    assert "<td>95% to 99%</td><td>100%</td><td>10</td>" in table


def test_a_model_without_measurement_says_how_to_measure(tmp_path: Path) -> None:
    shown = render_calibration(FakeEngine(config=EngineConfig(model=str(tmp_path))))
    assert "has not been measured" in shown and "--evaluate FILE --calibration" in shown
    note = "The embedded demo model reads short texts"
    assert note not in shown and note in render_calibration(FakeEngine())
