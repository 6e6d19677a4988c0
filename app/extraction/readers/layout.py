"""Lays out the text of a page as it is read: rows of tables, wrapped cells, and columns of prose one after the other.

Boxes are (left, top, right, bottom) in points as shown.
"""

from __future__ import annotations

import base64
import math
import struct
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

Box = tuple[float, float, float, float]
# A gap of that many heights of a line ends a cell; so wide a strip without text may separate columns.
MAX_GAP = 1.0
WORD_GAP = 0.2
# Runs whose centres are that close, in heights of a line, stand on one line.
SAME_LINE = 0.6
# Columns of prose have at least so many lines, of that many heights and that share of the column.
MIN_PROSE_LINES, MIN_PROSE_WIDTH, MIN_PROSE_FILL = 3, 8, 0.6
MAX_GUTTERS = 8
MIN_SLOPE = 0.003  # by which the ends of a line stand 2 points apart
MIN_CONTINUED = 0.2  # share of the lines of prose that go on with a small letter
NEAR_LINES = 100  # lines before and after a row that show how wide its columns are
WRAPPED_STEP = 1.25  # rows of a table stand at least so many times as far apart as the lines of a cell


@dataclass(slots=True)
class Run:
    """Characters side by side on a line, each with its box; spaces have none.

    Attributes:
        slope: how much it rises towards the right, as a tangent.
    """

    box: Box
    text: list[str] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)
    is_turned: bool = False
    is_field: bool = False
    slope: float = 0.0

    @property
    def height(self) -> float:
        return max(self.box[3] - self.box[1], 1.0)

    @property
    def centre(self) -> float:
        return (self.box[1] + self.box[3]) / 2

    @property
    def direction(self) -> int:
        """Return 1 for letters that are written to the right, -1 for those to the left, 0 without letters."""
        if all(map(str.isascii, self.text)):
            return int(any(map(str.isalpha, self.text)))
        kinds = [unicodedata.bidirectional(sign) for sign in self.text if len(sign) == 1]
        num_left, num_right = sum(kind in ("R", "AL") for kind in kinds), kinds.count("L")
        return (num_right > num_left) - (num_left > num_right)

    def add(self, text: str, box: Box) -> None:
        """Append a character, or the whole text of a field."""
        self.text += text
        self.boxes += [box] * len(text)
        left, top, right, bottom = self.box
        self.box = (min(left, box[0]), min(top, box[1]), max(right, box[2]), max(bottom, box[3]))

    def follows(self, last: Box, box: Box) -> bool:
        """Return whether a character stands beside the last one."""
        side, across = (1, 0) if self.is_turned else (0, 1)
        size = min(last[across + 2] - last[across], box[across + 2] - box[across])
        overlap = min(last[across + 2], box[across + 2]) - max(last[across], box[across])
        gap = max(box[side] - last[side + 2], last[side] - box[side + 2])
        return overlap >= 0.4 * size and gap <= MAX_GAP * max(size, 1.0)


@dataclass(slots=True)
class PageText:
    """The text of a page with the box of each character."""

    text: list[str] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)

    def add_line(self, runs: Sequence[Run]) -> None:
        """Append the runs of a line in the order in which they are read."""
        self._add_space("\n" if self.text else "")
        for before, run in zip([None, *runs], runs, strict=False):
            if before is not None:
                side = max(run.box[0] - before.box[2], before.box[0] - run.box[2])
                gap = side / min(run.height, before.height)
                is_apart = gap > WORD_GAP or run.is_field or run.box[1] > before.centre
                self._add_space("  " if gap > MAX_GAP else " " if is_apart else "")
            self.text += run.text
            self.boxes += run.boxes

    def _add_space(self, text: str) -> None:
        self.text += text
        self.boxes += [None] * len(text)


def pack_words(page: PageText) -> str:
    """Return the offsets and the box of each word, as `app.extraction.boxes` reads them, in base64."""
    packed, start = [], 0
    for end, box in enumerate([*page.boxes, None]):
        if box is None:
            if start < end:
                lefts, tops, rights, bottoms = zip(*page.boxes[start:end], strict=True)  # type: ignore[arg-type]
                packed.append(struct.pack("<2i4f", start, end, min(lefts), min(tops), max(rights), max(bottoms)))
            start = end + 1
    return base64.b64encode(b"".join(packed)).decode()


