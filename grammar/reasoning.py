"""What a request says about reasoning before its answer."""

from dataclasses import dataclass

from .errors import InvalidGrammar


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How reasoning stands before what a grammar describes.

    Attributes:
        start: what begins it; None where the prompt has begun it.
        end: what ends it.
        allows_breaks: up to two line feeds may stand between it and the grammar's text.
    """

    start: str | None
    end: str
    allows_breaks: bool

    def __post_init__(self) -> None:
        if self.start == "" or not self.end:
            raise InvalidGrammar(
                f"the marks of reasoning are not empty: start={self.start!r}, end={self.end!r}"
            )
