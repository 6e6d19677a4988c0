"""What can be expected of the model that reads: how reliable its confidence is, as measured, under the record."""

from __future__ import annotations

import html
import logging
from pathlib import Path

from app.extraction.calibration import FILE_NAME, Calibration, CalibrationError, read_calibration
from app.ui.examples import is_demo_model
from engine import Engine

logger = logging.getLogger("troupe.ui")

# Lower bounds of the table's bands.
BANDS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
WORDS = (
    "<p>Confidence is the mean probability of a value's own tokens <b>before</b> the grammar's mask; tokens that "
    "the schema forced are left out. It ranks the fields of a record and says where to look first. "
    "It is not the chance of being right.</p>"
)
UNMEASURED = (
    "<p>How often such values are right has not been measured for this model. "
    "<code>python -m app extract --evaluate FILE --calibration calibration.json</code> measures it; beside the model's "
    "weights the file is shown here.</p>"
)
DEMO_NOTE = (
    '<p class="hint-line">The embedded demo model reads short texts like the examples. For your own, '
    '<a href="#engine">load a larger model</a> under Engine, or choose one beside the button.</p>'
)


def render_calibration(engine: Engine | None) -> str:
    """Return the folded explanation under the record, and a note for the demo model; none for one that is gone."""
    if engine is None:
        return ""
    found = find_calibration(Path(engine.config.model))
    table = make_table(found) if found is not None else UNMEASURED
    return (
        '<details class="calibration"><summary>How reliable is the confidence?</summary>'
        f"<div>{WORDS}{table}</div></details>{DEMO_NOTE if is_demo_model(engine) else ''}"
    )


def find_calibration(model: Path) -> Calibration | None:
    """Return the measurements of the model in that folder; an unreadable file is logged and ignored."""
    try:
        return read_calibration(model / FILE_NAME)
    except CalibrationError as error:
        logger.warning("%s", error)
        return None


def make_table(calibration: Calibration) -> str:
    """Return bands of confidence with the share of correct values."""
    rows = ""
    for low, high in zip(BANDS, (*BANDS[1:], 1.01), strict=True):
        measured = [each for found in calibration.sets.values() for each in found.deciles]
        points = [each for each in measured if low <= each.confidence < high]
        count = sum(each.fields for each in points)
        right = f"{sum(each.accuracy * each.fields for each in points) / count:.0%}" if count else "–"
        rows += f"<tr><td>{low:.0%} to {min(high, 1):.0%}</td><td>{right}</td><td>{count:,}</td></tr>"
    heads = "".join(f'<th scope="col">{word}</th>' for word in ("Confidence", "Right", "Values"))
    num_cases = sum(found.cases for found in calibration.sets.values())
    words = f"Measured on {num_cases} documents with {html.escape(calibration.model)}."
    return f"<p>{words}</p><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
