"""Checks a schema before anything is generated: is it JSON, is it a schema, can all of it be enforced exactly?"""

from __future__ import annotations

import json
from dataclasses import dataclass

from app.extraction.prompt import Schema
from grammar import GrammarCompiler, GrammarSpec, InvalidGrammar, PlanEntry, Vocabulary

# Whether a keyword is supported does not depend on the model's tokens; with these 257 a compile takes milliseconds.
_BYTE_VOCABULARY = [bytes([value]) for value in range(256)] + [b""]
_EOS_TOKEN_ID = 256


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema that can be used, and how many of its keywords are enforced by which backend."""

    schema: Schema
    backend: str
    num_enforced: int
    plan: tuple[PlanEntry, ...] = ()


class SchemaChecker:
    """Compiles schemas for a vocabulary of single bytes."""

    def __init__(self) -> None:
        self._compiler = GrammarCompiler(Vocabulary(_BYTE_VOCABULARY, (_EOS_TOKEN_ID,)))

    def check(self, text: str) -> CheckedSchema:
        """Parse and check what stands in the schema editor.

        Raises GrammarError: what is wrong, with line and column or with pointer and keyword.
        """
        spec = GrammarSpec.json_schema(text)
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise InvalidGrammar('the schema of a record is a JSON object, such as {"type": "object", ...}')
        compiled = self._compiler.compile(spec)
        num_enforced = sum(entry.enforced_by == compiled.backend for entry in compiled.plan)
        return CheckedSchema(schema, compiled.backend, num_enforced, tuple(compiled.plan))
