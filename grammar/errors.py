"""The exceptions for grammars that cannot be used; their messages say what to change.

GrammarError(ValueError)      the grammar cannot be used
+-- InvalidGrammar            it is malformed; the message says where
+-- UnsupportedGrammar        it is well formed, but no engine enforces all of it exactly
"""

from collections.abc import Iterator
from contextlib import contextmanager


class GrammarError(ValueError):
    """A grammar that cannot be used."""


class InvalidGrammar(GrammarError):
    """A grammar that is malformed, contradicts itself or exceeds a limit.

    Attributes:
        pointer: JSON pointer to what is malformed in a schema, "" for its root; None where the message alone tells.
    """

    def __init__(self, message: str, pointer: str | None = None) -> None:
        super().__init__(message)
        self.pointer = pointer


class UnsupportedGrammar(GrammarError):
    """A well-formed grammar that no engine here can enforce exactly.

    Attributes:
        pointer: JSON pointer to the schema that holds the keyword, "" for the root and for other kinds.
        keyword: the keyword or construct that is not supported.
        reason: why it is refused, in words.
    """

    def __init__(self, pointer: str, keyword: str, reason: str) -> None:
        self.pointer = pointer
        self.keyword = keyword
        self.reason = reason
        super().__init__(f"{keyword!r} at {pointer or '#'} is not supported: {reason}")

    def __reduce__(self) -> tuple[type["UnsupportedGrammar"], tuple[str, str, str]]:
        # The default rebuilds from the message alone, also in `copy`.
        return type(self), (self.pointer, self.keyword, self.reason)


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put a place before the pointers of errors."""
    try:
        yield
    except UnsupportedGrammar as error:
        raise UnsupportedGrammar(place + error.pointer, error.keyword, error.reason) from error
    except InvalidGrammar as error:
        pointer = None if error.pointer is None else place + error.pointer
        raise InvalidGrammar(f"{place}: {error}", pointer) from error


@contextmanager
def bounding_depth() -> Iterator[None]:
    """Refuse what Python cannot follow: it allows about a thousand calls in each other."""
    try:
        yield
    except RecursionError as error:
        raise InvalidGrammar("its parts refer to each other in too long a chain; make it shorter") from error


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust panicked; its exception is no Exception, and cannot be imported."""
    return type(error).__name__ == "PanicException"
