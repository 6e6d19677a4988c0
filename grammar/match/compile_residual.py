"""Compile a schema that no engine enforces as a whole: a loosened grammar and the checks that close the gap."""

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema_rs

from ..backend import Backend, CompiledGrammar, Program
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..plan import RESIDUAL, PlanEntry
from ..regex.linear_pattern import may_backtrack
from ..schema.keywords import join_pointer
from ..schema.multiples import is_reachable
from ..schema.normalise import Normalised
from ..schema.places import SiteMap
from ..schema.refusal import iterate_inside_out
from ..schema.weaken import NOT_CHECKED, Loosening, find_written
from ..spec import GrammarSpec
from ..validator import MAX_BACKTRACKS, find_slow_text
from .closing_tokens import ClosingTokens
from .residual import ResidualProgram

# Each refusal costs a compile and up to 200 probes.
MAX_NUM_REFUSALS = 16
# So after these, all of a keyword is left to the checks that an engine often takes, but not where it stands here.
MAX_NUM_SINGLE = 4
OFTEN_REFUSED = frozenset(["oneOf", "minProperties", "maxProperties"])
# Beyond, guides would be more work than the schema.
MAX_NUM_GUIDED = 256


def compile_residual(
    backend: Backend, spec: GrammarSpec, document: Any, normalised: Normalised, tokens: ClosingTokens
) -> CompiledGrammar:
    """Compile what the backend takes of a normalised schema and check the rest; or raise UnsupportedGrammar.

    Args:
        spec: the normalised schema.
        document: the schema as the user wrote it.
    """
    for problem in normalised.problems:
        if problem.keyword in NOT_CHECKED:
            raise UnsupportedGrammar(problem.pointer, problem.keyword, problem.reason)
    is_guided = len(normalised.problems) <= MAX_NUM_GUIDED
    try:
        loosening, program = compile_loosened(backend, spec, is_guided)
        for place, keyword in loosening.dropped:
            if place not in normalised.places:
                raise UnsupportedGrammar(place, keyword, "it stands in a guide")
    except UnsupportedGrammar:
        # A guide can be more than the engine takes where the schema without it is not.
        loosening, program = compile_plainly(backend, spec, normalised)
    except InvalidGrammar as error:
        # What contradicts itself is named in the user's schema, not in a guide.
        loosening, _ = compile_loosened(backend, spec, is_guided=False)
        raise explain_contradiction(find_residual(normalised, loosening), str(error)) from error
    residual = find_residual(normalised, loosening)
    # With identifiers inside, pointers do not tell what applies where: only the whole document is checked then.
    sites = SiteMap({} if normalised.has_ids else document, residual, normalised.drops_ref_siblings)
    plan = make_plan(normalised, residual, backend.name)
    return CompiledGrammar(backend.name, plan, make_program(program, document, sites, tokens))


def compile_plainly(backend: Backend, spec: GrammarSpec, normalised: Normalised) -> tuple[Loosening, Program]:
    """Compile without guides; what is refused then is named as the user wrote it."""
    try:
        return compile_loosened(backend, spec, is_guided=False)
    except UnsupportedGrammar as refusal:
        place, keyword = find_written(json.loads(spec.text), refusal.pointer, refusal.keyword)
        pointer, origin = normalised.places.get(place, (place, {}))
        raise UnsupportedGrammar(pointer, origin.get(keyword, keyword), refusal.reason) from refusal


def compile_loosened(backend: Backend, spec: GrammarSpec, is_guided: bool) -> tuple[Loosening, Program]:
    """Compile, dropping what the backend refuses as long as it can be checked instead."""
    loosening = Loosening(json.loads(spec.text), is_guided=is_guided)
    loosening.drop_problems()
    num_refused = 0
    while True:
        loosened = replace(spec, text=json.dumps(loosening.schema, ensure_ascii=False))
        try:
            return loosening, backend.compile(loosened)
        except UnsupportedGrammar as refusal:
            if num_refused == MAX_NUM_REFUSALS or not drop_refused(loosening, refusal):
                raise
            if num_refused >= MAX_NUM_SINGLE and refusal.keyword in OFTEN_REFUSED:
                drop_everywhere(loosening, refusal)
        num_refused += 1


def drop_refused(loosening: Loosening, refusal: UnsupportedGrammar) -> bool:
    """Drop a keyword that an engine refused; False where a check cannot take its place."""
    if refusal.keyword == "multipleOf" and not is_reachable(loosening.schema, refusal.pointer):
        return False
    return loosening.drop_refused(refusal.pointer, refusal.keyword, refusal.reason)


