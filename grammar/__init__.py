"""Constrains output to a schema, a pattern or a list of choices, token by token. Constraints are exact or refused.

vocabulary = Vocabulary(token_bytes, eos_token_ids)
compiled = GrammarCompiler(vocabulary).compile(GrammarSpec.json_schema(schema))
matcher = compiled.matcher()
bitmask = allocate_bitmask(1, vocabulary.size)
matcher.fill_next_token_bitmask(bitmask)
"""

from .backend import CompiledGrammar, Filler, Matcher, Program, Usage, fill_bitmask, fill_draft_bitmask
from .bitmask import allocate_bitmask, is_set
from .compiler import GrammarCompiler
from .errors import GrammarError, InvalidGrammar, UnsupportedGrammar, is_panic
from .limits import GrammarLimits
from .match.stop_tokens import StoppableMatcher
from .output_check import OutputCheck
from .plan import PlanEntry
from .spec import GrammarSpec, Reasoning
from .spec_reader import read_spec
from .tags.parameters import list_raw
from .tags.tool_calls import ToolStyle, list_tool_styles, make_forced_tags, make_tool_tags
from .validator import SchemaValidator
from .vocabulary import Vocabulary
from .xml.validator import XmlValidator

__all__ = [
    "CompiledGrammar",
    "Filler",
    "GrammarCompiler",
    "GrammarError",
    "GrammarLimits",
    "GrammarSpec",
    "InvalidGrammar",
    "Matcher",
    "OutputCheck",
    "PlanEntry",
    "Program",
    "Reasoning",
    "SchemaValidator",
    "StoppableMatcher",
    "ToolStyle",
    "UnsupportedGrammar",
    "Usage",
    "Vocabulary",
    "XmlValidator",
    "allocate_bitmask",
    "fill_bitmask",
    "fill_draft_bitmask",
    "is_panic",
    "is_set",
    "list_raw",
    "list_tool_styles",
    "make_forced_tags",
    "make_tool_tags",
    "read_spec",
]
