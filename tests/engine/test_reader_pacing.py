"""ReaderPacing: nobody waits without need, nobody is forgotten, and a round that takes long is followed by a rest."""

from __future__ import annotations

import asyncio
import time

from engine.actors.reader_pacing import ReaderPacing
from tests.waiting import wait_until


class Reader:
    """Is woken in rounds; `works_s` is how long it then keeps the loop."""

    def __init__(self, works_s: float = 0.0) -> None:
        self.wake_times: list[float] = []
        self._works_s = works_s

    def wake(self) -> None:
        self.wake_times.append(time.monotonic())
        if self._works_s:
            asyncio.get_running_loop().call_soon(time.sleep, self._works_s)

    @property
    def num_wakes(self) -> int:
        return len(self.wake_times)


async def test_a_quiet_loop_wakes_at_once() -> None:
    reader = Reader()
    ReaderPacing().wake([reader])
    assert reader.num_wakes == 1


async def test_news_during_a_round_come_with_the_next_one_and_once() -> None:
    pacing, reader = ReaderPacing(), Reader()
    group = [reader]
    for _ in range(5):
        pacing.wake(group)
    assert reader.num_wakes == 1
    await wait_until(lambda: reader.num_wakes == 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert reader.num_wakes == 2


async def test_no_group_is_forgotten() -> None:
    pacing, readers = ReaderPacing(), [Reader() for _ in range(4)]
    for reader in readers:
        pacing.wake([reader])
    await wait_until(lambda: all(reader.num_wakes == 1 for reader in readers))


async def test_a_long_round_is_followed_by_a_rest_as_long() -> None:
    pacing, reader = ReaderPacing(), Reader(works_s=0.03)
    pacing.wake([reader])
    pacing.wake([reader])
    await wait_until(lambda: reader.num_wakes == 2)
    first, second = reader.wake_times
    assert second - first >= 0.055


async def test_after_a_rest_without_news_the_loop_is_quiet_again() -> None:
    pacing, reader = ReaderPacing(), Reader()
    group = [reader]
    for count in (1, 2, 3):
        await wait_until(lambda: not pacing._is_busy)
        pacing.wake(group)
        assert reader.num_wakes == count
