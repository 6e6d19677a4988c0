"""outlines-core: short choices, as an automaton over the vocabulary whose masks are looked up.

outlines-core 0.2.14 loses, from an accepting state, every transition into a non-accepting one (`a(bc)?`
cannot write `abc`). The cure: compile `(?:R)\\x03` with byte 0x03 as a token of its own. The only accepting
state then has no outgoing transition, nothing is lost, and EOS is allowed exactly where that token is.
"""

import json

import numpy as np
from outlines_core import Guide, Index
from outlines_core import Vocabulary as OutlinesVocabulary

from ..backend import Matcher, Program
from ..errors import UnsupportedGrammar
from ..limits import GrammarLimits
from ..regex.text import choices_to_regex
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary

END = b"\x03"


class OutlinesBackend:
    """Compiles choices with outlines-core for one vocabulary."""

    name = "outlines_core"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self.vocabulary = vocabulary
        self.end_id = vocabulary.size
        self._max_index_work = limits.max_index_work
        token_ids: dict[bytes, list[int]] = {}
        for index, token in enumerate(vocabulary.token_bytes):
            if token and END not in token:
                token_ids.setdefault(token, []).append(index)
        token_ids[END] = [self.end_id]
        self._tokens = OutlinesVocabulary(vocabulary.size + 1, token_ids)

    def compile(self, spec: GrammarSpec) -> Program:
        choices = json.loads(spec.text)
        num_states, max_states = len("".join(choices).encode()), self._max_index_work // max(self.vocabulary.size, 1)
        if num_states > max_states or "\x03" in "".join(choices):
            raise UnsupportedGrammar("", spec.kind, f"it takes choices of up to {max_states} states")
        try:
            index = Index(f"(?:{choices_to_regex(choices)})\\x03", self._tokens)
        except ValueError as error:
            raise UnsupportedGrammar("", spec.kind, f"outlines_core refuses it: {error}") from error
        # Estimate one mask per state for the transitions.
        size = 4 * num_states * self.vocabulary.num_words + 64 * 1024
        return Program(lambda: OutlinesMatcher(self, index, num_states), size)


class OutlinesMatcher(Matcher):
    """Grammar state of one request in outlines-core."""

    def __init__(self, backend: OutlinesBackend, index: Index, num_states: int) -> None:
        super().__init__(backend.vocabulary)
        self._end_id = backend.end_id
        # Every token takes the automaton at least one state further.
        self._guide = Guide(index, max_rollback=num_states + 1)

    def _take(self, token_id: int) -> bool:
        is_taken: bool = self._guide.accepts_tokens([token_id])
        if is_taken:
            self._guide.advance(token_id, return_tokens=False)
        return is_taken

    def _take_back(self, num_tokens: int) -> None:
        self._guide.rollback_state(num_tokens)

    def is_completed(self) -> bool:
        return bool(self._guide.accepts_tokens([self._end_id]))

    def _fill(self, words: np.ndarray, address: int) -> None:
        # The end marker is one token more than the vocabulary has.
        found = np.zeros(self._end_id // 32 + 1, np.int32)
        self._guide.write_mask_into(found.ctypes.data, len(found), 4)
        found[self._end_id >> 5] &= np.int32((1 << self._end_id % 32) - 1)
        words[:] = found[: len(words)]
        if self.is_completed():
            words |= self.vocabulary.eos_mask
