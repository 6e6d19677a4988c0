"""xgrammar: EBNF, matched character by character.

Its compiler has no limits and cannot be cancelled (400 character classes in a row take minutes), so each compile runs
in a process that is killed at a deadline (xgrammar_worker.py). xgrammar imports torch and transformers, which takes
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

from ..backend import MAX_FORCED_BYTES, Matcher, Program
from ..bitmask import clear_beyond
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..spec import GrammarSpec
from ..tags.gbnf_rules import write_ebnf
from ..vocabulary import Vocabulary

START_SECONDS = 60
WORKER_SCRIPT = Path(__file__).with_name("xgrammar_worker.py")


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
            reason = (
                f"{num_bytes} bytes are more than the {self.limits.max_xgrammar_bytes} that xgrammar is given"
            )
            raise UnsupportedGrammar("", spec.kind, reason)
        answer = self._run_worker(write_ebnf(spec.text))
        if "error" in answer:
            raise InvalidGrammar(f"{spec.kind} cannot be compiled: {tidy(answer['error'])}")
        compiled = self.xgrammar.CompiledGrammar.deserialize_json(answer["compiled"], self._info)
        make_engine = self.xgrammar.GrammarMatcher
        return Program(
            lambda: XGrammarMatcher(make_engine(compiled), self.vocabulary), compiled.memory_size_bytes
        )

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
    """Return xgrammar's message without its log prefix."""
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
