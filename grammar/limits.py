"""Bounds that keep one client's grammar from costing others time or memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one compiler; what exceeds them is refused with the limit's name."""

    cache_bytes: int = 256 * 1024 * 1024  # compiled grammars kept, least recently used out first
    max_num_programs: int = 128
    # llguidance's own limit. A state takes about 1 kB; a string of 8,000 characters of bounded length takes 48,000.
    # The matchers of one grammar share a lexer, which keeps its states; a full one is replaced (`Matcher.renew`).
    max_lexer_states: int = 250_000
    # Work of one mask: items of llguidance's parser and fuel of its lexer, which uses 14,000 units in a millisecond. An
    # item of a grammar that is read character by character takes 0.1 us, of an ambiguous one up to 50 us. So a mask
    # that met the first limit gets more items only if `max_mask_s` of processor time would be enough for all of them.
    max_mask_s: float = 0.5
    step_lexer_fuel: int = 2_000_000
    step_max_items: int = 50_000
    step_most_items: int = 250_000
    step_max_slow_items: int = 20_000
    step_most_slow_items: int = 1_000_000
    initial_lexer_fuel: int = 1_000_000  # about 50,000 a millisecond
    # Items behind one token; an object has four for each optional property before the first that is required.
    max_items_in_row: int = 20_000
    max_grammar_size: int = 500_000  # symbols in llguidance's productions
    # outlines-core reads the vocabulary once per automaton state: 3 million tokens take about 50 ms.
    max_index_work: int = 3_000_000
    # xgrammar has no limits of its own: its compiler is killed after these seconds or bytes.
    max_xgrammar_s: float = 5.0
    max_xgrammar_memory_bytes: int = 2 * 1024**3
    max_xgrammar_bytes: int = 16 * 1024
    # The values in a structural tag are compiled one after the other.
    max_tags_s: float = 10.0
