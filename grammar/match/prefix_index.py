"""Which tokens are prefixes of a given text, and which close a JSON string after a given content."""

from bisect import bisect_right

from ..vocabulary import Vocabulary, make_mask

_SPACES = b" \t\r\n"


class PrefixIndex:
    """Sorted keys, each with its longest proper prefix among them: all prefixes of a text in one look-up.

    The largest key that is not larger than a text starts with every key that is a prefix of the text.

    Attributes:
        keys: in ascending order; elsewhere a key is its place here.
        lengths: key -> how many bytes it has.
        parents: key -> the longest other key that is its prefix, -1 without one.
    """

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = sorted(keys)
        self.lengths = [len(key) for key in self.keys]
        self.max_length = max(self.lengths, default=0)
        self.parents = find_parents(self.keys)
        # First two bytes -> where such keys begin and end: a shorter way for the binary search.
        self._ranges: dict[bytes, tuple[int, int]] = {}
        for place, key in enumerate(self.keys):
            low, _ = self._ranges.get(key[:2], (place, place))
            self._ranges[key[:2]] = low, place + 1

    def find_longest(self, text: bytes) -> int:
        """Return the longest key that is a prefix of a text, -1 without one."""
        low, high = self._ranges.get(text[:2], (0, len(self.keys)))
        key = bisect_right(self.keys, text, low, high) - 1
        while key >= 0 and not text.startswith(self.keys[key]):
            key = self.parents[key]
        return key


def find_parents(keys: list[bytes]) -> list[int]:
    """Return for each of the sorted keys the place of the longest other key that is its prefix, -1 without one."""
    parents: list[int] = []
    open_places: list[int] = []
    for place, key in enumerate(keys):
        while open_places and not key.startswith(keys[open_places[-1]]):
            open_places.pop()
        parents.append(open_places[-1] if open_places else -1)
        open_places.append(place)
    return parents


class StringTokens:
    """The tokens of a vocabulary as pieces of JSON strings.

    Attributes:
        index: over all tokens, and over what stands before a quote in any of them.
        whole: key -> the tokens that are this key.
        closing: key -> the tokens in which a quote follows this key.
        next_closing: key -> the longest prefix of it, or itself, that has such tokens; -1, also of -1, without one.
        quoted: bitmask row of the tokens that begin with a quote.
        opening: bitmask row of the tokens that are one quote, perhaps after whitespace, and some content.
        contents: token -> content, for those.
        mixed: bitmask row of the other tokens with a quote that is not all of their end.
        several: bitmask row of the tokens with more than one quote.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.token_bytes = vocabulary.token_bytes
        self.size = vocabulary.size
        whole: dict[bytes, list[int]] = {}
        closing: dict[bytes, list[int]] = {}
        self.contents: dict[int, bytes] = {}
        mixed, several = [], []
        for token_id, token in enumerate(vocabulary.token_bytes):
            if not token:
                continue
            whole.setdefault(token, []).append(token_id)
            position = token.find(b'"')
            if position < 0:
                continue
            num_quotes = token.count(b'"')
            is_led = not token[:position].strip(_SPACES)
            if num_quotes == 1 and is_led and position + 1 < len(token):
                self.contents[token_id] = token[position + 1 :]
            elif num_quotes > 1 or position + 1 < len(token):
                mixed.append(token_id)
            if num_quotes > 1:
                several.append(token_id)
            while position >= 0:
                closing.setdefault(token[:position], []).append(token_id)
                position = token.find(b'"', position + 1)
        self.index = PrefixIndex({*whole, *(content for content in closing if content)})
        self.whole = [whole.get(key, []) for key in self.index.keys]
        self.closing = [closing.get(key, []) for key in self.index.keys]
        self.next_closing: list[int] = []
        for key, parent in enumerate(self.index.parents):
            # Parents precede their children. The empty key is not among the keys.
            self.next_closing.append(
                key if self.closing[key] else self.next_closing[parent] if parent >= 0 else -1
            )
        self.next_closing.append(-1)
        self.quoted = make_mask(closing.get(b"", []), self.size)
        self.opening = make_mask(list(self.contents), self.size)
        self.mixed = make_mask(mixed, self.size)
        self.several = make_mask(several, self.size)
