"""Tables of a vocabulary that only some grammars need: made when they are first asked for."""

from functools import cached_property

from ..vocabulary import Vocabulary
from .closing_tokens import ClosingTokens
from .prefix_index import StringTokens


class TokenTables:
    """The tables of one vocabulary; reading 100,000 tokens takes a tenth of a second for each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def closing(self) -> ClosingTokens:
        """What residual checks need."""
        return ClosingTokens(self._vocabulary)

    @cached_property
    def strings(self) -> StringTokens:
        """What quotations need."""
        return StringTokens(self._vocabulary)