def lay_out(runs: Sequence[Run]) -> PageText:
    """Write the runs of a page as it is read: rows from the top, columns of prose one after the other."""
    page = PageText()
    upright = [run for run in runs if not run.is_turned]
    _straighten(upright)
    lines = _make_lines(upright)
    start, is_leftward = 0, _reads_leftward(upright)
    while start < len(lines):
        end, gutters = _find_gutters(lines, start)
        columns = [[line for line in column if line] for column in _split(lines[start:end], gutters)]
        if len(columns) > 1 and all(map(_is_prose, columns)):
            band = [line for column in columns[:: -1 if is_leftward else 1] for line in column]
        else:
            band = _join_wrapped(lines[start:end])
        for line in band:
            page.add_line(_order(line, is_leftward))
        start = end
    for run in runs:
        if run.is_turned:
            page.add_line([run])
    return page


def _straighten(runs: Sequence[Run]) -> None:
    """Place the runs of a page that a scanner has tilted, as they would stand on an even one."""
    slopes = sorted(run.slope for run in runs for _ in run.text)
    slope = slopes[len(slopes) // 2] if slopes else 0.0
    if abs(slope) < MIN_SLOPE:
        return
    for run in runs:
        left, top, right, bottom = next(filter(None, run.boxes))
        down = left * slope
        run.box = (min(run.box[0], left), top + down, max(run.box[2], right), bottom + down)


def _make_lines(runs: list[Run]) -> list[list[Run]]:
    lines: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.centre):
        first = lines[-1][0] if lines else None
        if first and abs(run.centre - first.centre) <= SAME_LINE * min(run.height, first.height):
            lines[-1].append(run)
        else:
            lines.append([run])
    return [sorted(line, key=lambda run: run.box[0]) for line in lines]


def _order(line: list[Run], is_leftward: bool) -> list[Run]:
    """Return a line from left to right as it is read, with the words of the other direction in their own order.

    Args:
        is_leftward: whether the cells of a table are read from right to left; a sentence shows it by its letters.
    """
    if not is_leftward and all(run.direction >= 0 for run in line):
        return line
    if all(_is_near(one, two) for one, two in pairwise(line)):
        is_leftward = _reads_leftward(line)
    other = 1 if is_leftward else -1
    ordered: list[Run] = []
    group: list[Run] = []  # side by side, of the other direction or without letters
    for run in [*(line[::-1] if is_leftward else line), None]:
        near = run is not None and bool(group) and _is_near(group[-1], run)
        if run is not None and ((near and run.direction in (0, other)) or (not group and run.direction == other)):
            group.append(run)
            continue
        size = max((number for number, each in enumerate(group, 1) if each.direction == other), default=0)
        ordered += [*group[:size][::-1], *group[size:]]
        group = [run] if run is not None and run.direction == other else []
        if run is not None and not group:
            ordered.append(run)
    return ordered


def _reads_leftward(runs: Sequence[Run]) -> bool:
    return sum(run.direction * len(run.text) for run in runs) < 0


def _is_near(one: Run, two: Run) -> bool:
    gap = max(two.box[0] - one.box[2], one.box[0] - two.box[2])
    return gap <= MAX_GAP * min(one.height, two.height)


def _find_gutters(lines: list[list[Run]], start: int) -> tuple[int, list[tuple[float, float]]]:
    """Return the end of the lines that leave the same vertical strips free as the first one, and the strips."""
    first = lines[start]
    width = MAX_GAP * median(run.height for run in first)
    gaps = ((one.box[2], two.box[0]) for one, two in pairwise(first))
    gutters = _keep_widest([gap for gap in gaps if gap[1] - gap[0] >= width])
    end = start + 1
    while gutters and end < len(lines):
        left = [part for gutter in gutters for part in _clear(gutter, lines[end], width)]
        if not left:
            break
        gutters, end = _keep_widest(left), end + 1
    return end, gutters


