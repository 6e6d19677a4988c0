"""Compiles a JSON Schema: llguidance enforces the keywords that it enforces exactly, residual checks the rest.

read ──▶ gaps (exactness table) ──▶ weaken ──▶ write ──▶ llguidance ──▶ checks for what was left out
                                       ▲                    │ refuses a keyword that a check can enforce
                                       └────────────────────┘
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .backend import CompiledGrammar, Matcher, Program
from .engines.llguidance_backend import Complaint, LLGuidanceBackend
from .engines.llguidance_json import make_json_grammar
from .errors import InvalidGrammar, UnsupportedGrammar
from .match.checks import ResidualChecks
from .match.closing_tokens import ClosingTokens
from .match.residual import ResidualMatcher
from .plan import GROUNDING, RESIDUAL, PlanEntry
from .regex.text import may_backtrack
from .schema.emit import Emitter, Json, adapt_for_llguidance
from .schema.exactness import Gap, Surroundings, find_gaps
from .schema.node import Node, iterate_children, iterate_nodes
from .schema.places import PlaceMap
from .schema.plain import Plain, check_plain, write_strings
from .schema.property_order import is_large
from .schema.quotations import Source
from .schema.reader import read_schema
from .schema.refusal import MAX_NUM_PROBES, SIGN, Refusal, as_object, locate
from .schema.rule_writer import RuleWriter
from .schema.rules import GROUNDED
from .schema.weaken import Weakening
from .spec import GrammarSpec, dump_json
from .validator import MAX_BACKTRACKS, SchemaValidator, find_slow_text

MAX_NUM_REFUSALS = 16  # each costs a compile and up to 200 probes
_CONDITION = "it would apply only under a condition; it can stand below properties, items, allOf, anyOf and $ref"
# Those of checks that may concern the value of a number.
_NUMERIC = frozenset(
    [
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum"),
        *("not", "oneOf", "if"),
    ]
)
# llguidance refuses these in some positions only. After one refusal every use is left to the checks.
OFTEN_REFUSED = frozenset(["oneOf", "minProperties", "maxProperties"])


def compile_json_schema(
    spec: GrammarSpec, backend: LLGuidanceBackend, find_tokens: Callable[[], ClosingTokens], name: str = "",
    is_built: bool = True,
) -> CompiledGrammar:
    """Compile a JSON Schema, or raise GrammarError.

    Args:
        find_tokens: returns the tokens that residual checks look at.
        name: of the grammar, as a part of another one.
        is_built: build the grammar; without, it is only written.
    """
    if spec.property_order == "schema" and spec.source is None and isinstance(spec.document, dict):
        plain = check_plain(spec.document)
        program = None if plain is None else compile_plain(spec, backend, plain, name, is_built)
        if program is not None:
            return CompiledGrammar(backend.name, lambda: plan_plain(spec, backend.name), program)
    root = read_schema(spec.document, spec.text)
    if root is False:
        raise InvalidGrammar("no text satisfies the schema: it is false")
    node = root if isinstance(root, Node) else Node("", {})
    around = Surroundings(tuple(iterate_nodes([node])))
    gaps: list[Gap] = []
    for each in around.nodes:
        gaps += find_gaps(each, around)
    source = None
    if spec.source is not None and any(GROUNDED in each.keywords for each in around.nodes):
        source = Source(spec.source)
        gaps = [gap for gap in gaps if gap.keyword != GROUNDED]
    for gap in gaps:
        if gap.verdict == "refused":
            raise UnsupportedGrammar(gap.node.pointer, gap.node.written_name(gap.keyword), gap.reason)
    weakening = Weakening(gaps, around)
    compiler = SchemaCompiler(spec, node, weakening, around, backend, source, name, is_built)
    program = compiler.compile()
    if source is not None:
        refuse_conditions(weakening.dropped)
    if weakening.dropped:
        program = add_checks(program, spec.document, PlaceMap(node, weakening.dropped), find_tokens())
    return CompiledGrammar(backend.name, lambda: make_plan(around.nodes, weakening, backend.name), program)


def compile_plain(
    spec: GrammarSpec, backend: LLGuidanceBackend, plain: Plain, name: str, is_built: bool
) -> Program | None:
    """Return the program of a plain schema, None if llguidance does not take it."""
    text = dump_json(write_strings(spec.document), spec.kind) if plain.has_strings else spec.text
    grammar = make_json_grammar(f"start: @{name}v0", [text], spec.whitespace, plain.is_open, name)
    if not is_built:
        return Program(refuse_matcher, len(grammar), grammar)
    try:
        return backend.compile_text(grammar, is_json=True)
    except Complaint:
        return None


def plan_plain(spec: GrammarSpec, engine: str) -> tuple[PlanEntry, ...]:
    root = read_schema(spec.document, spec.text)
    nodes = tuple(iterate_nodes([root if isinstance(root, Node) else Node("", {})]))
    return make_plan(nodes, Weakening([], Surroundings(nodes)), engine)


@dataclass(slots=True)
class SchemaCompiler:
    """Compiles one schema, weakening it until llguidance takes it.

    Attributes:
        impossible: nodes that nothing satisfies. llguidance refuses a whole schema for a reference to one, even where
            it may stay away.
    """

    spec: GrammarSpec
    root: Node
    weakening: Weakening
    around: Surroundings
    backend: LLGuidanceBackend
    source: Source | None
    name: str
    is_built: bool
    impossible: frozenset[Node] = frozenset()

    def compile(self) -> Program:
        """Return the program of the weakened schema.

        Raises:
            InvalidGrammar: nothing satisfies the schema.
            UnsupportedGrammar: a keyword can be neither enforced nor checked.
        """
        for number in range(MAX_NUM_REFUSALS + 1):
            program = guided = self._try(is_guided=True)
            if isinstance(guided, str) and self.weakening.dropped:
                # A guide may exceed the engine's limits although the schema without it does not.
                program = self._try(is_guided=False)
                if is_contradiction(guided) and not is_contradiction(program):
                    raise self._explain_contradiction(guided)
            if not isinstance(program, str):
                return program
            refusal = locate(self.root, self._make_emitter, self._probe, program)
            if number == MAX_NUM_REFUSALS or not self._leave_out(refusal):
                raise make_error(refusal)
        raise AssertionError("the last refusal is raised")

    def _find_impossible(self) -> bool:
        """Find more nodes that nothing satisfies among those referred to; False for none."""
        emitter = self._make_emitter()
        emitter.write(self.root)
        referred = [node for node in emitter.list_referred() if node not in self.impossible]
        texts = {node: as_object(emitter.copy_write(node)) for node in referred[:MAX_NUM_PROBES]}
        refused = {node for node, written in texts.items() if self._probe(written).startswith(SIGN)}
        # A node that refers to a refused node may be refused for that reason only.
        found = {node for node in refused if refused.isdisjoint({*iterate_nodes([node])} - {node})}
        self.impossible |= found
        return bool(found)

    def _try(self, is_guided: bool) -> Program | str:
        """Return the program of the schema as it is weakened now, or the complaint."""
        self.weakening.is_guided = is_guided
        is_needed = self.source is not None or any(map(is_large, self.around.nodes))
        is_in_rules = is_needed or self.spec.property_order == "any"
        lark, impossible = f"start: @{self.name}v0", frozenset[str]()
        while True:
            if is_in_rules:
                lark, values = self._write_rules(impossible)
            else:
                values = [self._write_schema()]
            if not lark:
                return self._probe(self._write_schema()) or f"{SIGN}: nothing is left"
            program = self._compile_grammar(lark, values)
            if not is_contradiction(program):
                return program
            if self._find_impossible():
                continue
            # With ordered properties llguidance omits optional values that nothing satisfies.
            rules = values if is_in_rules else []
            found = {json.dumps(value) for value in rules if self._probe(value).startswith(SIGN)}
            if found <= impossible:
                return program
            impossible |= found

    def _write_schema(self) -> Json:
        return as_object(self._make_emitter().write(self.root))

    def _write_rules(self, impossible: frozenset[str]) -> tuple[str, list[Json]]:
        while True:
            writer = RuleWriter(
                self.weakening, self._make_emitter(), self.spec.whitespace, self.spec.property_order == "any",
                self.source, self.name, impossible,
            )
            try:
                return writer.write(self.root), writer.values
            except Refusal as refusal:
                if refusal.node is None or not self.weakening.drop_inexpressible(refusal.node, refusal.keyword):
                    raise make_error(refusal) from refusal

    def _compile_grammar(self, lark: str, values: list[Json]) -> Program | str:
        grammar = self._make_grammar(lark, values)
        # A check may require a longer number.
        is_bounded = self._list_dropped().isdisjoint(_NUMERIC)
        if not self.is_built:
            return Program(refuse_matcher, len(grammar), grammar, is_bounded=is_bounded)
        try:
            num_quotable = self.source.num_characters if self.source is not None else 0
            return self.backend.compile_text(grammar, num_quotable, is_json=is_bounded)
        except Complaint as complaint:
            return str(complaint)

    def _make_emitter(self) -> Emitter:
        self.weakening.start()
        return Emitter(self.weakening.read, adapt_for_llguidance, self.impossible)

    def _make_grammar(self, lark: str, values: list[Json]) -> str:
        is_open = self.around.has_open_names or "patternProperties" in self._list_dropped()
        texts = [dump_json(value, self.spec.kind) for value in values]
        return make_json_grammar(lark, texts, self.spec.whitespace, is_open, self.name)

    def _probe(self, written: Json) -> str:
        return self.backend.find_complaint(self._make_grammar("", [written]))

    def _list_dropped(self) -> set[str]:
        return {keyword for keywords in self.weakening.dropped.values() for keyword in keywords}

    def _leave_out(self, refusal: Refusal) -> bool:
        """Leave a refused keyword to the checks; False if no check can enforce it."""
        if refusal.is_contradiction or refusal.node is None:
            return False
        nodes = self.around.nodes if refusal.keyword in OFTEN_REFUSED else (refusal.node,)
        found = [self.weakening.drop_refused(node, refusal.keyword, refusal.reason) for node in nodes]
        return any(found)

    def _explain_contradiction(self, message: str) -> InvalidGrammar:
        places = [
            f"{', '.join(map(repr, dict.fromkeys(map(node.written_name, keywords))))} at {node.pointer or '#'}"
            for node, keywords in self.weakening.dropped.items()
        ]
        pointer = next(iter(self.weakening.dropped)).pointer if len(places) == 1 else None
        reason = message.rpartition(": ")[2]
        return InvalidGrammar(
            f"no value satisfies the schema together with {'; '.join(places[:8])}: {reason}", pointer
        )


def refuse_matcher() -> Matcher:
    raise NotImplementedError("a grammar that was only written has no matchers")


def refuse_conditions(dropped: Mapping[Node, Iterable[str]]) -> None:
    """Refuse grounded strings below a keyword that is checked: the checks know nothing of the source."""
    for node, keywords in dropped.items():
        children = [child for path, child in iterate_children(node) if path[0] in keywords and path[0] != "oneOf"]
        for each in iterate_nodes([*children, node.get("$ref", True) if "$ref" in keywords else True]):
            if GROUNDED in each.keywords:
                raise UnsupportedGrammar(each.pointer, GROUNDED, _CONDITION)


def is_contradiction(program: Program | str) -> bool:
    return isinstance(program, str) and program.startswith(SIGN)


def make_error(refusal: Refusal) -> InvalidGrammar | UnsupportedGrammar:
    node, keyword = refusal.node, refusal.keyword
    pointer = node.pointer if node is not None else ""
    name = node.written_name(keyword) if node is not None else keyword
    if not refusal.is_contradiction:
        return UnsupportedGrammar(pointer, name, refusal.reason)
    where = f"{name!r} at {pointer or '#'}: " if node is not None else ""
    return InvalidGrammar(
        f"no text satisfies the schema: {where}{refusal.reason}", pointer if node is not None else None
    )


def make_plan(nodes: Iterable[Node], weakening: Weakening, engine: str) -> tuple[PlanEntry, ...]:
    """Return who enforces what: what stands only below a keyword that was left out is left to the checks too."""
    first, *_ = nodes = tuple(nodes)
    known, pending = {first}, [first]
    while pending:
        node = pending.pop()
        dropped = weakening.dropped.get(node, ())
        # Below `oneOf` the branches are still the engine's.
        kept = [child for path, child in iterate_children(node) if path[0] == "oneOf" or path[0] not in dropped]
        found = {each for each in (*kept, node.get("$ref")) if isinstance(each, Node)} - known
        known |= found
        pending.extend(found)
    entries = {}
    for node in nodes:
        entries.update(dict.fromkeys(node.notes))
        for keyword in node.keywords:
            is_checked = node not in known or keyword in weakening.dropped.get(node, ())
            who = GROUNDING if keyword == GROUNDED else RESIDUAL if is_checked else engine
            entry = PlanEntry(node.pointer, node.written_name(keyword), who)
            entries[entry] = None
    return tuple(entries)


def add_checks(program: Program, document: Any, places: PlaceMap, tokens: ClosingTokens) -> Program:
    """Return a program with residual checks.

    Raises:
        UnsupportedGrammar: the validator does not read a pattern, or it takes exponential time.
    """
    try:
        checks = ResidualChecks(document, places, tokens)
    except InvalidGrammar:
        refuse_patterns(places.root.nodes, explain_unreadable)
        raise
    if checks.may_backtrack:
        refuse_patterns(places.root.nodes, explain_slowness)
    # The engine's grammar, the document and one validator for each checked place.
    size = program.size_bytes + 32 * len(json.dumps(document))
    make_inner, grammar = program.new_matcher, program.grammar
    return Program(
        lambda: ResidualMatcher(make_inner(), checks), size, grammar, checks, program.usage, program.is_bounded
    )


def refuse_patterns(roots: Iterable[Node], explain: Callable[[str], str | None]) -> None:
    """Raise UnsupportedGrammar for the first pattern against which something speaks."""
    for node in iterate_nodes(roots):
        patterns = dict.fromkeys(node.get("patternProperties", ()), "patternProperties")
        if "pattern" in node.keywords:
            patterns[node.keywords["pattern"]] = "pattern"
        for pattern, keyword in patterns.items():
            if (reason := explain(pattern)) is not None:
                raise UnsupportedGrammar(node.pointer, node.written_name(keyword), reason)


def explain_slowness(pattern: str) -> str | None:
    """Return the reason against a pattern that takes exponential time over a short text."""
    text = find_slow_text(pattern) if may_backtrack(pattern) else None
    return None if text is None else f"it backtracks more than {MAX_BACKTRACKS} steps over {text!r}"


def explain_unreadable(pattern: str) -> str | None:
    """Return the reason against a pattern that no validator reads, but Python's reader of patterns does."""
    try:
        re.compile(re.sub(r"\\k<(\w+)>", r"(?P=\1)", re.sub(r"\(\?<(?=[^\W\d])", "(?P<", pattern)))
        SchemaValidator({"pattern": pattern})
    except InvalidGrammar:
        return "neither the engines nor the checks read all of it"
    except (re.error, RecursionError, OverflowError):
        pass
    return None
