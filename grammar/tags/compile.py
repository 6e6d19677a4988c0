"""Compile a structural tag or tool calls: the grammars of the values, then all of it as one grammar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..backend import CompiledGrammar
from ..engines.llguidance_backend import Complaint, LLGuidanceBackend
from ..engines.llguidance_json import is_flexible, join_lark
from ..errors import InvalidGrammar, naming
from ..plan import PlanEntry
from ..spec import GrammarSpec
from .arguments import find_types
from .checked import CheckedVocabulary, add_values
from .counted_text import TextLimit
from .gbnf_rules import write_gbnf
from .lark_text import IDS, LarkText
from .leaves import LeafWriter, Route
from .structural_tag import list_children, list_leaves, name_place
from .tag_writer import TagWriter
from .tool_calls import ToolWriter

NAME = "structural_tag"
Json = dict[str, Any]


def compile_text(
    spec: GrammarSpec, backend: LLGuidanceBackend, route: Route, tables: CheckedVocabulary, max_seconds: float
) -> CompiledGrammar:
    """Compile a structural tag or tool calls, or raise GrammarError with a pointer.

    Each value's grammar is first written and not built, which costs little. Where llguidance refuses the whole,
    each value is built alone: that names the faulty one, or leaves to checks what llguidance cannot enforce.
    """
    for is_built in (False, True):
        make_leaves = partial(LeafWriter, tables=tables, route=route, is_built=is_built, max_seconds=max_seconds)
        text = (TagText if spec.kind == NAME else ToolWriter)(spec, backend, make_leaves)
        grammar = text.write()
        try:
            program = backend.compile_text(grammar, is_slow=text.has_rules, is_json=text.is_bounded)
        except Complaint as error:
            if isinstance(text, TagText):
                text.check_patterns()
            complaint = error
            continue
        make_plan = text.make_plan if isinstance(text, TagText) else text.leaves.make_plan
        return CompiledGrammar(spec.kind, make_plan, add_values(program, tables, text.leaves.values))
    raise InvalidGrammar(f"the {spec.kind} cannot be used: {complaint}")


@dataclass
class TagText:
    """A structural tag while it is compiled for llguidance."""

    spec: GrammarSpec
    backend: LLGuidanceBackend
    make_leaves: partial[LeafWriter]

    def __post_init__(self) -> None:
        self._format: Json = self.spec.document["format"]
        self._is_legacy: bool = self.spec.document["is_legacy"]
        self._parts = dict(list_leaves(self._format, "/format"))
        self.has_rules = any(part["type"] == "grammar" for part in self._parts.values())

    def _name_place(self, pointer: str, is_text: bool = True) -> str:
        """Return the place of a value in what the request wrote, or of its own text."""
        place, kind = name_place(pointer, self._is_legacy), self._parts[pointer]["type"]
        is_named = is_text and not self._is_legacy
        return f"{place}/{'pattern' if kind == 'regex' else kind}" if is_named else place

    def check_patterns(self) -> None:
        """Raise GrammarError for a regular expression that llguidance does not take."""
        for pointer, part in self._parts.items():
            if part["type"] == "regex":
                with naming(self._name_place(pointer)):
                    self.backend.compile(self.spec.make_leaf(self._name_place(pointer, False), part))

    @property
    def is_bounded(self) -> bool:
        """Whether long numbers may be ended: no pattern writes digits, and no check wants a number."""
        has_patterns = any(part["type"] in ("regex", "grammar") for part in self._parts.values())
        return not has_patterns and all(leaf.compiled.program.is_bounded for leaf in self.leaves.leaves.values())

    def make_plan(self) -> tuple[PlanEntry, ...]:
        """Return the plan: each format by its place, and what is in the values by whom it is enforced."""
        entries = [PlanEntry("/triggers", "triggers", NAME)] if self._is_legacy else []
        pending = [] if self._is_legacy else [("/format", self._format)]
        while pending:
            pointer, part = pending.pop()
            if part["type"] != "json_schema":
                entries.append(PlanEntry(pointer, part["type"], NAME))
            pending += reversed([*list_children(part, pointer)])
        return (*entries, *self.leaves.make_plan())

    def write(self) -> str:
        """Return the whole grammar in llguidance's format.

        Raises:
            UnsupportedGrammar: the text does not determine where a part ends.
        """
        specials = self.backend.vocabulary.special_tokens
        text = LarkText({name: specials[name] for name in sorted(specials, key=len)[::-1]}, IDS["{id}"])
        self.leaves = self.make_leaves(text)
        writer = TagWriter(text, self._write_value, self._limit_text, is_flexible(self.spec.whitespace))
        start = writer.write(self._format, "/format")
        return join_lark(text.write(start or '""'), self.leaves.list_grammars())

    def _write_value(self, part: Mapping[str, Any], pointer: str, lead: str) -> tuple[str, bool]:
        """Return the expression of a schema or grammar, and whether it may be a number."""
        place = self._name_place(pointer)
        if part["type"] == "grammar":
            name = f"g{[*self._parts].index(pointer)}"
            with naming(place):
                rules = (line.split(": ", 1) for line in write_gbnf(part["grammar"], name).split("\n"))
            self.leaves.text.rules.update((rule, body) for rule, body in rules)
            return f"{name}root", False
        spec = self.spec.make_leaf(self._name_place(pointer, False), part)
        with naming(place):
            leaf = self.leaves.compile(spec, place)
        return self.leaves.refer(leaf, lead), not find_types(part["json_schema"]).isdisjoint(("number", "integer"))

    def _limit_text(self, body: str, most: int, lead: str, ends: Sequence[str]) -> str:
        spellings = self.leaves.tables.spellings
        limit = TextLimit(tuple(each.encode() for each in ends), most, self.backend.vocabulary, spellings)
        return self.leaves.mark(f"({body})", lead, limit)
