"""SuffixProposer: proposes the likeliest continuation of the longest match, in the request and in earlier answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.request import Request
from engine.spec.ngram import NgramIndex, count_match
from engine.speculative_config import SpeculativeConfig

WIDTH = 2  # shortest match
MAX_PLACES = 16  # latest places of a pair of tokens that are kept for all answers of a tenant
MAX_COMPARED = 4  # latest places in the request, and in earlier answers, that vote; each takes 2 us
MAX_LEARNED_TOKENS = 512  # tokens of ended answers that one call indexes


class Place(NamedTuple):
    """The tokens before `end` match the end of the request."""

    token_ids: Sequence[int]
    end: int
    length: int = 0


class AnswerMemory:
    """The answers of one tenant, by pairs of tokens."""

    def __init__(self) -> None:
        self._answers: deque[list[int]] = deque()  # the oldest first
        self._places: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
        self._backlog: deque[tuple[list[int], int]] = deque()  # (answer, first token that is not indexed)

    def add(self, answer: list[int]) -> None:
        """Add an answer; `learn` indexes it."""
        self._backlog.append((answer, WIDTH - 1))
        self._answers.append(answer)

    def __len__(self) -> int:
        return len(self._answers)

    def learn(self, limit: int = MAX_LEARNED_TOKENS) -> None:
        """Index up to `limit` tokens of added answers."""
        while limit > 0 and self._backlog:
            answer, start = self._backlog.popleft()
            stop = min(len(answer), start + limit)
            for end in range(start, stop):
                places = self._places.setdefault(tuple(answer[end - WIDTH + 1 : end + 1]), [])
                places.append((answer, end + 1))
                if len(places) > MAX_PLACES:
                    del places[0]
            limit -= stop - start
            if stop < len(answer):
                self._backlog.appendleft((answer, stop))

    def find(self, pair: tuple[int, ...]) -> list[tuple[list[int], int]]:
        return self._places.get(pair, [])

    def drop_oldest(self) -> None:
        answer = self._answers.popleft()
        self._backlog = deque(entry for entry in self._backlog if entry[0] is not answer)
        for end in range(WIDTH - 1, len(answer)):
            pair = tuple(answer[end - WIDTH + 1 : end + 1])
            kept = [place for place in self._places.get(pair, []) if place[0] is not answer]
            if kept:
                self._places[pair] = kept
            else:
                self._places.pop(pair, None)


class SuffixProposer:
    """Suffix decoding over bounded lists of places instead of a tree: O(1) per token.

    Requests learn from answers of the same `cache_salt` only. Salts without new answers lose theirs first.
    Source: Oliaro et al., 2024 (SuffixDecoding).
    """

    name = "suffix"

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._max_num_answers = config.suffix_decoding_max_cached_requests
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._indices: dict[int, NgramIndex] = {}  # by handle
        self._memories: dict[str | None, AnswerMemory] = {}  # by cache_salt; which last got an answer is last
        self._num_answers = 0  # in all memories

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        token_ids = request.token_ids
        if len(token_ids) <= WIDTH:
            return ()
        index = self._indices.get(request.handle)
        if index is None:
            index = self._indices[request.handle] = NgramIndex(token_ids, WIDTH)
        if not index.extend(len(token_ids) - 1):
            return ()
        places = self._find_places(request, index)
        if not places:
            return ()
        longest = max(place.length for place in places)
        limit = min(limit, int(self._factor * longest), self._depth - longest)
        # Shorter matches vote as well: one place alone says little about probabilities.
        return self._vote([place for place in places if 2 * place.length >= longest], limit)

    def forget(self, request: Request) -> None:
        """Keep the answer for later requests of the tenant."""
        if self._indices.pop(request.handle, None) is None or not self._max_num_answers:
            return
        memory = self._memories.pop(request.salt, None) or AnswerMemory()
        self._memories[request.salt] = memory
        memory.add(request.token_ids[request.num_prompt_tokens :])
        self._num_answers += 1
        if self._num_answers > self._max_num_answers:
            salt, oldest = next(iter(self._memories.items()))
            oldest.drop_oldest()
            self._num_answers -= 1
            if not len(oldest):
                del self._memories[salt]

    def _find_places(self, request: Request, index: NgramIndex) -> list[Place]:
        token_ids, end = request.token_ids, request.num_tokens
        pair = tuple(token_ids[-WIDTH:])
        found: list[tuple[Sequence[int], int]] = [
            (token_ids, place) for place in index.find(pair)[-MAX_COMPARED:]
        ]
        if (memory := self._memories.get(request.salt)) is not None:
            memory.learn()
            found += memory.find(pair)[-MAX_COMPARED:]
        return [
            Place(other, place, count_match(other, place, token_ids, end, self._depth))
            for other, place in found
        ]

    def _vote(self, places: list[Place], limit: int) -> list[int]:
        """Return the majority's continuation, as long as its probability is high enough."""
        drafts: list[int] = []
        total = len(places)
        for offset in range(limit):
            votes = Counter(
                place.token_ids[place.end + offset]
                for place in places
                if place.end + offset < len(place.token_ids)
            )
            if not votes:
                break
            token_id, count = votes.most_common(1)[0]
            if count < self._min_prob * total:
                break
            drafts.append(token_id)
            places = [
                place
                for place in places
                if place.end + offset < len(place.token_ids)
                and place.token_ids[place.end + offset] == token_id
            ]
        return drafts
