"""The core inside calls of the real package `spaces`; `space.py` says what stands in for the rest."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.app.api.harness import needs_model
from tests.app.zero_gpu.harness import Space, run_space, write_alone
from tests.app.zero_gpu.space import TOKEN_HEADER, make_token
from tests.measure.ui_load import Page, read_form
from tests.waiting import wait_until

pytest.importorskip("spaces", reason="the package spaces is not installed")
pytestmark = [needs_model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
LENGTH = 80


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with run_space(60) as running:  # its leases end by what the tests do
        yield running


async def rest(space: Space) -> None:
    """Wait until no lease is open."""
    await wait_until(lambda: len(space.list_events("scheduled")) == len(space.list_events("released")))


@pytest.mark.soak
async def test_killed_leases_change_no_text_and_visitors_open_them_in_turn(space: Space) -> None:
    visitors = ["ann", "ben", "cleo"]
    writing = [asyncio.ensure_future(space.write(number, LENGTH, name)) for number, name in enumerate(visitors)]
    await wait_until(lambda: bool(space.list_events("allowed")))
    space.kill_core()  # before it has a model
    while await space.count_tokens() < LENGTH // 2:
        await asyncio.sleep(0.05)
    space.kill_core()
    texts = await asyncio.gather(*writing)
    assert texts == await write_alone(range(3), LENGTH)
    assert len({*space.list_events("scheduled")[:2]}) == 2


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (make_token("dan", quota_s=0), "You have exceeded your ZeroGPU quota (60s requested vs. 0s left)"),
        (None, f"lent to its visitors: use its page, or send the header {TOKEN_HEADER}"),
    ],
)
async def test_who_gets_no_lease_is_told_why(space: Space, token: str | None, message: str) -> None:
    await rest(space)
    status, reply = await space.complete(0, 5, token)
    assert (status, reply["error"]["code"]) == (429, "gpu_not_lent")
    assert message in reply["error"]["message"]


async def test_an_event_of_the_page_opens_a_lease_with_the_visitors_quota(space: Space) -> None:
    await rest(space)
    async with aiohttp.ClientSession(headers={TOKEN_HEADER: make_token("eve")}) as session:
        async with session.get(f"{space.url}/config") as reply:
            form = read_form(await reply.json())
        page = Page(session, space.url, form)
        running = asyncio.create_task(page.run(lambda: len(page.seen.times) > 2))
        await wait_until(lambda: "eve" in space.list_events("scheduled"))
        await running
