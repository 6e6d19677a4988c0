"""Constrains output to a schema, a pattern or a list of choices, token by token. Constraints are exact or refused.

vocabulary = Vocabulary(token_bytes, eos_token_ids)
compiled = GrammarCompiler(vocabulary).compile(GrammarSpec.json_schema(schema))
matcher = compiled.matcher()
bitmask = allocate_bitmask(1, vocabulary.size)
matcher.fill_next_token_bitmask(bitmask)
"""

from .backend import (
    CompiledGrammar,
    MaskClock,
    Matcher,
    OuterMatcher,
    Program,
    StoppableMatcher,
    Usage,
    fill_bitmask,
    fill_draft_bitmask,
)
from .bitmask import allocate_bitmask, is_set
from .compiler import GrammarCompiler, find_tool_refusal
from .errors import GrammarError, InvalidGrammar, UnsupportedGrammar, is_panic
from .limits import GrammarLimits
from .output_check import OutputCheck
from .plan import PlanEntry
from .spec import GrammarSpec, Reasoning, read_spaces, read_spec
from .tags.arguments import ArgumentReader
from .tags.tool_calls import make_tool_spec
from .tags.tool_styles import ToolStyle, list_tool_styles
from .validator import SchemaValidator
from .vocabulary import Vocabulary
from .xml.validator import XmlValidator

__all__ = [
    "ArgumentReader", "CompiledGrammar", "GrammarCompiler", "GrammarError", "GrammarLimits", "GrammarSpec",
    "InvalidGrammar", "MaskClock", "Matcher", "OuterMatcher", "OutputCheck", "PlanEntry", "Program", "Reasoning",
    "SchemaValidator", "StoppableMatcher", "ToolStyle", "UnsupportedGrammar", "Usage", "Vocabulary",
    "XmlValidator", "allocate_bitmask", "fill_bitmask", "fill_draft_bitmask", "find_tool_refusal", "is_panic",
    "is_set", "list_tool_styles", "make_tool_spec", "read_spaces", "read_spec",
]
