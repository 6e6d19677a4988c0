"""GrammarCompiler: from specs to compiled grammars, cached and each compiled once at a time.

json_schema, json_object -> llguidance, with residual checks for what it does not enforce (json_route.py)
choice -> outlines_core where its automaton is small, else llguidance
regex, lark, csv, xml -> llguidance
ebnf -> llguidance; xgrammar if it is asked for
structural_tag -> llguidance, as one grammar (tags/compile.py)
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from .backend import MAX_GROWTH_BYTES, CompiledGrammar, Program
from .bitmask import allocate_bitmask
from .engines.by_name import OutlinesBackend, XGrammarBackend
from .engines.lark import take_schemas
from .engines.llguidance_backend import Complaint, LLGuidanceBackend, explain_refusal
from .engines.llguidance_json import join_lark
from .errors import GrammarError, InvalidGrammar, UnsupportedGrammar, bounding_depth, naming
from .json_route import compile_json_schema
from .limits import GrammarLimits
from .match.closing_tokens import ClosingTokens
from .match.reasoning import GatedMatcher, ReasoningTables
from .plan import PlanEntry
from .spec import GrammarSpec, Reasoning
from .tags.argument_writer import is_surely_enforced
from .tags.checked import CheckedVocabulary
from .tags.compile import compile_text
from .tags.tool_calls import make_tool_spec
from .tags.tool_styles import ToolStyle
from .vocabulary import Vocabulary

# Seconds for which a refusal is cached, and the number of cached refusals.
REFUSED_S = 30.0
MAX_NUM_REFUSALS = 64
MAX_NUM_GATES = 16
# The kind of grammar that these engines accept; the others accept all kinds.
TAKEN_KINDS = {"outlines_core": "choice", "xgrammar": "ebnf"}


class GrammarCompiler:
    """Compiles specs for one vocabulary. Synchronous; safe to call from several threads.

    Args:
        limits: bounds on single grammars and on the cache.
        native_pool: threads for llguidance's compiles of long grammars, without the GIL; None uses the caller's.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: GrammarLimits | None = None,
        native_pool: Executor | None = None,
    ) -> None:
        limits = limits or GrammarLimits()
        self.vocabulary = vocabulary
        llguidance = LLGuidanceBackend(vocabulary, limits, native_pool)
        self._checked = CheckedVocabulary(llguidance)
        self._max_tags_s = limits.max_tags_s
        self._llguidance = llguidance
        self._outlines = OutlinesBackend(vocabulary, limits)
        self._xgrammar = XGrammarBackend(vocabulary, limits)
        self._cache = GrammarCache(limits.cache_bytes, limits.max_num_programs)
        self._gates: dict[Reasoning, ReasoningTables] = {}
        self._lock = threading.Lock()
        # Spec -> its error, and when the cached error expires.
        self._refusals: OrderedDict[GrammarSpec, tuple[GrammarError, float]] = OrderedDict()
        self._in_flight: dict[GrammarSpec, Future[CompiledGrammar]] = {}

    @cached_property
    def _closing(self) -> ClosingTokens:
        """The tokens for residual checks: 100,000 tokens take a tenth of a second."""
        return ClosingTokens(self.vocabulary)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the compiled grammar, or raise GrammarError.

        A second call for a spec that is being compiled waits for the first. A refusal is cached for some seconds
        only, because the cause may have been a timeout.
        """
        with self._lock:
            cached = self._find(spec)
            if cached is not None:
                return cached
            pending = self._in_flight.get(spec)
            if pending is None:
                own: Future[CompiledGrammar] = Future()
                # A waiting caller cannot cancel it from now on.
                own.set_running_or_notify_cancel()
                self._in_flight[spec] = own
        if pending is not None:
            return pending.result()
        return self._compile_as_owner(spec, own)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return the compiled grammar if the cache holds it, or raise GrammarError if it was refused just now.

        Takes no longer than looking it up.
        """
        with self._lock:
            return self._find(spec)

    def find_pending(self, spec: GrammarSpec) -> "Future[CompiledGrammar] | None":
        """Return the future of a spec that another thread compiles now: waiting for it needs no thread."""
        with self._lock:
            return self._in_flight.get(spec)

    def count_cached(self) -> tuple[int, int]:
        """Return how many grammars are cached, and how many have been dropped."""
        return len(self._cache), self._cache.num_retired

    def _find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        refusal, end = self._refusals.get(spec, (None, 0.0))
        if refusal is not None and time.monotonic() < end:
            raise copy(refusal)
        return self._cache.find(spec)

    def _compile_new(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.reasoning is not None:
            return self._compile_gated(spec, spec.reasoning)
        if spec.kind in ("structural_tag", "tool_calls"):
            return compile_text(spec, self._llguidance, self._compile_leaf, self._checked, self._max_tags_s)
        if spec.kind == "lark" and "%json" in spec.text:
            return self._compile_with_schemas(spec)
        if spec.backend in TAKEN_KINDS and spec.kind != TAKEN_KINDS[spec.backend]:
            raise UnsupportedGrammar("", spec.kind, f"{spec.backend} takes only {TAKEN_KINDS[spec.backend]}")
        if spec.kind in ("json_schema", "json_object"):
            return compile_json_schema(spec, self._llguidance, lambda: self._closing)
        if spec.backend == "xgrammar":
            return compile_with(self._xgrammar, spec)
        if spec.kind == "choice" and spec.backend != "llguidance":
            try:
                return compile_with(self._outlines, spec)
            except UnsupportedGrammar:
                if spec.backend is not None:
                    raise
        return compile_with(self._llguidance, spec)

    def _compile_gated(self, spec: GrammarSpec, gate: Reasoning) -> CompiledGrammar:
        compiled = self.compile(replace(spec, reasoning=None))
        if gate not in self._gates:
            if len(self._gates) >= MAX_NUM_GATES:
                self._gates.clear()
            self._gates[gate] = ReasoningTables(self.vocabulary, gate)
        inner, tables = compiled.program, self._gates[gate]
        # The grammar itself is in the cache under its own spec.
        gated = Program(lambda: GatedMatcher(inner.new_matcher(), tables), tables.size_bytes, usage=inner.usage)
        return replace(compiled, program=gated)

    def _compile_leaf(self, spec: GrammarSpec, name: str, is_built: bool) -> CompiledGrammar:
        """Compile a JSON Schema in a structural tag, or only write its grammar."""
        if spec.backend not in (None, "llguidance"):
            raise UnsupportedGrammar("", spec.kind, "only llguidance compiles a part of a structural tag")
        return compile_json_schema(spec, self._llguidance, lambda: self._closing, name, is_built)

    def _compile_with_schemas(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a Lark grammar with schemas in it, which llguidance has to enforce alone."""
        lark, schemas = take_schemas(spec.text)
        grammars = []
        for number, schema in enumerate(schemas):
            with naming(f"%json {number}"):
                leaf = GrammarSpec.json_schema(schema, spec.whitespace)
                program = self._compile_leaf(leaf, f"j{number}", True).program
            if program.checks is not None:
                raise UnsupportedGrammar("", "%json", f"schema {number} has keywords that only a check enforces")
            grammars.append(program.grammar)
        entry = PlanEntry("", spec.kind, self._llguidance.name)
        try:
            program = self._llguidance.compile_text(join_lark(lark, grammars), is_slow=True)
        except Complaint as complaint:
            raise explain_refusal(spec, str(complaint)) from complaint
        return CompiledGrammar(self._llguidance.name, lambda: (entry,), program)

    def _compile_as_owner(self, spec: GrammarSpec, future: "Future[CompiledGrammar]") -> CompiledGrammar:
        try:
            with bounding_depth():
                compiled = self._compile_new(spec)
            if not compiled.program.grammar or compiled.program.checks:
                # llguidance itself refuses a grammar without a first token.
                check_first_mask(compiled, self.vocabulary)
        except BaseException as error:
            # The error is raised here and set on the future, for the other threads that wait for this compile.
            with self._lock:
                del self._in_flight[spec]
                if isinstance(error, GrammarError):
                    self._remember(spec, error)
            future.set_exception(error)
            raise
        with self._lock:
            del self._in_flight[spec]
            self._cache.add(spec, compiled)
        future.set_result(compiled)
        return compiled

    def _remember(self, spec: GrammarSpec, refusal: GrammarError) -> None:
        # A copy has no traceback, which would keep everything that the compile used.
        self._refusals[spec] = copy(refusal), time.monotonic() + REFUSED_S
        self._refusals.move_to_end(spec)
        while len(self._refusals) > MAX_NUM_REFUSALS:
            self._refusals.popitem(last=False)


def compile_with(backend: LLGuidanceBackend | OutlinesBackend | XGrammarBackend, spec: GrammarSpec) -> CompiledGrammar:
    entry = PlanEntry("", spec.kind, backend.name)
    return CompiledGrammar(backend.name, lambda: (entry,), backend.compile(spec))


def check_first_mask(compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Refuse a grammar that allows no first token; llguidance's grammars are refused when they are compiled."""
    bitmask = allocate_bitmask(1, vocabulary.size)
    matcher = compiled.matcher()
    matcher.fill_next_token_bitmask(bitmask)
    if matcher.error is not None:
        raise InvalidGrammar(f"the grammar allows no first token: {matcher.error}")
    if not bitmask.any():
        raise InvalidGrammar("the grammar allows no first token: nothing can satisfy it with this vocabulary")


class GrammarCache:
    """Compiled grammars, the least recently used dropped first. Not locked; its owner is."""

    def __init__(self, max_bytes: int, max_num_programs: int) -> None:
        self._max_bytes = max_bytes
        self._max_num_programs = max_num_programs
        # Spec -> its grammar, and the memory of both when it was new; the least recently used first. Iterating over an
        # OrderedDict would hash each spec.
        self._entries: dict[GrammarSpec, tuple[CompiledGrammar, int]] = {}
        self.num_retired = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return sum(size + compiled.program.usage.grown_bytes for compiled, size in self._entries.values())

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return the grammar and make it the most recently used; a program that has grown large is dropped."""
        entry = self._entries.pop(spec, None)
        if entry is None:
            return None
        if entry[0].program.usage.grown_bytes > MAX_GROWTH_BYTES:
            self.num_retired += 1
            return None
        self._entries[spec] = entry
        return entry[0]

    def add(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        """Keep a grammar, unless it alone is larger than the cache."""
        # The program, the spec's text, and the nodes for the plan.
        size = compiled.program.size_bytes + 20 * len(spec.text) + 2 * len(spec.source or "")
        if size + compiled.program.usage.grown_bytes > self._max_bytes:
            return
        self._entries[spec] = compiled, size
        num_bytes = self.num_bytes
        while num_bytes > self._max_bytes or len(self) > self._max_num_programs:
            oldest, size = self._entries.pop(next(iter(self._entries)))
            num_bytes -= size + oldest.program.usage.grown_bytes
            self.num_retired += 1


def find_tool_refusal(style: ToolStyle, schema: Mapping[str, Any]) -> UnsupportedGrammar | None:
    """Return why the schema of a tool cannot be enforced in a style, None if it can; no model's vocabulary is needed.

    Raises:
        InvalidGrammar: nothing satisfies it.
    """
    if is_surely_enforced(style, schema):
        return None
    try:
        _make_compiler().compile(make_tool_spec(style, [("f", schema)], is_forced=True))
    except UnsupportedGrammar as error:
        pointer = error.pointer.removeprefix("/tools/0/parameters")
        return UnsupportedGrammar(pointer, error.keyword, error.reason)
    return None


@lru_cache(1)
def _make_compiler() -> GrammarCompiler:
    """Return a compiler of texts that are written byte by byte."""
    return GrammarCompiler(Vocabulary([*(bytes((byte,)) for byte in range(256)), b"", b""], (256,)))
