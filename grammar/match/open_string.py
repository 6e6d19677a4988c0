"""Verdicts on the open string that a residual matcher keeps from mask to mask."""

from dataclasses import dataclass, field

from ..schema.places import Check


@dataclass(slots=True)
class KnownString:
    """Verdicts of earlier masks on the open string.

    Attributes:
        start: offset of its opening quote.
        near: the strings with a verdict of their own that it may still become, in JSON's spelling.
        length: bytes of its content so far.
        is_fine: the verdict on it if it becomes none of them; None while not known.
        verdicts: what follows its quote in a token -> whether that is allowed if it becomes none of them.
        violation: a check that was failed by a verdict.
    """

    start: int
    near: list[bytes]
    length: int = 0
    is_fine: bool | None = None
    verdicts: dict[bytes, bool] = field(default_factory=dict)
    violation: Check | None = None
