"""A fake engine whose queue is full at first."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engine import EngineOverloaded, RequestOutput
from tests.fakes import FakeEngine


@dataclass
class BusyEngine(FakeEngine):
    """Refuses that many requests, then plays on as the fake does."""

    num_refused: int = 0

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[RequestOutput]:
        if self.num_refused:
            self.num_refused -= 1
            raise EngineOverloaded("the queue is full", retry_after_s=0.0)
        async with aclosing(super().generate(*args, **options)) as outputs:
            async for output in outputs:
                yield output
