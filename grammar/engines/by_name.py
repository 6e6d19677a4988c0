"""Engines for one kind each: outlines-core for short choices, xgrammar for GBNF where it is asked for.

outlines-core has an automaton over the vocabulary whose masks are looked up. 0.2.14 loses, from an accepting state,
every transition into a non-accepting one (`a(bc)?` cannot write `abc`). The cure: compile `(?:R)\\x03` with byte 0x03
as a token of its own. The only accepting state then has no outgoing transition, and EOS is allowed exactly there.

xgrammar's compiler has no limits and cannot be cancelled (400 character classes in a row take minutes), so each compile
runs in a process that is killed at a deadline (xgrammar_worker.py). It imports torch and transformers, which takes
seconds, so it is loaded when first used and not before.
"""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from outlines_core import Guide, Index
from outlines_core import Vocabulary as OutlinesVocabulary

from ..backend import MAX_FORCED_BYTES, Matcher, Program
from ..bitmask import clear_beyond
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..regex.text import choices_to_regex
from ..spec import GrammarSpec
from ..tags.gbnf_rules import write_ebnf
from ..vocabulary import Vocabulary

END = b"\x03"
START_SECONDS = 60  # of the process for xgrammar
WORKER_SCRIPT = Path(__file__).with_name("xgrammar_worker.py")


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
        choices = spec.document
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


@dataclass
class XGrammarBackend:
    """Compiles grammars with xgrammar for one vocabulary."""

    name: ClassVar[str] = "xgrammar"
    vocabulary: Vocabulary
    limits: GrammarLimits

    @cached_property
    def xgrammar(self) -> Any:
        return importlib.import_module("xgrammar")

    @cached_property
    def _info(self) -> Any:
        return self.xgrammar.TokenizerInfo(
            # Only empty tokens count as special there.
            list(self.vocabulary.token_bytes),
            self.xgrammar.VocabType.RAW,
            vocab_size=self.vocabulary.size,
            stop_token_ids=list(self.vocabulary.eos_token_ids),
            add_prefix_space=False,
        )

    @cached_property
    def _tokenizer(self) -> str:
        """The vocabulary as the process reads it."""
        return str(self._info.serialize_json())

    def compile(self, spec: GrammarSpec) -> Program:
        num_bytes = len(spec.text.encode())
        if num_bytes > self.limits.max_xgrammar_bytes:
            reason = (f"{num_bytes} bytes are more than the {self.limits.max_xgrammar_bytes} that xgrammar is given")
            raise UnsupportedGrammar("", spec.kind, reason)
        answer = self._run_worker(write_ebnf(spec.text))
        if "error" in answer:
            raise InvalidGrammar(f"{spec.kind} cannot be compiled: {tidy(answer['error'])}")
        compiled = self.xgrammar.CompiledGrammar.deserialize_json(answer["compiled"], self._info)
        make_engine = self.xgrammar.GrammarMatcher
        return Program(lambda: XGrammarMatcher(make_engine(compiled), self.vocabulary), compiled.memory_size_bytes)

    def _run_worker(self, text: str) -> dict[str, str]:
        limits = self.limits
        order = {
            "tokenizer": self._tokenizer, "text": text, "max_seconds": limits.max_xgrammar_s,
            "max_memory_bytes": limits.max_xgrammar_memory_bytes,
        }
        # -P keeps the script's folder, whose module names are ours, off the import path.
        command = [sys.executable, "-P", str(WORKER_SCRIPT)]
        data, seconds = json.dumps(order).encode(), START_SECONDS + limits.max_xgrammar_s
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=seconds, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            reason = f"too large for xgrammar: no answer within {limits.max_xgrammar_s:g} s or out of memory"
            raise UnsupportedGrammar("", "ebnf", reason) from error
        answer: dict[str, str] = json.loads(done.stdout)
        return answer


def tidy(message: str) -> str:
    return re.sub(r"^\[[\d:]+\] \S+: ", "", message).strip().split("\n")[0]


class XGrammarMatcher(Matcher):
    """Grammar state of one request in xgrammar."""

    def __init__(self, engine: Any, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.engine = engine

    def _take(self, token_id: int) -> bool:
        # xgrammar also refuses special tokens, but prints a line to stderr each time.
        return bool(self.vocabulary.token_bytes[token_id]) and bool(self.engine.accept_token(token_id))

    def _take_back(self, num_tokens: int) -> None:
        self.engine.rollback(num_tokens)

    def is_completed(self) -> bool:
        return bool(self.engine.is_completed())

    def _find_forced(self) -> bytes:
        return str(self.engine.find_jump_forward_string()).encode()[:MAX_FORCED_BYTES]

    def _fill(self, words: np.ndarray, address: int) -> None:
        self.engine.fill_next_token_bitmask(words.reshape(1, -1), 0)
        clear_beyond(words, self.vocabulary.size)  # The engine sets them.
