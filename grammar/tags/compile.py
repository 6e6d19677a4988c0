"""Compile a structural tag: its values by the routes they would take alone, then all of it as one grammar."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backend import CompiledGrammar
from ..engines.llguidance_backend import Complaint, LLGuidanceBackend
from ..engines.llguidance_json import is_flexible, join_lark
from ..errors import InvalidGrammar, UnsupportedGrammar, naming
from ..plan import PlanEntry
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .arguments import find_types
from .checked import CheckedValue, CheckedVocabulary, add_values
from .gbnf_rules import write_gbnf
from .graph import Step, TagGraph
from .lark import ANY_CHARACTER, Conflict, TagWriter, Value
from .structural_tag import list_children, list_leaves, name_place

NAME = "structural_tag"
# The characters that a JSON value of a type begins with, and those that may go on a complete one.
_FIRST = {"object": r"\{", "array": r"\[", "string": '"', "boolean": "tf", "null": "n"}
_NUMBER_FIRST, _NUMBER_MORE = r"\-0-9", r"[0-9.eE+\-]"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TagCompiler:
    """Compiles the structural tags of one vocabulary.

    Args:
        route: compiles a schema to a grammar of this name, which it builds or only writes.
        checked: what tags need that have values with residual checks.
        max_seconds: after which no further value is begun.
    """

    backend: LLGuidanceBackend
    route: Callable[[GrammarSpec, str, bool], CompiledGrammar]
    checked: CheckedVocabulary
    max_seconds: float

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a structural tag, or raise GrammarError with a pointer into it.

        Each value's grammar is first written and not built, which costs little. Where llguidance refuses the whole,
        each value is built alone: that names the faulty one, or leaves to checks what llguidance cannot enforce.
        """
        backend = self.backend
        text = TagText(spec, backend.vocabulary)
        try:
            return self._compile_values(text, is_built=False)
        except Complaint:
            text.check_patterns(backend)
        try:
            return self._compile_values(text, is_built=True)
        except Complaint as error:
            raise InvalidGrammar(f"the structural tag cannot be used: {error}") from error

    def _compile_values(self, text: "TagText", is_built: bool) -> CompiledGrammar:
        deadline = time.monotonic() + self.max_seconds
        for pointer in text.schemas:
            if time.monotonic() > deadline:
                reason = f"the values of the structural tag take more than {self.max_seconds:g} s to compile"
                raise InvalidGrammar(reason)
            text.compile_schema(pointer, lambda leaf, name: self.route(leaf, name, is_built))
        values = text.find_checks()
        written = text.write(self.backend, self.checked.marker if values else None)
        program = self.backend.compile_text(written, is_slow=text.has_rules, is_json=text.is_bounded)
        return CompiledGrammar(NAME, text.make_plan, add_values(program, self.checked, values))


