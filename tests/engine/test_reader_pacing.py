"""ReaderPacing: nobody waits without need, nobody is forgotten, and a round that takes long is followed by a rest."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine import SamplingParams
from engine.actors.detokenizer import DetokenizerActor
from engine.actors.reader_pacing import ReaderPacing
from engine.core.detokenizer import Detokenizer, NoText
from engine.messages import AddRequest, NewTokens, RequestTokens
from engine.metrics import Metrics
from engine.output_stream import OutputStream
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


class SilentTokenizer:
    """Tokens without a text, so that no stop string ever comes."""

    eos_token_ids = (0,)

    def make_text(self, prompt_token_ids: object, skip_special_tokens: bool) -> NoText:
        return NoText()

    def token_piece(self, token_id: int) -> str:
        return ""


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(output_kind="delta"), NewTokens([], ["r"], [5])),
        (SamplingParams(output_kind="delta", stop=("x",)), NewTokens([], ["r"], [5])),
        (SamplingParams(output_kind="delta", stop_token_ids=(7,)), NewTokens([RequestTokens("r", [5])])),
    ],
    ids=["plain", "stop string", "stop token"],
)
async def test_every_kind_of_row_wakes_its_reader_in_rounds(
    params: SamplingParams, message: NewTokens
) -> None:
    metrics = Metrics()
    stream = OutputStream("r", None, [1], params, 0.0, None, metrics)
    actor = DetokenizerActor(Detokenizer(SilentTokenizer()), {"r": (stream, 0)}, metrics, lambda abort: None)
    actor.handle(AddRequest("r", [1], params, 0, 0.0))
    actor.handle(message)
    await stream.get()
    actor.handle(message)
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    assert not reader.done(), "the first round is not over"
    assert (await reader).outputs[0].token_ids == [5]
