"""outlines-core: regular expressions and choices, as an automaton over the vocabulary.

outlines-core 0.2.14 loses, from an accepting state, every transition into a non-accepting one (`a(bc)?`
cannot write `abc`). The cure: compile `(?:R)\\x03` with byte 0x03 as a token of its own. The only accepting
state then has no way out, nothing is lost, and EOS is allowed exactly where that token is. The price: a text
with U+0003 cannot be written, so patterns that name it go elsewhere.
"""

import json
from collections.abc import Sequence

import numpy as np
from outlines_core import Index
from outlines_core import Vocabulary as OutlinesVocabulary

from ..bitmask import check_bitmask
from ..errors import UnsupportedGrammar
from ..limits import GrammarLimits
from ..regex.size import estimate_num_states
from ..regex.text import choices_to_regex
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary, make_mask

END = b"\x03"


class OutlinesBackend:
    """Compiles regular expressions with outlines-core for one vocabulary."""

    name = "outlines_core"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self.vocabulary = vocabulary
        self.filler = OutlinesFiller(vocabulary)
        self.end_id = vocabulary.size
        self._max_index_work = limits.max_index_work
        token_ids: dict[bytes, list[int]] = {}
        for index, token in enumerate(vocabulary.token_bytes):
            if token and END not in token:
                token_ids.setdefault(token, []).append(index)
        token_ids[END] = [self.end_id]
        self._tokens = OutlinesVocabulary(vocabulary.size + 1, token_ids)

    def compile(self, spec: GrammarSpec) -> "OutlinesProgram":
        """Compile a regex or a choice; one that would grow too large is an UnsupportedGrammar."""
        if spec.kind not in ("regex", "choice"):
            raise UnsupportedGrammar("", spec.kind, "outlines_core does not take this kind of grammar")
        pattern = spec.text if spec.kind == "regex" else choices_to_regex(json.loads(spec.text))
        max_states = self._max_index_work // max(self.vocabulary.size, 1)
        num_states = estimate_num_states(pattern, max_states)
        if num_states is None:
            raise UnsupportedGrammar("", spec.kind, f"its automaton may need more than {max_states} states")
        try:
            index = Index(f"(?:{pattern})\\x03", self._tokens)
        except ValueError as error:
            raise UnsupportedGrammar("", spec.kind, f"outlines_core refuses it: {error}") from error
        return OutlinesProgram(index, self, num_states)


class OutlinesProgram:
    """An automaton with the masks of the states seen so far."""

    def __init__(self, index: Index, backend: OutlinesBackend, num_states: int) -> None:
        self.index = index
        self.backend = backend
        self.initial_state = index.get_initial_state()
        self._masks: dict[int, np.ndarray] = {}
        # As if every state had a mask of its own; transitions cost about as much again.
        self.size_bytes = 8 * num_states * backend.vocabulary.num_words + 64 * 1024

    def new_matcher(self) -> "OutlinesMatcher":
        """Return a matcher at the start of the grammar."""
        return OutlinesMatcher(self)

    def next_state(self, state: int, token_id: int) -> int | None:
        """Return the state after a token, None where it is not allowed."""
        return self.index.get_next_state(state, token_id)

    def is_accepting(self, state: int) -> bool:
        """Tell whether the text may end in this state.

        Not wherever the end marker is allowed: `.` takes that byte too, but then the state after it is not final.
        """
        after = self.next_state(state, self.backend.end_id)
        return after is not None and self.index.is_final_state(after)

    def mask_of(self, state: int) -> np.ndarray:
        """Return the bitmask row of a state; computed once, since two threads would compute the same."""
        mask = self._masks.get(state)
        if mask is None:
            vocabulary = self.backend.vocabulary
            allowed = self.index.get_allowed_tokens(state) or []
            mask = make_mask([i for i in allowed if i < vocabulary.size], vocabulary.size)
            if self.is_accepting(state):
                mask |= vocabulary.eos_mask
            self._masks[state] = mask
        return mask


class OutlinesMatcher:
    """Grammar state of one request: the automaton's states so far."""

    error: str | None = None

    def __init__(self, program: OutlinesProgram) -> None:
        self.program = program
        self.filler = program.backend.filler
        self._states = [program.initial_state]
        self._is_terminated = False

    @property
    def state(self) -> int:
        """The automaton's present state."""
        return self._states[-1]

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        vocabulary = self.program.backend.vocabulary
        if self._is_terminated or not 0 <= token_id < vocabulary.size:
            return False
        if token_id in vocabulary.eos_token_ids:
            self._is_terminated = self.is_completed()
            return self._is_terminated
        state = self.program.next_state(self.state, token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row."""
        vocabulary = self.program.backend.vocabulary
        check_bitmask(bitmask, vocabulary.num_words, [row])
        bitmask[row] = vocabulary.eos_mask if self._is_terminated else self.program.mask_of(self.state)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self._is_terminated and num_tokens > 0)
        if not 0 <= num_text < len(self._states):
            raise ValueError(
                f"cannot roll back {num_tokens} tokens of {len(self._states) - 1 + self._is_terminated}"
            )
        del self._states[len(self._states) - num_text :]
        self._is_terminated = self._is_terminated and num_tokens == 0

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence."""
        return self.program.is_accepting(self.state)

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""
        return self._is_terminated


class OutlinesFiller:
    """Copies finished rows; there is nothing to compute that would be worth a thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def fill(self, matchers: Sequence[OutlinesMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        check_bitmask(bitmask, self._vocabulary.num_words, rows)
        for matcher, row in zip(matchers, rows, strict=True):
            bitmask[row] = matcher.program.mask_of(matcher.state)
