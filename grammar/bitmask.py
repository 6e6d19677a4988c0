"""Bitmasks: int32 [rows, ceil(V/32)], bit 1 = token allowed; bits beyond the vocabulary are 0."""

from collections.abc import Sequence

import numpy as np

from .backend import BatchFiller, DraftFiller, Matcher


def allocate_bitmask(num_rows: int, vocab_size: int) -> np.ndarray:
    """Return a bitmask that allows everything below `vocab_size`."""
    num_words, rest = divmod(vocab_size, 32)
    bitmask = np.full((num_rows, num_words + (rest > 0)), -1, np.int32)
    if rest:
        bitmask[:, -1] = (1 << rest) - 1
    return bitmask


def fill_bitmask(matchers: Sequence[Matcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
    """Write the mask of each matcher into its row; matchers of different backends may mix.

    One call per backend, made without the GIL where the engine can. A matcher must not stand twice in it.
    """
    if len(matchers) != len(rows):
        raise ValueError(f"{len(matchers)} matchers need as many rows, got {len(rows)}")
    groups: dict[int, tuple[BatchFiller, list[Matcher], list[int]]] = {}
    for matcher, row in zip(matchers, rows, strict=True):
        if matcher.is_terminated():
            matcher.fill_next_token_bitmask(bitmask, row)
            continue
        filler = matcher.filler
        group = groups.setdefault(id(filler), (filler, [], []))
        group[1].append(matcher)
        group[2].append(row)
    for filler, members, member_rows in groups.values():
        filler.fill(members, member_rows, bitmask)


def fill_draft_bitmask(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], rows: Sequence[int], bitmask: np.ndarray
) -> list[int]:
    """Write the masks of drafted tokens, for their verification: in one call where the engine can.

    Matcher i's mask after its first p draft tokens goes to row rows[i] + p. A draft ends before the first token
    that is not allowed, and after an EOS. The matchers stay as they are.

    Args:
        drafts: one list of token ids for each matcher; an empty one asks for a single mask.
        rows: for each matcher the first of len(draft) + 1 rows.

    Returns:
        For each matcher, how many draft tokens its grammar allows; so many rows and one more are written.
    """
    if not len(matchers) == len(drafts) == len(rows):
        raise ValueError(
            f"{len(matchers)} matchers, {len(drafts)} drafts and {len(rows)} rows do not belong together"
        )
    num_accepted = [0] * len(matchers)
    groups: dict[int, list[int]] = {}
    for index, matcher in enumerate(matchers):
        groups.setdefault(id(matcher.filler), []).append(index)
    for members in groups.values():
        filler = matchers[members[0]].filler
        if isinstance(filler, DraftFiller):
            plain = [
                i
                for i in members
                if drafts[i] and not matchers[i].is_terminated() and filler.is_text(drafts[i])
            ]
            if plain:
                own = [matchers[i] for i in plain], [drafts[i] for i in plain], [rows[i] for i in plain]
                for i, count in zip(plain, filler.fill_drafts(*own, bitmask), strict=True):
                    num_accepted[i] = count
            members = sorted({*members} - {*plain})
        _fill_step_by_step(matchers, drafts, rows, bitmask, members, num_accepted)
    return num_accepted


def _fill_step_by_step(
    matchers: Sequence[Matcher],
    drafts: Sequence[Sequence[int]],
    rows: Sequence[int],
    bitmask: np.ndarray,
    members: list[int],
    num_accepted: list[int],
) -> None:
    """Fill the masks of some of the matchers position by position."""
    live, position = members, 0
    try:
        while live:
            fill_bitmask([matchers[i] for i in live], [rows[i] + position for i in live], bitmask)
            for i in live:
                has_next = position < len(drafts[i]) and not matchers[i].is_terminated()
                if has_next and matchers[i].accept_token(drafts[i][position]):
                    num_accepted[i] = position + 1
            position += 1
            live = [i for i in live if num_accepted[i] == position]
    finally:  # Roll back even if a matcher fails.
        for i in members:
            if num_accepted[i]:
                matchers[i].rollback(num_accepted[i])