def _join_wrapped(lines: list[list[Run]]) -> list[list[Run]]:
    """Return the rows of a table: lines closer together than others are one row if they fit as wrapped cells."""
    heights = [median(run.centre for run in line) for line in lines]
    steps = [two - one for one, two in pairwise(heights)]
    if not steps or max(steps) <= WRAPPED_STEP * min(steps):
        return lines
    starts = [0, *(number for number, step in enumerate(steps, 1) if step > WRAPPED_STEP * min(steps)), len(lines)]
    rows = []
    for start, end in pairwise(starts):
        fullest = max(lines[start:end], key=len)
        gutters = [(one.box[2], two.box[0]) for one, two in pairwise(fullest)]
        for line in lines[start:end]:
            gutters = [part for gutter in gutters for part in _clear(gutter, line, 0)]
        first = max(0, start - NEAR_LINES)
        columns = _split(lines[first : end + NEAR_LINES], gutters)
        inside = range(start - first, end - first)
        num_cells = [sum(bool(column[number]) for column in columns) for number in inside]
        if len(columns) != len(fullest) or num_cells.count(len(columns)) != 1:
            return lines  # cells that overlap those below, or several full rows
        edges = [*(high for _, high in gutters), math.inf]
        if not all(_is_wrapped(column, inside, edge) for column, edge in zip(columns, edges, strict=True)):
            return lines
        rows.append([run for column in columns for number in inside for run in column[number]])
    return rows


def _is_wrapped(column: list[list[Run]], inside: range, edge: float) -> bool:
    """Return whether each line of a row in a column begins with a word for which the line above has no room."""
    cells = [cell for cell in column if cell and cell[-1].box[2] <= edge]
    width = max((cell[-1].box[2] - cell[0].box[0] for cell in cells), default=0)
    for above, line in pairwise(filter(None, column[inside.start : inside.stop])):
        first = "".join(line[0].text).partition(" ")[0]
        boxes = [box for box in line[0].boxes[: len(first)] if box]
        if above[-1].box[2] - above[0].box[0] + boxes[-1][2] - boxes[0][0] + WORD_GAP * line[0].height <= width:
            return False
    return True


def _keep_widest(gutters: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return as many strips as columns of prose may have, so that a page of thousands takes linear time."""
    return sorted(sorted(gutters, key=lambda gutter: gutter[0] - gutter[1])[:MAX_GUTTERS])


def _clear(gutter: tuple[float, float], line: list[Run], width: float) -> Iterator[tuple[float, float]]:
    """Yield the parts of a strip that are wide enough beside the runs of a line."""
    low, high = gutter
    for run in line:
        if run.box[2] > low and run.box[0] < high:
            if run.box[0] - low >= width:
                yield low, run.box[0]
            low = max(low, run.box[2])
    if high - low >= width:
        yield low, high


def _split(lines: list[list[Run]], gutters: list[tuple[float, float]]) -> list[list[list[Run]]]:
    """Return the lines of each column between the gutters."""
    edges = [-math.inf, *(low for low, _ in gutters), math.inf]
    return [[[run for run in line if low <= run.box[0] < high] for line in lines] for low, high in pairwise(edges)]


def _is_prose(lines: list[list[Run]]) -> bool:
    """Return whether lines of a column go on in the next one, rather than in the column beside."""
    if len(lines) < MIN_PROSE_LINES:
        return False
    widths = [line[-1].box[2] - line[0].box[0] for line in lines]
    width = max(line[-1].box[2] for line in lines) - min(line[0].box[0] for line in lines)
    starts = [sign for line in lines if (sign := line[0].text[0]).isdigit() or sign.lower() != sign.upper()]
    is_continued = len(starts) < MIN_PROSE_LINES or (sum(map(str.islower, starts)) >= MIN_CONTINUED * len(starts))
    height = median(line[0].height for line in lines)
    return is_continued and median(widths) >= max(MIN_PROSE_FILL * width, MIN_PROSE_WIDTH * height)
