"""Which backend gets which spec: the one that enforces it exactly, or none.

json_object                      -> json_schema {"type": "object"}
json_schema   normalise, then    -> llguidance, unless it refuses or a keyword is beyond it;
                                 -> xgrammar, when everything in the schema is in its exact subset and it is quick;
                                 -> llguidance without what is beyond it, which residual checks enforce;
                                 -> UnsupportedGrammar with pointer, keyword and reason
regex, choice                    -> outlines_core; llguidance where that cannot or would grow too large
ebnf                             -> xgrammar
lark, csv, xml                   -> llguidance
structural_tag                   -> its own matcher, and for each value in it the backend it would have alone
                                    (tags/compile.py)
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .backend import Backend, CompiledGrammar
from .errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from .match.closing_tokens import ClosingTokens
from .match.compile_residual import compile_residual
from .plan import PlanEntry, Problem
from .schema.normalise import Normalised, normalise
from .schema.open_names import SIGNS, find_long_escapes, has_open_names
from .schema.wide_objects import find_wide_object
from .schema.xgrammar_subset import find_obstacle, is_quick
from .spec import GrammarSpec

# The kinds without an analysis of their own, and the backends to try in order.
ROUTES: dict[str, tuple[str, ...]] = {
    "regex": ("outlines_core", "llguidance"),
    "choice": ("outlines_core", "llguidance"),
    "ebnf": ("xgrammar",),
    "lark": ("llguidance",),
    "csv": ("llguidance",),
    "xml": ("llguidance",),
}


def compile_spec(
    spec: GrammarSpec, backends: Mapping[str, Backend], closing_tokens: Callable[[], ClosingTokens]
) -> CompiledGrammar:
    """Compile a spec with the first backend that enforces all of it, or raise GrammarError.

    Args:
        closing_tokens: what residual checks need to know about the vocabulary, made when it is first asked for.
    """
    if spec.kind in ("json_schema", "json_object"):
        return compile_json_schema(replace(spec, kind="json_schema"), backends, closing_tokens)
    names = ROUTES[spec.kind]
    if spec.backend is not None:
        check_backend(spec, names)
        names = (spec.backend,)
    for name in names[:-1]:
        try:
            return compile_with(backends[name], spec)
        except UnsupportedGrammar:
            continue
    return compile_with(backends[names[-1]], spec)


def check_backend(spec: GrammarSpec, names: tuple[str, ...]) -> None:
    """Refuse a backend that does not take this kind."""
    if spec.backend not in names:
        reason = f"backend {spec.backend!r} does not take it; choose from {list(names)}"
        raise UnsupportedGrammar("", spec.kind, reason)


def compile_with(backend: Backend, spec: GrammarSpec) -> CompiledGrammar:
    """Compile a spec whose plan is one entry."""
    plan = (PlanEntry("", spec.kind, backend.name),)
    return CompiledGrammar(backend.name, plan, backend.compile(spec))


def compile_json_schema(
    spec: GrammarSpec, backends: Mapping[str, Backend], closing_tokens: Callable[[], ClosingTokens]
) -> CompiledGrammar:
    """Compile a schema with llguidance, else with xgrammar, else with residual checks, else refuse it."""
    if spec.backend is not None:
        check_backend(spec, ("llguidance", "xgrammar"))
    normalised = normalise(json.loads(spec.text))
    if normalised.schema is False:
        raise InvalidGrammar("no text satisfies the schema: it is false")
    # The engines take options beside keywords, so they want an object.
    schema = {} if normalised.schema is True else normalised.schema
    rewritten = replace(spec, text=json.dumps(schema, ensure_ascii=False))
    if spec.backend == "xgrammar":
        obstacle = find_xgrammar_obstacle(spec, schema)
        if obstacle is not None:
            raise UnsupportedGrammar(obstacle.pointer, obstacle.keyword, obstacle.reason)
        return finish(backends["xgrammar"], rewritten, normalised)
    check_escapes(rewritten.text, schema, normalised)
    wide = find_wide_object(schema) if spec.property_order == "schema" else None
    if wide is not None:
        raise refuse(wide, normalised)
    if not normalised.problems:
        try:
            return finish(backends["llguidance"], rewritten, normalised)
        except UnsupportedGrammar:
            pass
    if spec.backend is None and find_xgrammar_obstacle(spec, schema) is None and is_quick(schema):
        try:
            return finish(backends["xgrammar"], rewritten, normalised)
        except GrammarError:
            # It refuses a whole schema for a part that nothing satisfies, even where that may stay away.
            pass
    return compile_residual(
        backends["llguidance"], rewritten, json.loads(spec.text), normalised, closing_tokens()
    )


def check_escapes(text: str, schema: dict[str, Any], normalised: Normalised) -> None:
    """Refuse what needs an escape that llguidance must not write where names are open."""
    if SIGNS.search(text) is None or not has_open_names(schema):
        return
    for problem in find_long_escapes(schema):
        raise refuse(problem, normalised)


def refuse(problem: Problem, normalised: Normalised) -> UnsupportedGrammar:
    """Return the error for a problem of the normalised schema, with its place in the user's schema."""
    pointer, origin = normalised.places.get(problem.pointer, (problem.pointer, {}))
    return UnsupportedGrammar(pointer, origin.get(problem.keyword, problem.keyword), problem.reason)


def find_xgrammar_obstacle(spec: GrammarSpec, schema: dict[str, Any]) -> Problem | None:
    """Return why xgrammar may not have a normalised schema, None when it may."""
    obstacle = find_obstacle(schema)
    if spec.property_order == "any" and obstacle is None:
        # Its own any_order checks neither what is required nor what is written twice.
        obstacle = Problem("", "property_order", "xgrammar writes properties in the order of the schema only")
    return obstacle


def finish(backend: Backend, spec: GrammarSpec, normalised: Normalised) -> CompiledGrammar:
    """Compile, and write the backend's name into the plan."""
    program = backend.compile(spec)
    plan = tuple([entry.settle(backend.name) for entry in normalised.plan])
    return CompiledGrammar(backend.name, plan, program)
