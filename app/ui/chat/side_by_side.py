"""Answers of several adapters to one question, in one batch of the engine, shown as one text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from app.concurrency import cancel_all
from engine import RequestOutput


async def join_streams(streams: Mapping[str, AsyncGenerator[RequestOutput]]) -> AsyncGenerator[RequestOutput]:
    """Yield all answers so far under their names whenever one grows; closing this closes the streams."""
    latest: dict[str, RequestOutput] = {}
    reads = {asyncio.ensure_future(anext(stream)): name for name, stream in streams.items()}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                name = reads.pop(read)
                latest[name] = read.result()
                if not latest[name].finished:
                    reads[asyncio.ensure_future(anext(streams[name]))] = name
            yield join_outputs({name: latest[name] for name in streams if name in latest}, is_over=not reads)
    finally:
        await cancel_all(reads)
        for stream in streams.values():
            await stream.aclose()


def join_outputs(outputs: Mapping[str, RequestOutput], is_over: bool) -> RequestOutput:
    """Return one output with the texts of all, and without token probabilities."""
    first = next(iter(outputs.values()))
    choices = {name: output.outputs[0] for name, output in outputs.items()}
    text = "\n\n".join(f"**{name}**\n\n{choice.text}" for name, choice in choices.items())
    token_ids = [token_id for choice in choices.values() for token_id in choice.token_ids]
    whole = replace(first.outputs[0], text=text, token_ids=token_ids, logprobs=None)
    return replace(first, outputs=[whole], finished=is_over)
