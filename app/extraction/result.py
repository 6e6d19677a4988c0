"""ExtractionResult: a record with its validity, confidence, evidence, checks and flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from app.extraction.bounds import BoundedSchema
from app.extraction.checks import Check
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf, scan
from engine import RequestOutput


@dataclass(frozen=True, slots=True)
class PartialExtraction:
    """The record while it is being written."""

    raw: str
    output: RequestOutput

    @property
    def record(self) -> Any:
        """The values so far; read from the text each time, so ask only when you show it."""
        return scan(self.raw).value


@dataclass(frozen=True, slots=True)
class ExtractionResult:
    """One finished extraction. `valid` holds only for a complete record that an independent validator accepts."""

    source: str
    record: Any
    raw: str
    valid: bool
    errors: tuple[str, ...]
    finish_reason: str
    confidence: dict[str, float]  # by JSON pointer; relative, see app.extraction.confidence
    evidence: dict[str, Evidence]  # by JSON pointer
    leaves: tuple[Leaf, ...]
    bounds: BoundedSchema
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    # reasons to check a value, by JSON pointer
    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    output: RequestOutput | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON-able dict, as the command line prints it."""
        return {
            "source": self.source,
            "record": self.record,
            "valid": self.valid,
            "finish_reason": self.finish_reason,
            "confidence": self.confidence,
            "evidence": {pointer: asdict(found) for pointer, found in self.evidence.items()},
            "flags": {pointer: list(reasons) for pointer, reasons in self.flags.items()},
            "checks": [check.to_json() for check in self.checks],
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"error": "; ".join(self.errors)} if self.record is None and self.errors else {}),
        }
