"""`python -m app extract --evaluate`: how well the model extracts, on documents whose correct records are known."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from app.cli.record_output import check_writable
from app.cli.talk import local_engine
from app.config import UsageError
from app.extraction import Extractor, Schema
from app.extraction.calibration import Calibration, MeasuredSet, write_calibration
from app.extraction.cases import Case, CaseError, read_cases
from app.extraction.evaluate import WANTED, Figures, Scored, score_cases, summarize

EXIT_SOME_FAILED = 1
MAX_FIELDS = 20  # printed ones


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """Flags of --evaluate."""

    evaluate: Annotated[bool,
        "measure the model on FILEs with lines {text, record}, with --schema or a schema in each "
        "line"] = False
    as_json: Annotated[bool, "print figures as JSON"] = False
    wrong: Annotated[bool, "print every field that is wrong"] = False
    calibration: Annotated[str | None,
        "write confidence and accuracy into this file; the page shows MODEL/calibration.json"] = None


def read_sets(files: Sequence[str], schema: Schema | None) -> dict[str, list[Case]]:
    try:
        return {Path(name).stem: read_cases(Path(name), schema) for name in files}
    except (OSError, CaseError) as error:
        raise UsageError(f"cannot evaluate: {error}") from error


async def evaluate(
    config: EvaluateConfig, sets: dict[str, list[Case]], options: dict[str, Any], given: dict[str, Any]
) -> int:
    """Print the figures of each set; 1 when a case gave no record.

    Raises UsageError: the file of the calibration cannot be written.
    """
    if config.calibration is not None:
        check_writable("--calibration", Path(config.calibration))
    report: dict[str, Figures] = {}
    async with local_engine(given) as engine:
        for name, cases in sets.items():
            begun = time.perf_counter()
            scored = await score_cases(Extractor(engine, **options), cases)
            figures = summarize(scored)
            report[name] = figures
            spent = time.perf_counter() - begun
            print(f"{name}: {len(cases)} documents in {spent:.1f} s", file=sys.stderr)
            if not config.as_json:
                print("\n".join([*describe_figures(name, figures), ""]), flush=True)
            if config.wrong:
                print("\n".join(describe_faults(scored)), file=sys.stderr)
            if config.calibration is not None:
                keep_calibration(Path(config.calibration), engine.model_name, report)
    if config.as_json:
        found = {name: figures.to_json() for name, figures in report.items()}
        print(json.dumps({"ground": options["ground"], "sets": found}, indent=1))
    return EXIT_SOME_FAILED if any(figures.failed for figures in report.values()) else 0


def keep_calibration(path: Path, model: str, report: dict[str, Figures]) -> None:
    """Write the sets that are done."""
    try:
        sets = {name: MeasuredSet(each.cases, each.deciles) for name, each in report.items()}
        write_calibration(path, Calibration(model, sets))
    except OSError as error:
        raise UsageError(f"cannot write --calibration {path}: {error.strerror}") from error


def describe_figures(name: str, figures: Figures) -> Iterator[str]:
    """A set's figures as lines of text."""
    yield f"{name}: {_show(figures.field, figures.fields)} of {figures.fields} fields"
    yield f"  whole records {figures.whole} of {figures.cases}, valid {figures.valid} of {figures.cases}"
    if figures.failed:
        yield f"  failed {figures.failed} of {figures.cases}, the first: {figures.first_error}"
    found = _show(figures.found / max(1, figures.strings), figures.strings)
    yield f"  strings found in the text {found} ({figures.found} of {figures.strings})"
    yield f"  wrong values flagged {_show(figures.wrong_flagged, figures.wrong_values)} of {figures.wrong_values}"
    yield f"  flagged values wrong {_show(figures.flagged_wrong, figures.flagged_values)} of {figures.flagged_values}"
    weakest = sorted(figures.by_field.items(), key=lambda pair: pair[1])
    yield from (f"  {name:<30} {score:.3f}" for name, score in weakest[:MAX_FIELDS])
    if len(weakest) > MAX_FIELDS:
        yield f"  and {len(weakest) - MAX_FIELDS} better fields; --as-json lists all"
    if figures.deciles:
        above = "no confidence is" if figures.threshold is None else f"a confidence of {figures.threshold:.3f} is"
        yield f"  {above} enough for {WANTED:.0%} right fields"
        yield "  confidence " + " ".join(f"{group.confidence:6.3f}" for group in figures.deciles)
        yield "  accuracy   " + " ".join(f"{group.accuracy:6.3f}" for group in figures.deciles)


def _show(share: float, count: int) -> str:
    """Return a share of `count` as text; "-" if `count` is 0."""
    return f"{share:.3f}" if count else "-"


def describe_faults(scored: Sequence[Scored]) -> Iterator[str]:
    """Return lines with the wrong fields, the record found and the one wanted."""
    for one in scored:
        wrong = [name for name, score in one.scores.items() if score < 1]
        if wrong or one.extra:
            shown = {"wrong": wrong, "extra": one.extra, "found": one.record, "wanted": one.case.record}
            yield f"{one.case.kind} {one.error} {json.dumps(shown, ensure_ascii=False)}"
