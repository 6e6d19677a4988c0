"""Bounds that keep one client's grammar from costing others time or memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one compiler; what exceeds them is refused with the limit's name."""

    cache_bytes: int = 256 * 1024 * 1024  # compiled grammars kept, least recently used out first
    # A lexer state of llguidance takes 1 to 2 kB. The matchers of one grammar share theirs, so this caps a grammar at
    # about 40 MB.
    max_lexer_states: int = 20_000
    # All grammars in use together: a new one gets at most an eighth of what is left, but no fewer than
    # `min_lexer_states`, which are enough for each of 133 schemas of MaskBench.
    max_total_lexer_states: int = 400_000
    min_lexer_states: int = 2_000
    step_lexer_fuel: int = 200_000  # llguidance's unit, about 14,000 a millisecond
    initial_lexer_fuel: int = 1_000_000  # about 50,000 a millisecond
    # An object takes four for each optional property before the first that is required.
    max_items_in_row: int = 20_000
    # Items of llguidance's parser for one mask of a GBNF grammar, some for each byte of each token, of up to 2 us.
    max_gbnf_items: int = 250_000
    max_grammar_size: int = 500_000  # symbols in llguidance's productions
    # outlines-core reads the vocabulary once per automaton state: 3 million tokens take about 50 ms.
    max_index_work: int = 3_000_000
    # xgrammar has no limits of its own: its compiler is killed after these seconds or bytes.
    max_xgrammar_s: float = 5.0
    max_xgrammar_memory_bytes: int = 2 * 1024**3
    max_xgrammar_bytes: int = 16 * 1024
    # The values in a structural tag are compiled one after the other.
    max_tags_s: float = 10.0
