"""What confidence says and what it does not: in words, and drawn from what was measured on this model."""

from __future__ import annotations

import html
import logging
from pathlib import Path

from app.extraction.calibration import FILE_NAME, Calibration, CalibrationError, Point, read_calibration
from engine import Engine

logger = logging.getLogger("troupe.ui")

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 190, 36, 26, 10, 8
TICKS = (0.0, 0.5, 1.0)
MAX_SERIES = 4
WORDS = (
    "<p>Confidence is the mean probability of a value's own tokens <b>before</b> the grammar's mask; tokens that "
    "the schema forced are left out. It is relative: it ranks the fields of a record and says where to look first. "
    "It is not the chance of being right.</p>"
)
UNMEASURED = (
    "<p>How far it is from that chance has not been measured for this model. "
    "<code>python -m app extract --evaluate --calibration calibration.json</code> measures it; beside the model's "
    "weights the file is drawn here.</p>"
)


def render_calibration(engine: Engine) -> str:
    """The explanation under the record, folded."""
    found = find_calibration(Path(engine.config.model))
    drawn = draw(found) if found is not None else UNMEASURED
    return (
        '<details class="calibration"><summary>What does confidence say?</summary>'
        f"<div>{WORDS}{drawn}</div></details>"
    )


def find_calibration(model: Path) -> Calibration | None:
    """What was measured on the model in that folder; a file that cannot be read is logged and not drawn."""
    try:
        return read_calibration(model / FILE_NAME)
    except CalibrationError as error:
        logger.warning("%s", error)
        return None


def draw(calibration: Calibration) -> str:
    """The plot with its legend and one sentence that says the same."""
    series = [each for each in calibration.sets.items() if each[1]][:MAX_SERIES]
    marks = "".join(_draw_series(number, name, points) for number, (name, points) in enumerate(series))
    legend = "".join(
        f'<span><i class="s{number}"></i>{html.escape(name)}</span>'
        for number, (name, _) in enumerate(series)
    )
    summary = _summarize(calibration)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(summary, quote=True)}">'
        f'{_draw_axes()}{marks}</svg><figcaption>{legend}<span><i class="dash"></i>confidence</span>'
        f'<span><i class="dot"></i>right</span><p>{html.escape(summary)}</p></figcaption></figure>'
    )


def _x(place: float) -> float:
    return round(LEFT + place * (WIDTH - LEFT - RIGHT), 1)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)


def _draw_axes() -> str:
    lines = "".join(
        f'<path class="grid" d="M{_x(0)} {_y(tick)}H{_x(1)}"/>'
        f'<text x="{_x(0) - 6}" y="{_y(tick) + 3.5}" text-anchor="end">{tick:.0%}</text>'
        for tick in TICKS
    )
    return (
        f'{lines}<text x="{_x(0)}" y="{HEIGHT - 6}">least sure tenth</text>'
        f'<text x="{_x(1)}" y="{HEIGHT - 6}" text-anchor="end">surest tenth of the fields</text>'
    )


def _draw_series(number: int, name: str, points: tuple[Point, ...]) -> str:
    """Two lines of one colour, over the groups of fields: dashed what the model said, with dots what was right."""
    places = [_x((index + 0.5) / len(points)) for index in range(len(points))]
    said = "L".join(f"{x} {_y(point.confidence)}" for x, point in zip(places, points, strict=True))
    right = "L".join(f"{x} {_y(point.accuracy)}" for x, point in zip(places, points, strict=True))
    dots = "".join(
        f'<circle class="s{number}" cx="{x}" cy="{_y(point.accuracy)}" r="3.5">'
        f"<title>{html.escape(name)}: of {point.num_fields} fields with {point.confidence:.0%} confidence "
        f"{point.accuracy:.0%} were right</title></circle>"
        for x, point in zip(places, points, strict=True)
    )
    return f'<path class="said s{number}" d="M{said}"/><path class="line s{number}" d="M{right}"/>{dots}'


def _summarize(calibration: Calibration) -> str:
    points = [found for found in calibration.sets.values() if found]
    least, most = (
        [found[0] for found in points],
        [each for found in points for each in found[len(found) // 2 :]],
    )
    return (
        f"Measured on {calibration.num_cases} documents with {calibration.model}: of the tenth of the fields that the "
        f"model was least sure of ({_mean(least, 'confidence'):.0%} confidence) {_mean(least, 'accuracy'):.0%} were "
        f"right, of the surer half ({_mean(most, 'confidence'):.0%}) {_mean(most, 'accuracy'):.0%}."
    )


def _mean(points: list[Point], name: str) -> float:
    """Over all these fields together."""
    total = sum(point.num_fields for point in points)
    return sum(getattr(point, name) * point.num_fields for point in points) / total if total else 0.0
