"""Confidence and accuracy on documents whose correct records are known, as a small file.

`extract --evaluate --calibration FILE` writes it. The page shows the file calibration.json beside a model's weights.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

FILE_NAME = "calibration.json"


class CalibrationError(ValueError):
    """A file that is not a calibration; the message names it and says why."""


class Point(msgspec.Struct, frozen=True):
    """Fields of about the same confidence: its mean, the share that was right, and their number."""

    confidence: float
    accuracy: float
    fields: int


class MeasuredSet(msgspec.Struct, frozen=True):
    """One set of documents; the points are in order of confidence."""

    cases: int
    deciles: tuple[Point, ...]


class Calibration(msgspec.Struct, frozen=True):
    """The content of the file: sets by name."""

    model: str
    sets: dict[str, MeasuredSet]


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file.

    Raises OSError: it cannot be written.
    """
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")


def read_calibration(path: Path) -> Calibration | None:
    """Return the measurements, None without a file."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.MsgspecError) as error:
        raise CalibrationError(
            f"{path.name} is not a calibration file ({error}); create it again with --evaluate"
        ) from error
