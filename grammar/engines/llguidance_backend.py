"""llguidance: JSON schemas, Lark, GBNF, XML, CSV and regular expressions.

Measured in its favour: it accepts nothing that a schema forbids but what `schema/exactness.py` names, compiles within
a millisecond, and its limits bound a hostile grammar from the inside.
"""

import re

from llguidance import LLMatcher

from ..backend import Program
from ..csv_table import make_csv_pattern
from ..errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from ..regex.dialects import read_classes
from ..regex.text import choices_to_regex, explain_pattern, write_terminal
from ..spec import GrammarSpec
from ..tags.gbnf_rules import write_gbnf
from ..xml.lark import make_xml_lark
from .lark import explain_complaint
from .llguidance_engines import Complaint, Engines, read_error
from .llguidance_json import HEADER
from .llguidance_matcher import LLGuidanceMatcher, Template

MAX_SHOWN = 80  # characters of a pattern in a message
# Masks of these kinds walk through the vocabulary character by character, so that a program begins apart from others.
SLOW_KINDS = ("ebnf", "lark")
NUM_APART = 16


class LLGuidanceBackend(Engines):
    """Compiles grammars with llguidance for one vocabulary."""

    name = "llguidance"

    def compile(self, spec: GrammarSpec) -> Program:
        """Compile a Lark grammar, an XML tree or a regular language."""
        try:
            return self.compile_text(make_grammar(spec), is_slow=spec.kind in SLOW_KINDS)
        except Complaint as complaint:
            raise explain_refusal(spec, str(complaint)) from complaint

    def compile_text(
        self, grammar: str, num_quotable: int = 0, is_slow: bool = False, is_json: bool = False
    ) -> Program:
        """Compile a grammar in llguidance's own format.

        Args:
            num_quotable: the characters of a source in it, whose every word is a part of the lexer.
            is_slow: its masks may take milliseconds.
            is_json: the text is JSON from its first byte, so that long numbers are ended (`NumberBound`).

        Raises:
            Complaint: llguidance does not take it.
            InvalidGrammar: it allows no first token, or the first mask takes too long.
        """
        template = Template(self, grammar, num_quotable, is_slow, self.number_bound if is_json else None)
        template.start()
        template.usage.num_apart = NUM_APART if is_slow else 0
        # llguidance reports no size; its lexer and productions take a small multiple of the text.
        size = 256 * 1024 + 32 * len(grammar)
        return Program(lambda: LLGuidanceMatcher(template), size, grammar, usage=template.usage)

    def find_complaint(self, grammar: str) -> str:
        """Return llguidance's complaint about a grammar, "" when it has none."""
        return read_error(self.make_engine(grammar))


def explain_refusal(spec: GrammarSpec, message: str) -> GrammarError:
    """Return the error for a spec about which llguidance complains."""
    if spec.kind == "lark":
        return InvalidGrammar(f"the Lark grammar cannot be used: {explain_complaint(message)}")
    if spec.kind == "ebnf":
        # Its places are those of the Lark grammar, which is not the user's.
        reason = re.sub(r"^(?:at )?\d+\(\d+\): ", "", explain_pattern(message, has_places=False))
        return InvalidGrammar(f"the GBNF grammar cannot be used: {reason}")
    reason = message
    if spec.kind == "regex":
        # The places are those of the text that the engine got, in its line.
        has_places = read_classes(spec.text) == spec.text and "\n" not in spec.text
        reason = f"{show(spec)}: {explain_pattern(message, has_places)}"
    if "parse error" in message and "not supported" not in message:
        return InvalidGrammar(f"the {spec.kind} cannot be parsed: {reason}")
    return UnsupportedGrammar("", spec.kind, reason)


def show(spec: GrammarSpec) -> str:
    return repr(spec.text if len(spec.text) <= MAX_SHOWN else spec.text[:MAX_SHOWN] + "…")


def make_grammar(spec: GrammarSpec) -> str:
    """Return a spec in llguidance's own format."""
    match spec.kind:
        case "lark":
            lark = spec.text
        case "ebnf":
            # One lexeme for each character, so that text is read as GBNF means it and not in the longest lexemes.
            lark = f"start: groot\n{write_gbnf(spec.text, 'g')}"
        case "xml":
            lark = make_xml_lark(spec.document, spec.whitespace)
        case "choice":
            lark = f"start: {write_terminal(choices_to_regex(spec.document))}"
        case "csv":
            lark = f"start: {write_terminal(make_csv_pattern(spec.document))}"
        case _:
            lark = f"start: {write_terminal(read_classes(spec.text))}"
    return LLMatcher.grammar_from_lark(HEADER + lark)
