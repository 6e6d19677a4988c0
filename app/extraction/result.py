"""ExtractionResult: a record with its validity, confidence, evidence, checks and flags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from app.extraction.bounds import BoundedSchema
from app.extraction.checks import Check
from app.extraction.flags import LOW_CONFIDENCE
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf, scan
from engine import RequestOutput


class Usage(NamedTuple):
    """Tokens of all requests that a record took."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> Usage:
        """Return the tokens of one finished request."""
        num_output = sum(len(each.token_ids) for each in output.outputs)
        return cls(len(output.prompt_token_ids), num_output, output.num_cached_tokens)

    @classmethod
    def sum(cls, parts: Iterable[Usage]) -> Usage:
        return cls(*map(sum, zip(*parts, strict=True)))


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
    sure_from: float | None = LOW_CONFIDENCE  # the confidence from which on values may pass unseen; None: not measured
    output: RequestOutput | None = None
    usage: Usage = field(default_factory=Usage)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON-able dict, as the command line prints it."""
        return {
            "source": self.source, "record": self.record, "valid": self.valid,
            "finish_reason": self.finish_reason, "confidence": self.confidence,
            "evidence": {pointer: asdict(found) for pointer, found in self.evidence.items()},
            "flags": {pointer: list(reasons) for pointer, reasons in self.flags.items()},
            "checks": [check.to_json() for check in self.checks],
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"error": "; ".join(self.errors)} if self.record is None and self.errors else {}),
        }
