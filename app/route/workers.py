"""Worker: a server behind the router, and the probes that find out whether it is ready and which models it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

logger = logging.getLogger("troupe.route")

PROBE_TIMEOUT_S = 5.0
NO_SUCH_ROUTE = (404, 405, 501)


@dataclass(slots=True)
class Worker:
    """A server and the result of its last probe."""

    index: int
    url: str
    is_ready: bool = False
    error: str = "not probed yet"
    models: list[dict[str, Any]] = field(default_factory=list)  # as /v1/models lists them
    wants_probe: asyncio.Event = field(default_factory=asyncio.Event)  # set: probe at once

    def serves(self, model: object) -> bool:
        """Return whether it lists the model; a worker that lists none may serve any."""
        return not self.models or any(each.get("id") == model for each in self.models)


async def watch(
    worker: Worker, session: aiohttp.ClientSession, interval_s: float, note_return: Callable[[int], None]
) -> None:
    """Probe a worker for as long as the router runs.

    Args:
        note_return: called with the worker's index when it becomes ready.
    """
    while True:
        error = await probe(worker, session)
        if (error == "") != worker.is_ready:
            logger.log(logging.WARNING if error else logging.INFO, "%s is %s", worker.url, error or "ready")
            worker.is_ready = not error
            if worker.is_ready:
                note_return(worker.index)
        worker.error = error
        worker.wants_probe.clear()
        try:
            await asyncio.wait_for(worker.wants_probe.wait(), interval_s)
        except TimeoutError:
            continue


async def probe(worker: Worker, session: aiohttp.ClientSession) -> str:
    """Ask for health and models. Returns why the worker is not ready; empty if it is."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        # Prefer /readyz where it exists: it reports a server that starts or sleeps as not ready.
        for path in ("/readyz", "/health"):
            async with session.get(worker.url + path, timeout=timeout) as response:
                if response.status not in (200, *NO_SUCH_ROUTE):
                    return f"not ready: {path} answers {response.status}"
                if response.status == 200:
                    break
        async with session.get(worker.url + "/v1/models", timeout=timeout) as response:
            if response.status != 200:
                return f"not ready: /v1/models answers {response.status}"
            listed = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return f"not reachable: {str(error) or type(error).__name__}"
    found = listed.get("data") if isinstance(listed, dict) else None
    worker.models = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return ""


def merge_models(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Return the models of the ready workers, each once."""
    found: dict[object, dict[str, Any]] = {}
    for worker in workers:
        if worker.is_ready:
            found |= {each.get("id"): each for each in worker.models}
    return list(found.values())