def drop_everywhere(loosening: Loosening, refusal: UnsupportedGrammar) -> None:
    """Drop a keyword in all schemas, the inner ones first, so that what is dropped moves no pointer."""
    places = [pointer for pointer, each in iterate_inside_out(loosening.schema) if refusal.keyword in each]
    for pointer in places:
        loosening.drop_refused(pointer, refusal.keyword, refusal.reason)


def make_program(program: Program, document: Any, sites: SiteMap, tokens: ClosingTokens) -> ResidualProgram:
    """Return a program with its checks.

    Raises:
        UnsupportedGrammar: the validator does not read a pattern, or it takes exponential time.
    """
    try:
        residual = ResidualProgram(program, document, sites, tokens)
    except InvalidGrammar as error:
        cause = error.__cause__
        if not isinstance(cause, jsonschema_rs.ValidationError) or not is_pattern(cause.instance):
            raise
        path = [str(step) for step in cause.instance_path]
        # Among the names of patternProperties it is the last step itself.
        *above, keyword = path[:-1] if path[-2:-1] == ["patternProperties"] else path
        if keyword not in ("pattern", "patternProperties"):
            raise
        reason = "neither the engines nor the checks read all of it"
        raise UnsupportedGrammar(join_pointer("", *above), keyword, reason) from error
    if residual.checks.may_backtrack:
        refuse_slow_patterns(document)
    return residual


def refuse_slow_patterns(document: Any) -> None:
    """Raise UnsupportedGrammar for a pattern that takes exponential time over a short text."""
    for pointer, schema in iterate_inside_out(document):
        patterns = dict.fromkeys(schema.get("patternProperties", ()), "patternProperties")
        if "pattern" in schema:
            patterns[schema["pattern"]] = "pattern"
        for pattern, keyword in patterns.items():
            if may_backtrack(pattern) and (text := find_slow_text(pattern)) is not None:
                reason = f"it backtracks more than {MAX_BACKTRACKS} steps over {text!r}"
                raise UnsupportedGrammar(pointer, keyword, reason)


def is_pattern(value: Any) -> bool:
    """Tell whether a text is well formed as a pattern of JSON Schema, as far as Python's reader tells."""
    if not isinstance(value, str):
        return False
    try:
        re.compile(re.sub(r"\\k<(\w+)>", r"(?P=\1)", re.sub(r"\(\?<(?=[^\W\d])", "(?P<", value)))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def explain_contradiction(residual: dict[str, tuple[str, ...]], message: str) -> InvalidGrammar:
    """Return the error for a schema that nothing satisfies, as the guides of its residual keywords show."""
    places = [
        f"{', '.join(map(repr, keywords))} at {pointer or '#'}" for pointer, keywords in residual.items()
    ]
    pointer = next(iter(residual)) if len(residual) == 1 else None
    told, reason = "; ".join(places[:8]), message.rpartition(": ")[2]
    return InvalidGrammar(f"no text satisfies the schema: nothing is left by {told}: {reason}", pointer)


def find_residual(normalised: Normalised, loosening: Loosening) -> dict[str, tuple[str, ...]]:
    """Return user's pointer -> user's keywords that are left to the checks."""
    found: dict[str, dict[str, None]] = {}
    for place, keyword in loosening.dropped:
        pointer, origin = normalised.places.get(place, (place, {}))
        found.setdefault(pointer, {})[origin.get(keyword, keyword)] = None
    for problem in normalised.problems:
        found.setdefault(problem.pointer, {})[problem.keyword] = None
    return {pointer: tuple(keywords) for pointer, keywords in found.items()}


def make_plan(
    normalised: Normalised, residual: dict[str, tuple[str, ...]], engine: str
) -> tuple[PlanEntry, ...]:
    """Return the plan: what is dropped, and what stands below it, is left to the checks."""
    pairs = {(pointer, keyword) for pointer, keywords in residual.items() for keyword in keywords}
    # Below `oneOf` the branches are still the engine's.
    roots = tuple(join_pointer(p, keyword) + "/" for p, keyword in pairs if keyword != "oneOf")
    plan = []
    for entry in normalised.plan:
        pair = entry.pointer, entry.keyword
        is_residual = pair in pairs or (entry.pointer + "/").startswith(roots)
        plan.append(entry.settle(RESIDUAL if is_residual else engine))
    listed = {(entry.pointer, entry.keyword) for entry in plan if entry.enforced_by == RESIDUAL}
    plan.extend(PlanEntry(*pair, RESIDUAL) for pair in sorted(pairs - listed))
    return tuple(plan)
