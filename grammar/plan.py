"""The plan of a grammar: who enforces which keyword."""

from typing import NamedTuple

# What stands in `enforced_by` when no engine has to do anything.
ANNOTATION = "annotation"
NO_EFFECT = "no effect"
# Checked at the token that completes a value (match/residual.py).
RESIDUAL = "residual"
# Quotations from a source text (schema/quotations.py).
GROUNDING = "grounding"


class PlanEntry(NamedTuple):
    """One keyword of a grammar, and the part of this package that enforces it.

    Attributes:
        pointer: JSON pointer to the schema that holds the keyword, "" for the root and for other kinds.
        keyword: the keyword, or the kind of the grammar.
        enforced_by: a backend's name, "residual" (checked where a value is completed), "grounding" (quotations from
            the source), "annotation" (asserts nothing) or "no effect" (cannot fail there).
    """

    pointer: str
    keyword: str
    enforced_by: str
