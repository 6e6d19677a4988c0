"""Structural tags token by token: the matcher around the graph and the matchers of the values in it.

A token may end a literal, a value or free text in its middle. What lies wholly in a value is that value's own mask;
what crosses a border is found by its bytes (Straddles), so that the mask is exact: a token is allowed if and only if
some text that begins with what it makes is allowed.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..bit_row import set_bits
from ..bitmask import check_bitmask, fill_bitmask
from ..vocabulary import Vocabulary
from .graph import ACCEPT, Leaf
from .masks import MAX_NUM_MASKS, PositionMasks
from .tokens import Straddles, TagTokens
from .walk import Live, Position, Reading, Walker

# A text that can be read in more ways than that is given up.
MAX_NUM_LIVES = 16


class TagProgram:
    """A compiled structural tag.

    Args:
        straddles: node of a leaf -> the tokens that cross its end.
        inner_vocabulary: the vocabulary of the values' matchers: this one, or this one with bytes added.
    """

    def __init__(
        self,
        walker: Walker,
        tokens: TagTokens,
        straddles: dict[int, Straddles],
        inner_vocabulary: Vocabulary,
        num_inner_bytes: int,
    ) -> None:
        self.walker = walker
        self.tokens = tokens
        self.straddles = straddles
        self.inner_vocabulary = inner_vocabulary
        self.masks = PositionMasks(walker, tokens)
        size = sum({id(each): each.size_bytes for each in straddles.values()}.values()) + 200 * len(
            walker.graph.nodes
        )
        self.size_bytes = num_inner_bytes + size + MAX_NUM_MASKS * 4 * tokens.vocabulary.num_words

    def new_matcher(self) -> "TagMatcher":
        """Return a matcher at the start of the structural tag."""
        return TagMatcher(self)


class TagMatcher:
    """Grammar state of one request: every way to read its text so far."""

    def __init__(self, program: TagProgram) -> None:
        self.program = program
        self.filler = FILLER
        self._reading = program.walker.begin()
        self._history: list[Reading] = []
        self._is_terminated = False
        self._problem: str | None = None

    @property
    def lives(self) -> list[Live]:
        """The values being read, each in one way."""
        return self._reading.lives

    @property
    def error(self) -> str | None:
        """Why nothing is allowed any more, or None."""
        if self._problem is not None or self._reading.positions:
            return self._problem
        errors = [live.run.matcher.error for live in self._reading.lives]
        return next((error for error in errors if error is not None), None) if all(errors) else None

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        tokens = self.program.tokens
        if self._is_terminated or self._problem or not 0 <= token_id < tokens.vocabulary.size:
            return False
        if token_id in tokens.eos_token_ids:
            self._is_terminated = self.is_completed()
            return self._is_terminated
        after = self._read(token_id)
        if not after:
            return False
        self._history.append(self._reading)
        self._reading = after
        if len(after.lives) > MAX_NUM_LIVES:
            self._problem = f"the text can be read in more than {MAX_NUM_LIVES} ways"
        return True

    def _read(self, token_id: int) -> Reading:
        walker, tokens = self.program.walker, self.program.tokens
        name = tokens.special_names.get(token_id, b"")
        after = walker.take_special(self._reading, token_id, name)
        data = tokens.vocabulary.token_bytes[token_id]
        if not data:
            return after
        walked = walker.walk(Reading(dict(self._reading.positions)), data)
        crossed = [self._cross(live, token_id, data) for live in self._reading.lives]
        for other in (walked, *crossed):
            after.positions |= other.positions
            after.lives += other.lives
        seen: set[int] = set()
        for live in self._reading.lives:
            if live.run.accept(token_id):
                walker.go_on(live, data, after, seen)
        return after

    def _cross(self, live: Live, token_id: int, data: bytes) -> Reading:
        """Return the readings in which the value ends in the middle of a token."""
        walker, found = self.program.walker, Reading()
        leaf = walker.graph.nodes[live.node]
        assert isinstance(leaf, Leaf), "only leaves have matchers"
        for length in self.program.straddles[live.node].cuts.get(token_id, ()):
            if self._ends_with(live, data[:length]):
                other = walker.walk(walker.begin_at(leaf.next), data[length:])
                found.positions |= other.positions
                found.lives += other.lives
        return found

    def _ends_with(self, live: Live, head: bytes) -> bool:
        byte_ids = self.program.walker.byte_ids
        if live.run.foresee is not None:
            eos = self.program.tokens.vocabulary.eos_token_ids[0]
            return live.run.foresee([*(byte_ids[byte] for byte in head), eos]) > len(head)
        is_taken = all(live.run.accept(byte_ids[byte]) for byte in head)
        is_fine = is_taken and live.run.matcher.is_completed()
        live.run.rewind(live.num_tokens)
        return is_fine

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row."""
        if self._is_terminated:
            check_bitmask(bitmask, self.program.tokens.vocabulary.num_words, [row])
            bitmask[row] = self.program.tokens.vocabulary.eos_mask
        else:
            FILLER.fill([self], [row], bitmask)

    def write_row(self, words: np.ndarray, inner: np.ndarray) -> None:
        """Write the allowed tokens, int32 [num_words].

        Args:
            inner: the mask of each live value, int32 [lives, words of the inner vocabulary].
        """
        vocabulary = self.program.tokens.vocabulary
        words[:] = 0
        if self._problem is not None:
            return
        for live, mask in zip(self._reading.lives, inner, strict=True):
            words |= mask[: vocabulary.num_words] & self.program.tokens.not_eos
            self._add_straddles(live, words)
        if vocabulary.size % 32:
            # Bytes added behind the vocabulary.
            words[-1] &= np.int32((1 << vocabulary.size % 32) - 1)
        if self._reading.positions:
            words |= self.program.masks.find(tuple(self._reading.positions))

    def _add_straddles(self, live: Live, words: np.ndarray) -> None:
        """Set the tokens of which a head completes the value."""
        heads = self.program.straddles[live.node].find_heads(live.shape.depth, live.shape.is_in_string)
        run, byte_ids = live.run, self.program.walker.byte_ids
        if run.foresee is not None:
            self._foresee_straddles(heads, run.foresee, words)
            return
        taken, refused = b"", None
        for head, token_ids in heads:
            if refused is not None and head.startswith(refused):
                continue
            num_same = next(
                (i for i, byte in enumerate(taken) if head[i : i + 1] != bytes((byte,))), len(taken)
            )
            run.rewind(live.num_tokens + num_same)
            taken = head[:num_same]
            for byte in head[num_same:]:
                if not run.accept(byte_ids[byte]):
                    refused = taken + bytes((byte,))
                    break
                taken += bytes((byte,))
            if len(taken) == len(head) and run.matcher.is_completed():
                set_bits(words, token_ids)
        run.rewind(live.num_tokens)

    def _foresee_straddles(
        self, heads: Sequence[tuple[bytes, list[int]]], foresee: Callable[[list[int]], int], words: np.ndarray
    ) -> None:
        """Do the same with an engine that can look ahead."""
        byte_ids, eos = self.program.walker.byte_ids, self.program.tokens.vocabulary.eos_token_ids[0]
        refused = None
        for head, token_ids in heads:
            if refused is not None and head.startswith(refused):
                continue
            num_taken = foresee([*(byte_ids[byte] for byte in head), eos])
            if num_taken > len(head):
                set_bits(words, token_ids)
            elif num_taken < len(head):
                refused = head[: num_taken + 1]

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self._is_terminated and num_tokens > 0)
        if not 0 <= num_text <= len(self._history):
            num_accepted = len(self._history) + self._is_terminated
            raise ValueError(f"cannot roll back {num_tokens} tokens of {num_accepted}")
        if num_text:
            self._reading = self._history[-num_text]
            del self._history[-num_text:]
            self._problem = None
            for live in self._reading.lives:
                live.run.rewind(live.num_tokens)
        self._is_terminated = self._is_terminated and num_tokens == 0

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence, so that EOS is allowed."""
        return self._problem is None and Position(ACCEPT) in self._reading.positions

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""
        return self._is_terminated


class TagFiller:
    """Fills the rows of many structural tags: the rows of all values in them at once, then the borders."""

    def fill(self, matchers: Sequence[TagMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        program = matchers[0].program
        check_bitmask(bitmask, program.tokens.vocabulary.num_words, rows)
        inner = [live.run.matcher for matcher in matchers for live in matcher.lives]
        masks = np.empty((len(inner), program.inner_vocabulary.num_words), np.int32)
        fill_bitmask(inner, range(len(inner)), masks)
        start = 0
        for matcher, row in zip(matchers, rows, strict=True):
            end = start + len(matcher.lives)
            matcher.write_row(bitmask[row], masks[start:end])
            start = end


# It has no state; one object makes all structural tags of a batch one group.
FILLER = TagFiller()
