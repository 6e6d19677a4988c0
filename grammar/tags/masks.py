"""The tokens that positions between values allow; they depend on nothing else, so all requests share them."""

import numpy as np

from ..bit_row import clear_bits, set_bits
from .graph import ACCEPT, FreeText, Literal, TokenStep
from .tokens import TagTokens
from .walk import Position, Reading, Walker

MAX_NUM_MASKS = 256


class PositionMasks:
    """Bitmask rows, int32 [num_words], of the positions in one structural tag."""

    def __init__(self, walker: Walker, tokens: TagTokens) -> None:
        self.walker = walker
        self.tokens = tokens
        self._masks: dict[tuple[Position, ...], np.ndarray] = {}
        self._holding: dict[bytes, list[int]] = {}

    def prepare(self) -> None:
        """Make the rows of free text, so that the step that asks first does not pay for them."""
        positions = []
        for index, node in enumerate(self.walker.graph.nodes):
            if isinstance(node, FreeText):
                positions += [Position(index, at) for at, hit in enumerate(node.automaton.hits) if hit < 0]
        for position in positions[: MAX_NUM_MASKS // 2]:
            self.find((position,))

    def find(self, positions: tuple[Position, ...]) -> np.ndarray:
        """Return the row, int32 [num_words], of the tokens that any of some positions takes; not to be written to."""
        mask = self._masks.get(positions)
        if mask is None:
            if len(self._masks) >= MAX_NUM_MASKS:
                self._masks.clear()
            mask = self._masks[positions] = self._make_mask(positions)
        return mask

    def find_holding(self, pattern: bytes) -> list[int]:
        """Return the tokens in which a pattern stands; looked up once."""
        if pattern not in self._holding:
            self._holding[pattern] = self.tokens.find_holding(pattern)
        return self._holding[pattern]

    def _make_mask(self, positions: tuple[Position, ...]) -> np.ndarray:
        vocabulary = self.tokens.vocabulary
        mask = np.zeros(vocabulary.num_words, np.int32)
        for position in positions:
            match self.walker.graph.nodes[position.node]:
                case FreeText() as node:
                    mask |= self._mask_text(position, node) if len(positions) == 1 else self.find((position,))
                case Literal(text=text, next=target):
                    self._add_literal(mask, position, text, target)
                case TokenStep(token_id=token_id):
                    set_bits(mask, [token_id])
            if position.node == ACCEPT:
                mask |= vocabulary.eos_mask
        for token_id, name in self.tokens.special_names.items():
            if self.walker.take_special(Reading(dict.fromkeys(positions)), token_id, name):
                set_bits(mask, [token_id])
        return mask

    def _add_literal(self, mask: np.ndarray, position: Position, text: bytes, target: int) -> None:
        """Set the tokens that begin the rest of a literal, or are the rest and what may follow it."""
        # No token reaches further.
        rest = text[position.at : position.at + self.tokens.max_num_bytes + 1]
        for length in range(1, len(rest)):
            set_bits(mask, self.tokens.find_exact(rest[:length]))
        num_own = len(rest)
        measure = self.walker.measure
        set_bits(
            mask, self.tokens.find_beginning(rest, lambda data: num_own + measure(target, data[num_own:]))
        )

    def _mask_text(self, position: Position, node: FreeText) -> np.ndarray:
        """All text, but for the tokens that complete a pattern and then do not go on as they must."""
        mask = self.tokens.text_masks[position.inside].copy()
        hits = {token_id for pattern in node.automaton.patterns for token_id in self.find_holding(pattern)}
        for rest in node.automaton.find_rests(position.at):
            hits.update(self.tokens.find_beginning(rest, len))
        is_plain = node.next is None or self.walker.graph.list_next(node.next) == [ACCEPT]
        verdicts: dict[tuple[int, bytes], bool] = {}
        for token_id in hits:
            data = self.tokens.vocabulary.token_bytes[token_id]
            if not (
                self._hits_well(position, node, data, verdicts)
                if is_plain
                else self._leads_on(position, token_id)
            ):
                clear_bits(mask, [token_id])
        return mask

    def _hits_well(
        self, position: Position, node: FreeText, data: bytes, verdicts: dict[tuple[int, bytes], bool]
    ) -> bool:
        """Tell whether a token goes on as it must after the first pattern that it completes."""
        at, automaton = position.at, node.automaton
        for length, byte in enumerate(data, 1):
            at = automaton.step(at, byte)
            hit = automaton.hits[at]
            if hit >= 0:
                key = hit, data[length:]
                if key not in verdicts:
                    verdicts[key] = any(self.walker.leads_on(each, key[1]) for each in node.targets[hit])
                return verdicts[key]
        return True

    def _leads_on(self, position: Position, token_id: int) -> bool:
        data = self.tokens.vocabulary.token_bytes[token_id]
        return bool(self.walker.walk(Reading({position: None}), data))
