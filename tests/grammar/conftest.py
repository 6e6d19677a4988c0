"""Compilers shared by the grammar tests; each keeps its own cache."""

import pytest

from grammar import GrammarCompiler
from tests.grammar.vocabularies import make_byte_vocabulary, make_merged_vocabulary


@pytest.fixture(scope="session")
def byte_compiler() -> GrammarCompiler:
    """A compiler over single bytes: what it accepts depends on the grammar alone."""
    return GrammarCompiler(make_byte_vocabulary())


@pytest.fixture(scope="session")
def merged_compiler() -> GrammarCompiler:
    """A compiler over a vocabulary as byte pair encoding makes them."""
    return GrammarCompiler(make_merged_vocabulary())
