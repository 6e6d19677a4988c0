"""Which engine gets which spec: the one that enforces it exactly, or none.

json_object         -> json_schema {"type": "object"}
json_schema         -> llguidance, with residual checks for what it does not enforce (json_route.py)
regex               -> llguidance, which compiles it in 1 ms; outlines_core if it is asked for
choice              -> outlines_core where its automaton is small, else llguidance
ebnf                -> xgrammar
lark, csv, xml      -> llguidance
structural_tag      -> its own matcher (tags/compile.py)
"""

from collections.abc import Mapping

from .backend import Backend, CompiledGrammar
from .engines.llguidance_backend import LLGuidanceBackend
from .errors import UnsupportedGrammar
from .json_route import compile_json_schema
from .match.token_tables import TokenTables
from .plan import PlanEntry
from .spec import GrammarSpec

# The engines to try, in order.
ROUTES: dict[str, tuple[str, ...]] = {
    "json_schema": ("llguidance",),
    "json_object": ("llguidance",),
    "regex": ("llguidance", "outlines_core"),
    "choice": ("outlines_core", "llguidance"),
    "ebnf": ("xgrammar",),
    "lark": ("llguidance",),
    "csv": ("llguidance",),
    "xml": ("llguidance",),
}


def compile_spec(spec: GrammarSpec, backends: Mapping[str, Backend], tokens: TokenTables) -> CompiledGrammar:
    """Compile a spec with the first engine that enforces all of it, or raise GrammarError."""
    names = ROUTES[spec.kind]
    if spec.backend is not None:
        if spec.backend not in names:
            reason = f"backend {spec.backend!r} does not take it; choose from {list(names)}"
            raise UnsupportedGrammar("", spec.kind, reason)
        names = (spec.backend,)
    if spec.kind in ("json_schema", "json_object"):
        engine = backends["llguidance"]
        assert isinstance(engine, LLGuidanceBackend), "it is the only one of that name"
        return compile_json_schema(spec, engine, tokens)
    refusals: list[UnsupportedGrammar] = []
    for name in names:
        try:
            return compile_with(backends[name], spec)
        except UnsupportedGrammar as refusal:
            refusals.append(refusal)
    # What an engine says that takes few patterns says less than the one that takes most.
    raise next(
        (each for each, name in zip(refusals, names, strict=True) if name == "llguidance"), refusals[0]
    )


def compile_with(backend: Backend, spec: GrammarSpec) -> CompiledGrammar:
    """Compile a spec whose plan is one entry."""
    plan = (PlanEntry("", spec.kind, backend.name),)
    return CompiledGrammar(backend.name, plan, backend.compile(spec))