class TagText:
    """A structural tag while it is compiled for llguidance.

    Attributes:
        schemas: the pointers of the different JSON Schemas in it.
        has_rules: it has a value in GBNF.
    """

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self._spec = spec
        self._format: Json = spec.document["format"]
        self._is_legacy: bool = spec.document["is_legacy"]
        self._parts = dict(list_leaves(self._format, "/format"))
        # A value that occurs several times is compiled at its first occurrence.
        firsts: dict[str, str] = {}
        self._first = {pointer: firsts.setdefault(json.dumps(part), pointer) for pointer, part in self._parts.items()}
        graph = TagGraph(self._format, vocabulary)
        self._graph = graph
        # Node of a value -> pointer of the value that is compiled for it.
        self._values = {
            i: self._first[node.value]
            for i, node in enumerate(graph.nodes)
            if isinstance(node, Step) and node.kind in ("json_schema", "grammar")
        }
        # Pointer of a value -> the first of its nodes.
        self._index = {pointer: index for index, pointer in reversed(self._values.items())}
        self._compiled: dict[str, CompiledGrammar] = {}
        self.schemas = [each for each in firsts.values() if self._parts[each]["type"] == "json_schema"]
        self.has_rules = any(part["type"] == "grammar" for part in self._parts.values())

    def _name_place(self, pointer: str, is_text: bool = True) -> str:
        """Return the place of a value in what the request wrote, or of its own text."""
        place, kind = name_place(pointer, self._is_legacy), self._parts[pointer]["type"]
        is_named = is_text and not self._is_legacy
        return f"{place}/{'pattern' if kind == 'regex' else kind}" if is_named else place

    def compile_schema(self, pointer: str, route: Callable[[GrammarSpec, str], CompiledGrammar]) -> None:
        """Compile a JSON Schema; errors name its place."""
        leaf = self._spec.make_leaf(self._name_place(pointer, False), self._parts[pointer])
        with naming(self._name_place(pointer)):
            self._compiled[pointer] = route(leaf, f"v{self._index.get(pointer)}")

    def check_patterns(self, backend: LLGuidanceBackend) -> None:
        """Raise GrammarError for a regular expression that llguidance does not take."""
        for pointer, part in self._parts.items():
            if part["type"] == "regex":
                with naming(self._name_place(pointer)):
                    backend.compile(self._spec.make_leaf(self._name_place(pointer, False), part))

    def find_checks(self) -> list[CheckedValue]:
        """Return the values with residual checks, each numbered by the first of its nodes."""
        found = []
        for pointer in self.schemas:
            program = self._compiled[pointer].program
            if program.checks is not None and pointer in self._index:
                number = self._index[pointer]
                nodes = [node for node, value in self._values.items() if value == pointer]
                leads = {self._graph.find_lead(node) for node in nodes}
                found += [CheckedValue(number, lead.encode(), program.checks, program.size_bytes) for lead in leads]
        return found

    @property
    def is_bounded(self) -> bool:
        """Whether long numbers may be ended: no pattern writes digits, and no check wants a number."""
        has_patterns = any(part["type"] in ("regex", "grammar") for part in self._parts.values())
        return not has_patterns and all(each.program.is_bounded for each in self._compiled.values())

    def make_plan(self) -> tuple[PlanEntry, ...]:
        """Return the plan: each format by its place, and what is in the values by whom it is enforced."""
        entries = [PlanEntry("/triggers", "triggers", NAME)] if self._is_legacy else []
        pending = [("/format", self._format)]
        while pending:
            pointer, part = pending.pop()
            if part["type"] == "json_schema":
                inside, plan = self._name_place(pointer), self._compiled[self._first[pointer]].plan
                entries.extend(each._replace(pointer=inside + each.pointer) for each in plan)
            elif not self._is_legacy:
                entries.append(PlanEntry(pointer, part["type"], NAME))
            pending += reversed([*list_children(part, pointer)])
        return tuple(entries)

    def write(self, backend: LLGuidanceBackend, marker: int | None = None) -> str:
        """Return the whole grammar in llguidance's format.

        Args:
            marker: a token that replaces each value with checks, so that the matcher can find where it begins.

        Raises:
            UnsupportedGrammar: the text does not determine where a part begins or ends.
        """
        values: dict[str, Value] = {}
        grammars: list[str] = []
        rules: list[str] = []
        for pointer, index in self._index.items():
            part = self._parts[pointer]
            if part["type"] == "grammar":
                values[pointer] = Value(f"g{index}root", ANY_CHARACTER, "")
                with naming(self._name_place(pointer)):
                    rules.append(write_gbnf(part["grammar"], f"g{index}"))
            else:
                program = self._compiled[pointer].program
                values[pointer] = self._describe(index, part, program.checks is not None, marker)
                grammars.append(program.grammar)
        by_node = {index: values[pointer] for index, pointer in self._values.items()}
        return join_lark("\n".join([self._write_rules(backend, by_node), *rules]), grammars)

    def _describe(self, index: int, part: Json, is_checked: bool, marker: int | None) -> Value:
        types = find_types(part["json_schema"])
        first = "".join(_FIRST.get(each, _NUMBER_FIRST) for each in sorted(types))
        more = _NUMBER_MORE if types & {"number", "integer"} else ""
        call = f'(@v{index} | <[{marker}]> "{index};")' if is_checked else f"@v{index}"
        return Value(call, f"[{first}]", more, is_checked, is_spaced=is_flexible(self._spec.whitespace))

    def _write_rules(self, backend: LLGuidanceBackend, values: Mapping[int, Value]) -> str:
        for has_fast_text in (True, False):
            try:
                return TagWriter(self._graph, values, backend.is_empty, has_fast_text).write()
            except Conflict as error:
                conflict = error
        pointer = self._values[conflict.node]
        place, kind = self._name_place(pointer, False), self._parts[pointer]["type"]
        raise UnsupportedGrammar(place, kind, conflict.reason)

