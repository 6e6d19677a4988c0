"""How confidence and accuracy went together on documents whose right records are known, as a small file.

`extract --evaluate --calibration FILE` writes it; beside a model's weights, as calibration.json, the page draws it.

{"model": name, "sets": {name of a set: {"cases", "fields", "deciles": [{"confidence", "accuracy", "fields"}]}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "calibration.json"
KEPT = ("cases", "fields", "deciles")


class CalibrationError(ValueError):
    """A file that is no calibration; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Point:
    """Fields of about the same confidence: its mean, the share of them that was right, and how many they are."""

    confidence: float
    accuracy: float
    num_fields: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """The points of each set, the least confident first."""

    model: str
    sets: dict[str, tuple[Point, ...]]
    num_cases: int


def write_calibration(path: Path, model: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep what the plot needs of the evaluated sets.

    Raises:
        OSError: the file cannot be written.
    """
    sets = {name: {key: found[key] for key in KEPT} for name, found in figures.items()}
    path.write_text(json.dumps({"model": model, "sets": sets}, indent=1) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> Calibration | None:
    """What was measured, None where nothing was.

    Raises:
        CalibrationError: the file is there but is no calibration.
    """
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        sets = {
            name: tuple(
                Point(float(each["confidence"]), float(each["accuracy"]), int(each["fields"]))
                for each in found["deciles"]
            )
            for name, found in given["sets"].items()
        }
        return Calibration(
            str(given["model"]), sets, sum(int(found["cases"]) for found in given["sets"].values())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"{path.name} is no calibration ({error}); write it anew with --evaluate"
        ) from error
