"""The values of a grammar of tags or calls that have grammars of their own: each different schema is compiled once."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..backend import CompiledGrammar
from ..errors import InvalidGrammar
from ..match.checks import ResidualChecks
from ..plan import PlanEntry
from ..regex.text import quote
from ..spec import GrammarSpec
from .checked import CheckedValue, CheckedVocabulary
from .counted_text import TextLimit
from .lark_text import LarkText
from .text_value import TextCheck

MAX_LEAD = 24  # bytes
# Compiles a schema to a grammar of a name, which it builds or only writes.
Route = Callable[[GrammarSpec, str, bool], CompiledGrammar]


@dataclass(slots=True)
class Leaf:
    """A schema with a grammar of its own."""

    number: int
    compiled: CompiledGrammar
    pointers: dict[str, None]


@dataclass
class LeafWriter:
    """Writes references to the schemas of one grammar.

    Attributes:
        is_built: their grammars are built, which tells whether llguidance takes them; else they are only written.
        max_seconds: after which no further schema is begun.
        marks_values: values with checks may be replaced by a marker; not where one check is about several of them.
        values: the values with checks.
    """

    text: LarkText
    tables: CheckedVocabulary
    route: Route
    is_built: bool
    max_seconds: float
    marks_values: bool = True
    leaves: dict[GrammarSpec, Leaf] = field(default_factory=dict)
    values: list[CheckedValue] = field(default_factory=list)
    _marked: dict[tuple[int, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.max_seconds

    def compile(self, spec: GrammarSpec, place: str) -> Leaf:
        """Return the leaf of a schema."""
        leaf = self.leaves.get(spec)
        if leaf is None:
            if time.monotonic() > self._deadline:
                raise InvalidGrammar(f"the schemas take more than {self.max_seconds:g} s to compile")
            number = len(self.leaves)
            leaf = self.leaves[spec] = Leaf(number, self.route(spec, f"v{number}", self.is_built), {})
        leaf.pointers[place] = None
        return leaf

    def refer(self, leaf: Leaf, lead: str) -> str:
        """Return the expression of a leaf.

        Args:
            lead: the text right before it, "" where it may be another.
        """
        checks, key = leaf.compiled.program.checks, (leaf.number, lead)
        if checks is None or not self.marks_values:
            return f"@v{leaf.number}"
        if key not in self._marked:
            self._marked[key] = self.mark(f"@v{leaf.number}", lead, checks)
        return self._marked[key]

    def mark(self, expression: str, lead: str, checks: ResidualChecks | TextCheck | TextLimit) -> str:
        """Return the expression of a value with checks, which a marker may replace."""
        if not self.marks_values:
            return expression
        value = CheckedValue(len(self.values), lead.encode()[-MAX_LEAD:], checks)
        self.values.append(value)
        return f'({expression} | <[{self.tables.marker}]> {self.text.name(quote(f"{value.number};"))})'

    def list_grammars(self) -> list[str]:
        return [leaf.compiled.program.grammar for leaf in self.leaves.values()]

    def make_plan(self) -> tuple[PlanEntry, ...]:
        """Return who enforces what in each schema."""
        return tuple(
            entry._replace(pointer=pointer + entry.pointer)
            for leaf in self.leaves.values()
            for pointer in leaf.pointers
            for entry in leaf.compiled.plan
        )
