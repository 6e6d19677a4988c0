"""Measures extraction on documents whose correct records are known, all of them in one running batch.

field      mean score of all fields (scoring.py)        whole    records with every field right and no other
found      free strings that stand in the source text   valid    records that fit their schema
threshold  the least confidence from which on 95 % of the fields are right
deciles    the fields in ten equal groups by confidence, each with its mean confidence and accuracy
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import msgspec

from app.concurrency import gather_bounded, retry_while_full
from app.extraction.batch import MAX_CONCURRENT
from app.extraction.bounds import Limits, add_bounds
from app.extraction.calibration import Point
from app.extraction.cases import Case
from app.extraction.extractor import ExtractionResult, Extractor
from app.extraction.scoring import list_extra, list_wrong, score_record
from app.extraction.verbatim import is_free_at
from engine import EngineDead, EngineError
from grammar import GrammarError

NUM_GROUPS = 10
WANTED = 0.95  # share of right fields above the threshold


@dataclass(frozen=True, slots=True)
class Scored:
    """One case and what became of it; a case that failed has an error and no fields right."""

    case: Case
    scores: dict[str, float]  # by JSON pointer
    confidence: dict[str, float]  # by JSON pointer, where the model had a choice
    is_valid: bool
    num_strings: int  # free strings of the record, all and those found in the text
    num_found: int
    record: Any = None
    extra: tuple[str, ...] = ()  # JSON pointers of values that were not wanted
    wrong: frozenset[str] = frozenset()  # JSON pointers of single values
    flagged: frozenset[str] = frozenset()
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.extra and min(self.scores.values(), default=1.0) == 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one set, as they are printed in JSON; shares are rounded."""

    field: float
    by_field: dict[str, float]  # mean score by kind and JSON pointer
    fields: int
    whole: int
    valid: int
    cases: int
    failed: int  # cases that gave no record; their fields count as wrong
    first_error: str
    wrong_values: int  # single values
    flagged_values: int
    wrong_flagged: float  # share of the wrong values that are flagged
    flagged_wrong: float  # share of the flagged values that are wrong
    strings: int
    found: int
    threshold: float | None  # None where no confidence is enough
    deciles: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON-able dict."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


async def score_cases(extractor: Extractor, cases: Sequence[Case]) -> list[Scored]:
    """Extract every case and score it; as many run at once as the engine's batch takes.

    Raises EngineDead: the engine is gone.
    """

    async def score(case: Case) -> Scored:
        try:
            return score_result(case, await retry_while_full(lambda: extractor.extract(case.schema, case.text)))
        except EngineDead:
            raise
        except (EngineError, GrammarError) as error:
            return Scored(case, score_record(None, case.record), {}, False, 0, 0, error=str(error))

    return await gather_bounded(map(score, cases), MAX_CONCURRENT)


def score_result(case: Case, result: ExtractionResult) -> Scored:
    """Score one finished extraction."""
    scores = score_record(result.record, case.record)
    schema = add_bounds(case.schema, Limits()).schema
    free = [
        leaf.value
        for leaf in result.leaves
        if isinstance(leaf.value, str) and leaf.value and is_free_at(schema, leaf.pointer)
    ]
    source = _fold(case.text)
    return Scored(
        case=case, scores=scores, confidence=_field_confidence(scores, result.confidence),
        is_valid=result.valid, num_strings=len(free),
        num_found=sum(_fold(value) in source for value in free), record=result.record,
        extra=tuple(list_extra(result.record, case.record)),
        wrong=frozenset(list_wrong([leaf.path for leaf in result.leaves], result.record, case.record)),
        flagged=frozenset(result.flags),
    )


def summarize(scored: Sequence[Scored]) -> Figures:
    """The figures of a set with at least one case."""
    by_field: dict[str, list[float]] = defaultdict(list)
    for one in scored:
        for pointer, score in one.scores.items():
            by_field[one.case.kind + pointer].append(score)
    everything = [score for scores in by_field.values() for score in scores]
    sure = [(one.confidence[name], one.scores[name]) for one in scored for name in one.confidence]
    errors = [one.error for one in scored if one.error]
    num_wrong, num_flagged = sum(len(one.wrong) for one in scored), sum(len(one.flagged) for one in scored)
    num_both = sum(len(one.wrong & one.flagged) for one in scored)
    return Figures(
        field=_mean(everything), by_field={name: _mean(scores) for name, scores in by_field.items()},
        fields=len(everything), whole=sum(one.is_whole for one in scored),
        valid=sum(one.is_valid for one in scored), cases=len(scored), failed=len(errors),
        first_error=next(iter(errors), ""), wrong_values=num_wrong, flagged_values=num_flagged,
        wrong_flagged=round(num_both / max(1, num_wrong), 4),
        flagged_wrong=round(num_both / max(1, num_flagged), 4),
        strings=sum(one.num_strings for one in scored), found=sum(one.num_found for one in scored),
        threshold=find_threshold(sure), deciles=tuple(group_by_confidence(sure)),
    )


def find_threshold(pairs: Sequence[tuple[float, float]], wanted: float = WANTED) -> float | None:
    """Return the least confidence from which on the share `wanted` of (confidence, score) pairs is right."""
    found, total = None, 0.0
    ordered = _level_ties(pairs)[::-1]
    for count, (confidence, score) in enumerate(ordered, 1):
        total += score
        is_last = count == len(ordered) or ordered[count][0] < confidence
        if is_last and total >= wanted * count:
            found = confidence
    return found


def group_by_confidence(pairs: Sequence[tuple[float, float]], num_groups: int = NUM_GROUPS) -> list[Point]:
    """(confidence, score) pairs in groups of equal size, the least confident first; fewer when there are few pairs.

    Pairs of one confidence have no order: each counts with their mean score, whichever group it falls into.
    """
    ordered = _level_ties(pairs)
    edges = [round(index * len(ordered) / num_groups) for index in range(num_groups + 1)]
    return [
        Point(_mean([pair[0] for pair in part]), _mean([pair[1] for pair in part]), len(part))
        for part in (ordered[a:b] for a, b in pairwise(edges))
        if part
    ]


def _level_ties(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    leveled: list[tuple[float, float]] = []
    for confidence, ties in groupby(sorted(pairs), key=lambda pair: pair[0]):
        scores = [score for _, score in ties]
        leveled += [(confidence, _mean(scores))] * len(scores)
    return leveled


def _field_confidence(scores: dict[str, float], confidence: dict[str, float]) -> dict[str, float]:
    """Return the least confidence of the values in each field."""
    found: dict[str, float] = {}
    for name in scores:
        inside = [sure for pointer, sure in confidence.items() if pointer == name or pointer.startswith(f"{name}/")]
        if inside:
            found[name] = min(inside)
    return found


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
